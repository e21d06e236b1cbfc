"""What the tests of re-routed pipelines share: a run with faults against the same job without."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from harness import Jobs

from shared_core.faults import Fault
from shared_core.testing.runner import JobResult, compare

SCRIPT = "rerouted_pipe.py"
ORDERED = {"SWIFT_RECOVERY_ON_FAILURE": "reroute", "SWIFT_RECOVERY_REROUTE_REDUCTION": "ordered"}


def go(
    jobs: Jobs, faults: Sequence[Fault], args: Sequence[str] = (), nproc: int = 4, env: dict[str, str] | None = None
) -> JobResult:
    """Train with faults; equal by hash, on every rank that reports, to the same job without."""
    given = ORDERED | (env or {})
    reference = jobs.reference(SCRIPT, nproc=nproc, args=args, env=given, launcher="swiftrun")
    result = jobs.run(SCRIPT, nproc=nproc, args=args, env=given, faults=faults)
    away = {fault.rank for fault in faults} - result.reports.keys()  # the others may end before a newcomer comes
    kept = {rank: report for rank, report in reference.reports.items() if rank not in away}
    compare(result, replace(reference, reports=kept))
    return result

"""What the tests of re-routed pipelines share: a run with faults against the same job without."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from harness import Jobs

from shared_core.faults import Fault
from tests.support.runner import JobResult, compare

SCRIPT = "rerouted_pipe.py"
ORDERED = {"SWIFT_RECOVERY_ON_FAILURE": "reroute", "SWIFT_RECOVERY_REROUTE_REDUCTION": "ordered"}


def kill(
    rank: int, step: int, nth: int = 4, point: str = "reroute.action", incarnation: int = 0, after: int | None = None
) -> Fault:
    """The worker fails in a step, by default before its fourth action."""
    return Fault(rank, step, point, "SIGKILL", nth=nth, incarnation=incarnation, after=after)


def alike(result: JobResult, reference: JobResult, faults: Sequence[Fault]) -> None:
    """Equal by hash, on every rank that reports; the others may end before a replacement comes."""
    away = {fault.rank for fault in faults} - result.reports.keys()
    kept = {rank: report for rank, report in reference.reports.items() if rank not in away}
    compare(result, replace(reference, reports=kept))


def go(
    jobs: Jobs, faults: Sequence[Fault], args: Sequence[str] = (), nproc: int = 4, env: dict[str, str] | None = None
) -> JobResult:
    """Train with faults; :func:`alike` to the same job without."""
    given = ORDERED | (env or {})
    reference = jobs.reference(SCRIPT, nproc=nproc, args=args, env=given, launcher="swiftrun")
    result = jobs.run(SCRIPT, nproc=nproc, args=args, env=given, faults=faults)
    alike(result, reference, faults)
    return result


def carry_on(
    jobs: Jobs, faults: Sequence[Fault], args: Sequence[str] = (), nproc: int = 4, env: dict[str, str] | None = None
) -> JobResult:
    """As :func:`go`; a fault strikes, if there are any, and nobody goes back to a checkpoint."""
    result = go(jobs, faults, args, nproc, env)
    assert (result.struck or not faults) and not result.kinds("restart"), result.tail()
    return result


def once(
    jobs: Jobs, faults: Sequence[Fault], args: Sequence[str] = (), nproc: int = 4, env: dict[str, str] | None = None
) -> JobResult:
    """As :func:`carry_on`, with no forward repeated by the process that made it."""
    result = carry_on(jobs, faults, args, nproc, env)
    repeated = {rank: report["extra"]["repeated"] for rank, report in result.reports.items()}
    assert max(repeated.values()) == 1, (repeated, result.tail())
    return result

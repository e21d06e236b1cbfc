"""Pipelines of Lightning's and Accelerate's go on without a lost worker, and let a newcomer in where all are needed."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from harness import Jobs, most
from rerouted import ORDERED

from shared_core.testing import Fault
from shared_core.testing.runner import JobResult, compare

pytest.importorskip("deepspeed")

LIGHTNING = "lit_pipe.py"
#: Three steps an epoch, after each of which there are a validation, a checkpoint and a row of the log: ranks 0 and 1
#: are the first stage. Rows of the log of steps that rank 0 was not there for are missing.
CASES: dict[str, tuple[list[str], list[Fault]]] = {
    "first_and_last_stage": (
        [],
        [Fault(1, 2, "reroute.action", "SIGKILL", nth=3), Fault(3, 6, "reroute.action", "SIGKILL", nth=4)],
    ),
    "rank_0_in_the_last_step": ([], [Fault(0, 6, "reroute.action", "SIGKILL", nth=5)]),
    "at_the_step": ([], [Fault(2, 3, "reroute.step", "SIGKILL"), Fault(1, 4, "reroute.reduce", "SIGKILL")]),
    "not_validated": (["--no-validation"], [Fault(3, 3, "reroute.action", "SIGKILL", nth=4)]),
    "accumulate": (["--accumulate", "3"], [Fault(3, 6, "reroute.action", "SIGKILL", nth=2)]),
    "calls": (["--calls"], [Fault(1, 3, "reroute.action", "SIGKILL", nth=2)]),
}


def run(jobs: Jobs, script: str, faults: Sequence[Fault], args: Sequence[str]) -> JobResult:
    """Train with faults; equal by hash to stock DeepSpeed, on every rank, and nobody goes back to a checkpoint."""
    reference = jobs.reference(script, nproc=4, args=args)
    result = jobs.run(script, nproc=4, args=args, faults=faults, env=ORDERED)
    compare(result, reference)
    assert not result.kinds("restart") and len(result.struck) == len(faults), result.tail()
    assert len(result.kinds("let_in")) == len(faults) and result.kinds("rerouted"), result.tail()
    return result


@pytest.mark.parametrize("name", most(CASES, *(CASES.keys() - {"first_and_last_stage"})))
def test_a_stage_is_lost_under_lightning(name: str, jobs: Jobs) -> None:
    args, faults = CASES[name]
    run(jobs, LIGHTNING, faults, ["--plain", *args])

"""Both ends of a pipeline are lost, which alone draw its data: the same bits as without, and nobody starts again."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from harness import Jobs, most
from rerouted import go

from shared_core.faults import Fault
from shared_core.testing.runner import JobResult

pytest.importorskip("deepspeed")


def kill(rank: int, step: int, nth: int, point: str = "reroute.action", incarnation: int = 0) -> Fault:
    return Fault(rank, step, point, "SIGKILL", nth=nth, incarnation=incarnation)


def check(jobs: Jobs, faults: Sequence[Fault], args: Sequence[str] = (), nproc: int = 4) -> JobResult:
    """As :func:`go`; all faults strike, and nobody goes back to a checkpoint."""
    result = go(jobs, faults, args, nproc)
    assert not result.kinds("restart"), result.tail()
    assert len(result.struck) == len(faults), result.tail()
    return result


#: Two pipelines of two stages: ranks 0 and 2 are one, 1 and 3 the other. The row of a step is 9 actions.
CASES = {
    "forward": [kill(0, 3, 2), kill(2, 3, 2)],
    "backward": [kill(1, 3, 7), kill(3, 3, 6)],
    "sum": [kill(0, 3, 1, "reroute.reduce"), kill(2, 3, 9)],
    "one_after_the_other": [kill(1, 2, 5), kill(3, 3, 3)],
    "the_last_stage_first": [kill(2, 2, 5), kill(0, 3, 3)],
    "between_steps": [kill(0, 3, 1, "batch_top"), kill(2, 3, 1, "batch_top")],
    "one_between_steps": [kill(3, 3, 8), kill(1, 4, 1, "batch_top")],
    "before_any_data": [kill(0, 3, 1), kill(2, 3, 1)],
}


@pytest.mark.parametrize("name", most(CASES, *(CASES.keys() - {"backward", "one_after_the_other"})))
def test_both_ends_of_a_pipeline_are_lost(jobs: Jobs, name: str) -> None:
    check(jobs, CASES[name], ("--clip", "1.0"))

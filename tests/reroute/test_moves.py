"""Losses of one stage: a survivor of another stage computes there, and all bits stay those of the run without."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from harness import Jobs
from rerouted import go

from shared_core.faults import Fault
from shared_core.testing.runner import JobResult

pytest.importorskip("deepspeed")

#: Newcomers are withheld.
WITHHELD = {"SWIFT_RECOVERY_REROUTE_REJOIN_AFTER_S": "600"}
LONG = ("--steps", "14", "--work-ms", "10")


def kill(rank: int, step: int, nth: int = 4, point: str = "reroute.action") -> Fault:
    return Fault(rank, step, point, "SIGKILL", nth=nth)


def check(
    jobs: Jobs, faults: Sequence[Fault], args: Sequence[str] = LONG, nproc: int = 6, env: dict[str, str] | None = None
) -> JobResult:
    """As ``go``, and nobody goes back to a checkpoint."""
    result = go(jobs, faults, args, nproc, WITHHELD if env is None else env)
    assert result.struck, result.tail()
    assert not result.kinds("restart"), result.tail()
    return result


def moves(result: JobResult) -> list[list[list[list[int]]]]:
    """Moves that were made."""
    return [event.fields["moves"] for event in result.kinds("moved") if "why_not" not in event.fields]


def test_a_survivor_takes_a_place_of_a_stage_that_has_lost_two(jobs: Jobs) -> None:
    result = check(jobs, [kill(3, 4), kill(4, 4, 6)], (*LONG, "--clip", "0.5", "--decay", "0.01"))
    assert moves(result) == [[[[2, 0], [0, 1]]]], result.tail()


def test_losses_one_after_the_other_and_the_mover_is_home_before_newcomers_are_there(jobs: Jobs) -> None:
    """Evaluation needs all: newcomers come, of both stages, from replicas that have moved meanwhile."""
    env = {"SWIFT_RECOVERY_REROUTE_REJOIN_AFTER_S": "3"}
    result = check(jobs, [kill(3, 3), kill(4, 5)], (*LONG, "--evaluate-after", "13"), env=env)
    assert len(moves(result)) == 1 and len(result.kinds("let_in")) == 2, result.tail()

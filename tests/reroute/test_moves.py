"""Failures of one stage: a survivor of another stage computes there, and all bits stay those of the run without."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from harness import Jobs
from rerouted import carry_on, go, kill

from shared_core.faults import ANY_STEP, Fault
from tests.support.runner import JobResult

pytest.importorskip("deepspeed")

#: Replacements are withheld.
WITHHELD = {"SWIFT_RECOVERY_REROUTE_REJOIN_AFTER_S": "600"}
LONG = ("--steps", "14", "--work-ms", "10")


def check(
    jobs: Jobs, faults: Sequence[Fault], args: Sequence[str] = LONG, nproc: int = 6, env: dict[str, str] | None = None
) -> JobResult:
    """As ``carry_on``, by default with three pipelines and without replacements."""
    return carry_on(jobs, faults, args, nproc, WITHHELD if env is None else env)


def moves(result: JobResult) -> list[list[list[list[int]]]]:
    """Moves that were made."""
    return [event.fields["moves"] for event in result.kinds("moved") if "why_not" not in event.fields]


@pytest.mark.nightly
def test_a_stage_loses_two_at_once(jobs: Jobs) -> None:
    """Two move, as the other stage has half the work. Of those rank 0 has drawn the labels of a pipeline whose last
    stage fails, and computes in the last stage of another. Equal, too, at those that never come home.
    """
    moved = [[[2, 0], [0, 1]], [[0, 0], [1, 1]]]
    args = (*LONG, "--clip", "0.5", "--several", "--dropout", "0")
    result = check(jobs, [kill(3, 4), kill(4, 4, 6)], args)
    assert moves(result) == [moved], result.tail()
    assert {rank for (rank, _), _ in moved} <= result.reports.keys(), result.tail()  # of the first stage


@pytest.mark.nightly
def test_failures_one_after_the_other_and_all_are_home_when_replacements_come(jobs: Jobs) -> None:
    """A sum over all workers waits for them."""
    env = {"SWIFT_RECOVERY_REROUTE_REJOIN_AFTER_S": "3"}
    result = check(jobs, [kill(3, 3), kill(4, 5)], (*LONG, "--sum-after", "13"), env=env)
    assert len(moves(result)) == 1 and len(result.kinds("admitted")) == 2, result.tail()


@pytest.mark.nightly
def test_nobody_moves_where_that_is_not_asked_for(jobs: Jobs) -> None:
    off = WITHHELD | {"SWIFT_RECOVERY_REROUTE_NORMALISE": "false"}
    assert not check(jobs, [kill(3, 4), kill(4, 4, 6)], env=off).kinds("moved")


@pytest.mark.nightly
def test_nobody_moves_where_layers_are_tied(jobs: Jobs) -> None:
    assert not check(jobs, [kill(3, 4), kill(4, 4, 6)], (*LONG, "--tied", "two")).kinds("moved")


@pytest.mark.nightly
def test_nobody_moves_where_hooks_would_be_missed(jobs: Jobs) -> None:
    """The optimizer that a worker makes for another stage has none; all are told when the job begins."""
    result = check(jobs, [kill(3, 4), kill(4, 4, 6)], (*LONG, "--hook", "optimizer"))
    assert not result.kinds("moved") and len(result.told("the script has hooks on its optimizer")) == 1, result.tail()


@pytest.mark.nightly
def test_nobody_moves_where_layers_have_hooks_of_the_script(jobs: Jobs) -> None:
    """Layers that are rebuilt have none; the event says so."""
    result = check(jobs, [kill(3, 4), kill(4, 4, 6)], (*LONG, "--hook", "layers"))
    assert not moves(result) and "was changed after it was built" in result.kinds("moved")[0].fields["why_not"]


@pytest.mark.nightly
def test_who_has_moved_gets_slow(jobs: Jobs) -> None:
    """Its durations are of the place at which it computes. Workers plan when they switch; see test_drifting_jobs."""
    env = WITHHELD | {"SWIFT_RECOVERY_REROUTE_AHEAD": "0"}
    slow = ("--steps", "36", "--work-ms", "10", "--straggler", "2", "14", "40")
    result = check(jobs, [kill(3, 4), kill(4, 4, 6)], slow, env=env)
    assert moves(result) == [[[[2, 0], [0, 1]]]], result.tail()
    planned = [event.fields for event in result.kinds("planned")]
    drifts = [tuple(drift) for fields in planned for drift in fields.get("drifted", ())]
    assert any(drift[:3] == (0, 1, "F") and drift[4] > drift[3] for drift in drifts), (drifts, result.tail())


@pytest.mark.nightly
def test_the_last_worker_that_belongs_to_the_stage_fails(jobs: Jobs) -> None:
    """Who has moved there could continue, and give its state to no replacement: all go back to the beginning."""
    result = go(jobs, [kill(3, 4), kill(4, 4, 6), kill(5, 12)], LONG, 6, WITHHELD)
    assert len(moves(result)) >= 1 and result.kinds("restart"), result.tail()


#: Three stages, of which the one in the middle loses two: so no pipeline loses both its ends.
THREE = ("--stages", "3", "--steps", "16", "--work-ms", "40")
MIDDLE = [kill(3, 4), kill(4, 4, 6)]


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("nth", [1, 2], ids=("before", "with-the-state"))
@pytest.mark.parametrize("rank", [1, 2])
def test_a_failure_while_workers_move(jobs: Jobs, rank: int, nth: int) -> None:
    """Rank 2 is the one that moves."""
    again = Fault(rank, ANY_STEP, "reroute.move", "SIGKILL", nth=nth)
    result = check(jobs, [*MIDDLE, again], THREE, 9)
    assert len(result.struck) == 3, result.tail()


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_who_gives_the_state_fails(jobs: Jobs) -> None:
    """It is the only one that has it."""
    result = go(jobs, [*MIDDLE, Fault(5, ANY_STEP, "reroute.give", "SIGKILL")], THREE, 9, WITHHELD)
    assert result.kinds("restart"), result.tail()


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_who_has_moved_moves_on(jobs: Jobs) -> None:
    """The first stage has most to compute: it gets the worker that has moved already."""
    result = check(jobs, [*MIDDLE, kill(0, 18)], (*THREE, "--steps", "44", "--work-ms", "10"), 9)
    assert moves(result) == [[[[2, 2], [0, 1]]], [[[2, 2], [0, 0]]]] and 8 in result.reports, result.tail()


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("rank", [0, 1, 2, 6, 7, 8])
def test_another_failure_at_any_time(jobs: Jobs, rank: int) -> None:
    """Before or after somebody has moved; rank 2 is the one that moves first."""
    seed = random.randrange(1 << 30)
    draw = random.Random(seed)
    again = kill(rank, draw.randint(5, 14), draw.randint(1, 9))
    print(f"seed {seed}: {again}")
    check(jobs, [*MIDDLE, again], THREE, 9)

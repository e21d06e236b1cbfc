"""Both ends of a pipeline fail, which alone draw its data: the same bits as without, and nobody starts again."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from harness import Jobs
from random_jobs import some_failed
from rerouted import ORDERED, SCRIPT, carry_on, go, kill

from shared_core.faults import ANY_STEP, Fault
from shared_core.schedule.problem import Variant
from shared_core.schedule.schedule import PlannedWorker, Topology
from tests.support.runner import JobResult, compare

pytest.importorskip("deepspeed")


def check(jobs: Jobs, faults: Sequence[Fault], args: Sequence[str] = (), nproc: int = 4) -> JobResult:
    """As :func:`carry_on`; all faults strike."""
    result = carry_on(jobs, faults, args, nproc)
    assert len(result.struck) == len(faults), result.tail()
    return result


#: Two pipelines of two stages: ranks 0 and 2 are one, 1 and 3 the other. The row of a step is 9 actions.
CASES = {
    "backward": [kill(1, 3, 7), kill(3, 3, 6)],
    "one_after_the_other": [kill(1, 2, 5), kill(3, 3, 3)],
    "between_steps": [kill(0, 3, 1, "step_boundary"), kill(2, 3, 1, "step_boundary")],
    "before_any_data": [kill(0, 3, 1), kill(2, 3, 1)],
}


#: Both ends fail, and the replacement of the last one waits until that of the first is in; who fails besides.
HELD: dict[str, list[Fault]] = {
    "nobody": [],
    "the_replacement_while_admitted": [Fault(0, ANY_STEP, "recovery.exchanged", "SIGKILL", incarnation=1)],
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", HELD)
def test_the_first_end_that_is_back_is_enough(jobs: Jobs, name: str) -> None:
    args = ("--clip", "1.0", "--steps", "12", "--sum-after", "11", "--hold", "2")
    result = check(jobs, [kill(0, 3, 2), kill(2, 3, 2), *HELD[name]], args)
    boundaries = {event.rank: event.fields["boundary"] for event in result.kinds("admitted")}
    assert boundaries.keys() == {0, 2} and boundaries[0] != boundaries[2], result.tail()


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["a_survivor", "the_donor"])
def test_a_replacement_does_not_wait_for_another(jobs: Jobs, name: str) -> None:
    """Of two workers of three pipelines; the others train on while the second is still starting."""
    faults = {
        "a_survivor": [Fault(3, ANY_STEP, "survivor_group.admit", "SIGKILL")],
        "the_donor": [Fault(1, ANY_STEP, "recovery.connected", "SIGKILL")],
    }[name]
    args = ("--steps", "40", "--copies", "5:2:1", "--sum-after", "40", "--hold", "5")
    result = check(jobs, [kill(0, 3, 2), kill(5, 3, 4), *faults], args, nproc=6)
    boundaries = {event.rank: event.fields["boundary"] for event in result.kinds("admitted")}
    assert boundaries.keys() == {0, 5, *(fault.rank for fault in faults)} and boundaries[0] != boundaries[5], (
        result.tail()
    )


def sums(rank: int) -> Fault:
    """It fails before its stage has its sum of gradients, when the first of the faults has struck."""
    return kill(rank, 4, 1, "reroute.reduce", after=0)


#: Neighbors in a pipeline fail when the stage of the first fault has made its update and that of the others has no
#: sum: arguments, number of workers, faults. In step 4, because at the end of step 3 all wait for all.
NEIGHBORS: dict[str, tuple[Sequence[str], int, list[Fault]]] = {
    "the_last_stage_is_ahead": ((), 4, [kill(2, 5, 1), sums(0)]),
    "the_first_stage_is_in_the_next_step": ((), 4, [kill(0, 5, 3), sums(2)]),
    "an_update_that_may_be_taken_back": (("--clip", "1000"), 4, [kill(2, 4, 1, "update.after"), sums(0)]),
    "the_middle_stage_is_behind": (("--stages", "3"), 6, [kill(0, 5, 3), sums(2), kill(4, 5, 1, after=0)]),
    # Rank 4 makes again what ranks 0 and 3 had passed to each other, until it fails too.
    "who_makes_it_again_fails": ((), 6, [kill(3, 5, 1), sums(0), kill(4, 5, 3, "reroute.forward")]),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", NEIGHBORS)
def test_neighbors_fail_while_one_stage_has_no_sum(jobs: Jobs, name: str) -> None:
    """A stage that has made its update makes again what the other one needs, with the parameters of before."""
    args, nproc, faults = NEIGHBORS[name]
    result = check(jobs, faults, args, nproc)
    ahead = {event.rank for event in result.kinds("rerouted") if event.fields["step"] > 3}  # counted from 0
    again = {event.rank for event in result.kinds("took_over") if event.fields["step"] == 3}
    assert not ahead or ahead & again, result.tail()


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("model", ["--clip=1.0", "--bf16 --zero=1"])
@pytest.mark.parametrize("plan", list(Variant))
@pytest.mark.parametrize(("first", "second"), [(2, 0), (0, 2)])
def test_neighbors_fail_anywhere_at_the_end_of_a_step(
    jobs: Jobs, first: int, second: int, plan: Variant, model: str
) -> None:
    """One right before its update, the other before each message of its sum of gradients."""
    for nth in range(1, 8):
        point, later = ("survivor_group.send", 8 + nth) if nth % 2 else ("survivor_group.wait", 6 + nth)
        faults = [kill(first, 3, 1, "reroute.step"), kill(second, 3, later, point)]
        result = go(jobs, faults, model.split(), env={"SWIFT_RECOVERY_REROUTE_PLAN": plan.value})
        assert not result.kinds("restart"), result.tail()


#: The evaluation is call 4, those after it are calls 5 and 6.
EVALUATED = ("--evaluate-after", "3", "--evaluate-again", "2", "--steps", "5")
EVALUATIONS = {
    "last_stage_at_the_end": [kill(3, 4, 1, "reroute.evaluated")],
    "both_ends": [kill(0, 4, 3, "reroute.evaluate"), kill(2, 4, 2, "reroute.evaluate")],
    "one_in_the_step_before": [kill(0, 3, 5), kill(2, 5, 2, "reroute.evaluate")],
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", EVALUATIONS)
def test_workers_fail_in_an_evaluation(jobs: Jobs, name: str) -> None:
    check(jobs, EVALUATIONS[name], EVALUATED)


@pytest.mark.nightly
def test_an_evaluation_without_a_failure_is_deepspeed_s(jobs: Jobs) -> None:
    args = ("--dropout", "0", *EVALUATED)
    compare(jobs.run(SCRIPT, nproc=4, args=args, env=ORDERED), jobs.reference(SCRIPT, nproc=4, args=args))


@pytest.mark.nightly
def test_an_evaluation_and_a_collective_after_it(jobs: Jobs) -> None:
    """The replacements begin at the step boundary of the evaluation, and pass it by."""
    check(jobs, EVALUATIONS["both_ends"], ("--evaluate-after", "3", "--sum-evaluated", "--steps", "5"))


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(12))
def test_any_failures_that_leave_each_stage_a_replica(jobs: Jobs, seed: int) -> None:
    """Two or three pipelines of two or three stages, as the seed says."""
    draw = random.Random(seed)
    topology = Topology(draw.choice((2, 3)), draw.choice((2, 3)), 4)
    failed = some_failed(topology, draw, draw.choice((2, 3, 4)))
    if draw.random() < 0.7:  # both ends of a pipeline among them
        d = draw.randrange(topology.pipelines)
        failed = [PlannedWorker(d, 0), PlannedWorker(d, topology.stages - 1)]
    faults = []
    for worker in failed:
        step = 2 + draw.choice((0, 0, 1))
        point, nth = draw.choice((("reroute.action", draw.randint(1, 8)), ("step_boundary", 1), ("reroute.reduce", 1)))
        faults.append(kill(worker.stage * topology.pipelines + worker.pipeline, step, nth, point))
    print(f"seed {seed}: {topology}, {faults}")
    args = ("--stages", str(topology.stages), "--clip", "1.0", "--steps", "6")
    check(jobs, faults, args, topology.pipelines * topology.stages)

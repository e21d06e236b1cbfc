"""Plans against closed forms, proven optima and their own constraints."""

from __future__ import annotations

import random
from dataclasses import replace

import golden
import pytest
from random_jobs import some_failed, some_times
from timelines import check_times

from benchmarks.lab.check import check
from shared_core.errors import ConfigError, InvalidSchedule
from shared_core.reroute.times import room_of
from shared_core.schedule.greedy import greedy
from shared_core.schedule.optimal import improve
from shared_core.schedule.planner import IterationPlan, plan
from shared_core.schedule.problem import Memory, Problem, Variant, deal
from shared_core.schedule.schedule import Kind, PlannedWorker, Topology, one_f_one_b
from shared_core.schedule.timing import StageTimes, Times, simulate

COUPLED, DECOUPLED, STAGGERED = Variant
#: Closed forms for a failure at each stage of 3 x 4 x 6: slots coupled, slots decoupled, period staggered.
SINGLE = {0: (29, 27, 30), 1: (30, 28, 30), 2: (33, 29, 30), 3: (36, 30, 30)}
DOUBLE = {
    ((1, 2), (0, 1)): (33, 29, 30),
    ((1, 1), (2, 3)): (36, 30, 30),
    ((1, 2), (0, 2)): (60, 56, 57),
    ((0, 1), (1, 1)): (57, 55, 57),
}


def workers(*places: tuple[int, int]) -> tuple[PlannedWorker, ...]:
    return tuple(PlannedWorker(*place) for place in places)


def verified(found: IterationPlan, times: Times | None = None, memory: Memory | None = None) -> float:
    """What the plan minimises, after checking that it can be executed and takes what it says."""
    times = Times() if times is None else times
    check(found.schedule, found.topology, memory=memory or Memory(), ordered=found.ordered)
    timeline = simulate(found.schedule, times, staggered=found.variant is STAGGERED)
    check_times(timeline.rows, times.communication)
    assert (timeline.slots, timeline.period) == pytest.approx((found.slots, found.period))
    for worker, row in found.schedule.rows.items():
        assert row[-1].kind is Kind.OPT and worker not in found.failed
        for action in row[:-1]:
            assert found.host(action.pipeline, action.stage, action.micro_batch) == worker
    return found.period if found.variant is STAGGERED else found.slots


def closed_forms() -> list[tuple[tuple[PlannedWorker, ...], Variant, int]]:
    failures = {((d, s),): forms for s, forms in SINGLE.items() for d in range(3)} | DOUBLE
    return [
        (workers(*failed), variant, forms[at])
        for failed, forms in failures.items()
        for at, variant in enumerate(Variant)
    ]


def test_the_greedy_reaches_the_closed_forms() -> None:
    exact = 0
    for failed, variant, slots in closed_forms():
        cost = verified(plan(golden.TOPOLOGY, failed, variant=variant))
        assert slots <= cost <= 1.05 * slots, (failed, variant)
        exact += cost == slots
    assert exact >= len(closed_forms()) - 3


@pytest.mark.parametrize("failed", [*[workers((1, s)) for s in SINGLE], *[workers(*failed) for failed in DOUBLE]])
def test_exact_plans_reach_the_closed_forms(failed: tuple[PlannedWorker, ...]) -> None:
    for of, variant, slots in closed_forms():
        if of == failed:
            found = plan(golden.TOPOLOGY, failed, variant=variant, time_limit=30)
            assert verified(found) == slots and found.optimal


def test_the_solver_proves_what_the_bound_does_not() -> None:
    """Whole backwards may be shorter than their halves: the solver chooses for each, as the greedy cannot."""
    topology, times = Topology(3, 2, 2), Times((StageTimes(1, 1, 1, 3, 1.5), StageTimes(1, 1, 1, 3)), 0.5)
    first = plan(topology, workers((1, 0)), times=times, variant=DECOUPLED)
    best = plan(topology, workers((1, 0)), times=times, variant=DECOUPLED, time_limit=30)
    assert first.bound < verified(first, times) and not first.optimal
    assert first.bound < best.bound == verified(best, times) < first.slots and best.optimal


def whole_times(rng: random.Random) -> StageTimes:
    return StageTimes(rng.randint(1, 2), rng.randint(1, 3), rng.randint(0, 2), 3, rng.choice([None, 0.5, 1.5, 2]))


@pytest.mark.nightly
def test_no_plan_beats_the_bound() -> None:
    """The solver is not told the bound, and may split every backward."""
    rng, reached = random.Random(1), 0
    for _ in range(60):
        topology = Topology(rng.randint(2, 3), rng.randint(1, 4), rng.randint(1, 4))
        failed = some_failed(topology, rng, rng.randint(0, 2))
        stages = tuple(whole_times(rng) for _ in range(topology.stages))
        own = ((rng.choice(topology.workers()), whole_times(rng)),) if rng.random() < 0.4 else ()
        times = Times(stages, rng.choice([0, 0.5, 1]), data_apart=rng.random() < 0.3, own=own)
        route = deal(topology, failed, times=times)
        problem = Problem(topology, times, rng.choice(list(Variant)), frozenset(failed), route)
        found = greedy(problem, 20_000)
        best = improve(replace(found, bound=0.0), 2.0)
        assert found.bound * (1 - 1e-9) <= best.cost <= found.cost and best.bound <= best.cost * (1 + 1e-9)
        reached += best.optimal
    assert reached > 40


def test_no_failure_is_1f1b() -> None:
    for variant in Variant:
        found = plan(golden.TOPOLOGY, variant=variant)
        assert found.schedule == one_f_one_b(golden.TOPOLOGY) and found.solver == "1f1b"
        assert (found.slots, found.period, found.failed, dict(found.route)) == (27, 30, (), {})
    tight = plan(golden.TOPOLOGY, memory=Memory(2))
    assert verified(tight, memory=Memory(2)) > 30 and tight.solver == "greedy"


@pytest.mark.parametrize("seed", range(2))
def test_random_plans(seed: int) -> None:
    """They can be executed, take what they say, keep to the memory and come back from their JSON."""
    rng = random.Random(seed)
    for _ in range(40):
        topology = Topology(rng.randint(2, 4), rng.randint(1, 5), rng.randint(1, 7))
        failed, times = some_failed(topology, rng, rng.randint(0, 4)), some_times(topology, rng)
        tight = Memory.of_stages(topology, room_of(topology, 0))
        memory, variant = rng.choice([Memory(), Memory(1), Memory(5), tight]), rng.choice(list(Variant))
        ordered = rng.random() < 0.5
        found = plan(topology, failed, times=times, variant=variant, memory=memory, ordered=ordered, effort=1500)
        assert found.bound * (1 - 1e-9) <= verified(found, times, memory)
        assert IterationPlan.from_json(found.to_json()) == found


def test_memory_that_does_not_suffice_is_said() -> None:
    problem = Problem(golden.TOPOLOGY, Times(), COUPLED, frozenset(), {}, Memory(1))
    assert greedy(problem).timeline.slots > 27
    full = {PlannedWorker(0, 0): one_f_one_b(golden.TOPOLOGY).rows[PlannedWorker(0, 0)][1:2]}
    with pytest.raises(InvalidSchedule, match="can never run: W0_0 has room for 1 micro-batches and holds 1"):
        greedy(replace(problem, done=full, ordered=True))


def test_a_plan_that_cannot_be_read() -> None:
    for text, message in (
        ("{", "this is not a plan: "),
        ("[]", "this is not a plan"),
        ("{}", "this is not a plan: KeyError"),
    ):
        with pytest.raises(ConfigError, match=message):
            IterationPlan.from_json(text)

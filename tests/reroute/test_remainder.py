"""Plans for the rest of an iteration, checked by playing the whole iteration with its messages."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.lab.check import check
from shared_core.schedule.planner import Remainder, plan, replan
from shared_core.schedule.problem import Variant
from shared_core.schedule.schedule import Kind, PlannedWorker, Topology
from shared_core.schedule.timing import Timeline, Times, simulate

TOPOLOGY = Topology(3, 4, 6)


def at_time(timeline: Timeline, time: float) -> dict[PlannedWorker, int]:
    """How many actions each worker has finished by then; nobody has stepped."""
    return {
        worker: sum(slot.end <= time and slot.action.kind is not Kind.OPT for slot in row)
        for worker, row in timeline.rows.items()
    }


def verified(rest: Remainder) -> None:
    check(rest.plan.schedule, rest.plan.topology, done=rest.done)
    hosts: dict[tuple[int, int, int], PlannedWorker] = {}
    for rows in (rest.done, rest.plan.schedule.rows):
        for worker, row in rows.items():
            assert worker not in rest.plan.failed or rows is rest.done
            for action in row:
                if action.kind is not Kind.OPT:
                    key = (action.pipeline, action.stage, action.micro_batch)
                    assert hosts.setdefault(key, worker) == worker
                    assert rest.plan.host(*key) == worker or worker in rest.plan.failed
    done = [action for actions in rest.done.values() for action in actions]
    assert simulate(rest.plan.schedule, Times(), done=done).slots == pytest.approx(rest.plan.slots)


@given(
    shape=st.sampled_from([(3, 4, 6), (3, 1, 4), (4, 2, 3), (3, 5, 2)]),
    seed=st.integers(0, 10**6),
    variant=st.sampled_from(Variant),
    ordered=st.booleans(),
    before=st.integers(0, 1),
)
@settings(max_examples=60, deadline=None)
def test_a_failure_at_any_time(
    shape: tuple[int, int, int], seed: int, variant: Variant, ordered: bool, before: int
) -> None:
    topology, rng = Topology(*shape), random.Random(seed)
    first = plan(topology, rng.sample(topology.workers(), before), variant=variant, ordered=ordered, effort=500)
    timeline = simulate(first.schedule, Times())
    progress = at_time(timeline, rng.uniform(0, timeline.slots))
    failed = rng.choice([one for one in timeline.rows if sum(other.stage == one.stage for other in timeline.rows) > 1])
    rest = replan(first, progress, [failed], effort=500)
    verified(rest)
    kept = sum(len(actions) for actions in rest.done.values())
    assert kept == sum(count for worker, count in progress.items() if worker != failed), (
        "no survivor's work is repeated"
    )
    if ordered:
        check(rest.plan.schedule, topology, done=rest.done, ordered=True)
    # Another failure before the rest is through.
    done = [action for actions in rest.done.values() for action in actions]
    second = simulate(rest.plan.schedule, Times(), done=done)
    progress = at_time(second, rng.uniform(0, second.slots))
    alive = [one for one in second.rows if sum(other.stage == one.stage for other in second.rows) > 1]
    if not alive:
        return
    again = replan(rest.plan, progress, [rng.choice(alive)], before=rest.done, effort=500)
    verified(again)


def stepped(timeline: Timeline, stage: int, time: float) -> Mapping[PlannedWorker, int]:
    progress = at_time(timeline, time)
    return progress | {worker: len(timeline.rows[worker]) for worker in timeline.rows if worker.stage == stage}


def test_a_failure_after_its_stage_has_stepped() -> None:
    first = plan(TOPOLOGY, [PlannedWorker(0, 1)], variant=Variant.STAGGERED)
    timeline = simulate(first.schedule, Times(), staggered=True)
    end = max(row[-2].end for row in timeline.rows.values())
    rest = replan(first, stepped(timeline, 3, end), [PlannedWorker(2, 3)])
    verified(rest)
    assert rest.extra == 0 and not any(row for worker, row in rest.plan.schedule.rows.items() if worker.stage == 3)
    # Its last gradient has not been used by the stage before: a peer makes that micro-batch again, and only that.
    late = dict(stepped(timeline, 3, end))
    row = first.schedule.rows[PlannedWorker(2, 2)]
    late[PlannedWorker(2, 2)] = next(
        at for at, one in enumerate(row) if one.micro_batch == 5 and one.kind is not Kind.F
    )
    rest = replan(first, late, [PlannedWorker(2, 3)])
    verified(rest)
    again = [one for worker, row in rest.plan.schedule.rows.items() if worker.stage == 3 for one in row]
    assert {(one.pipeline, one.micro_batch) for one in again} == {(2, 5)}
    assert sorted(one.kind for one in again) == [Kind.F, Kind.I, Kind.W]

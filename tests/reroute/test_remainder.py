"""Plans for the rest of an iteration, checked by playing the whole iteration with its messages."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared_core.errors import ConfigError, Unsupported
from shared_core.schedule.check import check
from shared_core.schedule.planner import Plan, plan
from shared_core.schedule.problem import Variant
from shared_core.schedule.remainder import Executed, Remainder, replan
from shared_core.schedule.schedule import Action, Kind, Topology, Worker
from shared_core.schedule.timing import Timeline, Times, simulate

TOPOLOGY = Topology(3, 4, 6)


def at_time(timeline: Timeline, time: float) -> dict[Worker, int]:
    """How many actions each worker has finished by then; nobody has stepped."""
    return {
        worker: sum(slot.end <= time and slot.action.kind is not Kind.OPT for slot in row)
        for worker, row in timeline.rows.items()
    }


def played(plan_: Plan, done: Executed, rest: Remainder) -> None:
    """Play the rest with a mailbox: every action must find its inputs, and nothing may stay in the mailbox.

    At first there is what survivors had sent to survivors and is not read yet, and what they send again.
    """
    topology = rest.plan.topology
    read = {one for actions in done.values() for one in actions}
    boxes: set[tuple[Worker, str, int, int, int]] = set()  # reader, F or I, pipeline, stage of origin, micro-batch

    def send(action: Action, previous: Plan | None) -> None:
        step = {Kind.F: 1, Kind.I: -1, Kind.B: -1}.get(action.kind)
        if step is None or not 0 <= action.stage + step < topology.stages:
            return
        kind = "F" if action.kind is Kind.F else "I"
        place = (action.pipeline, action.stage + step, action.micro_batch)
        reader = (previous or rest.plan).host(*place)
        if previous is None or (reader not in rest.plan.lost and rest.plan.host(*place) == reader):
            used = [
                Action(place[1], one, place[2], place[0]) for one in ((Kind.F,) if kind == "F" else (Kind.I, Kind.B))
            ]
            if previous is not None and any(one in read for one in used):
                return
            message = (reader, kind, action.pipeline, action.stage, action.micro_batch)
            assert message not in boxes, f"{message} is sent twice"
            boxes.add(message)

    for actions in done.values():
        for action in actions:
            send(action, plan_)
    for worker, action, reader in rest.resend:
        assert action in done[worker]
        message = (reader, "F" if action.kind is Kind.F else "I", action.pipeline, action.stage, action.micro_batch)
        assert message not in boxes
        boxes.add(message)
    position = dict.fromkeys(rest.plan.schedule.rows, 0)
    moving = True
    while moving:
        moving = False
        for worker, row in rest.plan.schedule.rows.items():
            while position[worker] < len(row):
                action = row[position[worker]]
                s = worker.stage
                needed: tuple[Worker, str, int, int, int] | None = None
                if action.kind is Kind.F and s:
                    needed = (worker, "F", action.pipeline, s - 1, action.micro_batch)
                elif action.kind in (Kind.I, Kind.B) and s + 1 < topology.stages:
                    needed = (worker, "I", action.pipeline, s + 1, action.micro_batch)
                if needed is not None and needed not in boxes:
                    break
                boxes.discard(needed) if needed is not None else None
                if action not in rest.silent:
                    send(action, None)
                position[worker] += 1
                moving = True
    stuck = {
        worker: rest.plan.schedule.rows[worker][at]
        for worker, at in position.items()
        if at < len(rest.plan.schedule.rows[worker])
    }
    assert not stuck, f"nobody can go on: {stuck}"
    assert not boxes, f"sent, but never read: {boxes}"


def verified(plan_: Plan, rest: Remainder) -> None:
    check(rest.plan.schedule, rest.plan.topology, done=rest.done)
    hosts: dict[tuple[int, int, int], Worker] = {}
    for rows in (rest.done, rest.plan.schedule.rows):
        for worker, row in rows.items():
            assert worker not in rest.plan.lost or rows is rest.done
            for action in row:
                if action.kind is not Kind.OPT:
                    key = (action.pipeline, action.stage, action.micro_batch)
                    assert hosts.setdefault(key, worker) == worker
                    assert rest.plan.host(*key) == worker or worker in rest.plan.lost
    done = [action for actions in rest.done.values() for action in actions]
    assert simulate(rest.plan.schedule, Times(), done=done).slots == pytest.approx(rest.plan.slots)
    played(plan_, rest.done, rest)


@given(
    shape=st.sampled_from([(3, 4, 6), (3, 1, 4), (4, 2, 3), (3, 5, 2)]),
    seed=st.integers(0, 10**6),
    variant=st.sampled_from(Variant),
    ordered=st.booleans(),
    before=st.integers(0, 1),
)
@settings(max_examples=60, deadline=None)
def test_a_loss_at_any_time(
    shape: tuple[int, int, int], seed: int, variant: Variant, ordered: bool, before: int
) -> None:
    topology, rng = Topology(*shape), random.Random(seed)
    first = plan(topology, rng.sample(topology.workers(), before), variant=variant, ordered=ordered, effort=500)
    timeline = simulate(first.schedule, Times())
    progress = at_time(timeline, rng.uniform(0, timeline.slots))
    lost = rng.choice([one for one in timeline.rows if sum(other.stage == one.stage for other in timeline.rows) > 1])
    rest = replan(first, progress, [lost], effort=500)
    verified(first, rest)
    kept = sum(len(actions) for actions in rest.done.values())
    assert kept == sum(count for worker, count in progress.items() if worker != lost), "no survivor's work is repeated"
    if ordered:
        check(rest.plan.schedule, topology, done=rest.done, ordered=True)
    # Another loss before the rest is through.
    done = [action for actions in rest.done.values() for action in actions]
    second = simulate(rest.plan.schedule, Times(), done=done)
    progress = at_time(second, rng.uniform(0, second.slots))
    alive = [one for one in second.rows if sum(other.stage == one.stage for other in second.rows) > 1]
    if not alive:
        return
    again = replan(rest.plan, progress, [rng.choice(alive)], before=rest.done, effort=500)
    verified(rest.plan, again)


def test_the_extra_time() -> None:
    """At the very beginning a loss costs what it costs every iteration; at the end all of the lost work."""
    healthy = plan(TOPOLOGY, variant=Variant.DECOUPLED)
    timeline = simulate(healthy.schedule, Times())
    start = replan(healthy, at_time(timeline, 0), [Worker(1, 2)], effort=100_000)
    assert start.extra == 2 and not start.silent and not start.resend
    end = replan(healthy, at_time(timeline, 27), [Worker(1, 2)])
    assert end.plan.slots == end.extra == 9, "three micro-batches of three slots at each of two peers"
    assert len(end.silent) == 12 and len(end.resend) == 12
    assert {worker for worker, row in end.plan.schedule.rows.items() if len(row) > 1} == {Worker(0, 2), Worker(2, 2)}


def stepped(timeline: Timeline, stage: int, time: float) -> Mapping[Worker, int]:
    progress = at_time(timeline, time)
    return progress | {worker: len(timeline.rows[worker]) for worker in timeline.rows if worker.stage == stage}


def test_a_loss_after_its_stage_has_stepped() -> None:
    first = plan(TOPOLOGY, [Worker(0, 1)], variant=Variant.STAGGERED)
    timeline = simulate(first.schedule, Times(), staggered=True)
    end = max(row[-2].end for row in timeline.rows.values())
    rest = replan(first, stepped(timeline, 3, end), [Worker(2, 3)])
    verified(first, rest)
    assert rest.extra == 0 and not any(row for worker, row in rest.plan.schedule.rows.items() if worker.stage == 3)
    # Its last gradient has not been used by the stage before, and cannot be made again with the new parameters.
    late = dict(stepped(timeline, 3, end))
    row = first.schedule.rows[Worker(2, 2)]
    late[Worker(2, 2)] = next(at for at, one in enumerate(row) if one.micro_batch == 5 and one.kind is not Kind.F)
    with pytest.raises(
        Unsupported, match="stage 3 has stepped, and W2_2 still needs a result of the lost W2_3 for 2[IB]5@2"
    ):
        replan(first, late, [Worker(2, 3)])


def test_nobody_left() -> None:
    first = plan(Topology(2, 2, 2), [Worker(0, 1)])
    with pytest.raises(ConfigError, match="all 2 workers of stage 1 are lost"):
        replan(first, {}, [Worker(1, 1)])

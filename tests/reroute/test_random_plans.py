"""Five hundred random plans and remainders, before an examiner that knows the planner by its JSON alone."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
from examiner import Case, Wrong, examine
from random_jobs import some_failed, some_times

from benchmarks.lab.check import check
from shared_core.errors import InvalidSchedule
from shared_core.reroute.room import room_of
from shared_core.schedule.planner import IterationPlan, plan
from shared_core.schedule.problem import Memory, Variant
from shared_core.schedule.remainder import replan
from shared_core.schedule.schedule import Kind, PlannedWorker, Topology
from shared_core.schedule.timing import StageTimes, Times, simulate


def one_f_one_bs(topology: Topology) -> Memory:
    """Room for what 1F1B holds, and no more."""
    return Memory.of_stages(topology, room_of(topology, 0))


def case_of(topology: Topology, times: Times, memory: Memory) -> Case:
    durations = [{kind.value: stage.of(kind) for kind in Kind} for stage in times.stages]
    own = {str(worker): {kind.value: one.of(kind) for kind in Kind} for worker, one in times.own}
    room = {str(worker): memory.at(worker) for worker in topology.workers()}
    return Case(durations, own, times.communication, times.data_apart, room)


@pytest.mark.parametrize("seed", range(10))
def test_random_plans(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(40):
        topology = Topology(rng.randint(2, 4), rng.randint(1, 5), rng.randint(1, 7))
        failed, times = some_failed(topology, rng, rng.randint(0, 4)), some_times(topology, rng)
        memory, variant = (
            rng.choice([Memory(), Memory(1), Memory(5), one_f_one_bs(topology)]),
            rng.choice(list(Variant)),
        )
        ordered = rng.random() < 0.5
        found = plan(topology, failed, times=times, variant=variant, memory=memory, ordered=ordered, effort=1500)
        examine(json.loads(found.to_json()), case_of(topology, times, memory))
        check(found.schedule, topology, memory=memory, ordered=ordered)
        assert IterationPlan.from_json(found.to_json()) == found


@pytest.mark.parametrize("seed", range(2))
def test_random_remainders(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(50):
        topology = Topology(rng.randint(2, 4), rng.randint(1, 4), rng.randint(1, 6))
        times, variant, ordered = some_times(topology, rng), rng.choice(list(Variant)), rng.random() < 0.5
        first = plan(topology, times=times, variant=variant, ordered=ordered, effort=500)
        timeline = simulate(first.schedule, times)
        when = rng.uniform(0, timeline.slots)
        progress = {w: sum(slot.end <= when for slot in row[:-1]) for w, row in timeline.rows.items()}
        failed, memory = some_failed(topology, rng, rng.randint(1, 3)), rng.choice([Memory(), one_f_one_bs(topology)])
        rest = replan(first, progress, failed, times=times, memory=memory, effort=500)
        done = {str(worker): [one.text(worker) for one in row] for worker, row in rest.done.items()}
        examine(json.loads(rest.plan.to_json()), replace(case_of(topology, times, memory), done=done))


def test_the_examiner_and_the_checker_see_what_is_wrong() -> None:
    topology = Topology(2, 2, 3)
    right = plan(topology, [PlannedWorker(1, 1)], ordered=True)
    case = case_of(topology, Times((StageTimes(),) * 2), Memory(6))
    held = examine(json.loads(right.to_json()), case)
    host = right.schedule.to_text()["W0_1"]
    last_weights = [at for at, one in enumerate(host) if one[1] in "WB"][-2:]
    swapped = list(host)
    swapped[last_weights[0]], swapped[last_weights[1]] = host[last_weights[1]], host[last_weights[0]]
    wrong: list[dict[str, object]] = [
        {"workers": right.schedule.to_text() | {"W0_1": row}}
        for row in (
            host[1:],
            host[::-1],
            [host[0], *host],
            [*host[1:3], host[0], *host[3:]],
            [*host[:-1], "1F7", "1B7"],
        )
    ]
    wrong += [{"period": right.period - 1}, {"bound": right.period + 1}, {"route": {"1:1": [1, 0, 0]}}]
    for change in wrong:
        with pytest.raises(Wrong):
            examine(json.loads(right.to_json()) | change, case)
    tight = Memory(held["W0_1"] - 1)
    with pytest.raises(Wrong, match="W0_1 holds"):
        examine(json.loads(right.to_json()), case_of(topology, Times((StageTimes(),) * 2), tight))
    with pytest.raises(InvalidSchedule, match="W0_1 would hold"):
        check(right.schedule, topology, memory=tight)

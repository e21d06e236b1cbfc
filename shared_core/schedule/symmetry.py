"""Failures that differ only in which pipelines they hit need one plan: pipelines are renamed."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from shared_core.schedule.planner import IterationPlan
from shared_core.schedule.schedule import PlannedWorker, Schedule, Topology
from shared_core.schedule.timing import EQUAL_SLOTS, StageTimes, Times


def canonical(
    topology: Topology, failed: Collection[PlannedWorker], times: Times = EQUAL_SLOTS
) -> tuple[tuple[PlannedWorker, ...], dict[int, int]]:
    """The failures after renaming pipelines, and the new name of every pipeline.

    Pipelines are sorted by the stages that have failed in them; those without a failure come last, in their order. Only
    pipelines whose workers have the same times change places.
    """
    stages: dict[int, tuple[int, ...]] = {}
    for d in range(topology.pipelines):
        stages[d] = tuple(sorted({worker.stage for worker in failed if worker.pipeline == d}))
    alike: dict[tuple[StageTimes, ...], list[int]] = {}
    for d in range(topology.pipelines):
        alike.setdefault(tuple(times.at(PlannedWorker(d, s)) for s in range(topology.stages)), []).append(d)
    names: dict[int, int] = {}
    for pipelines in alike.values():
        order = sorted(pipelines, key=lambda d: (not stages[d], stages[d], d))
        names.update(zip(order, pipelines, strict=True))
    return tuple(sorted(PlannedWorker(names[worker.pipeline], worker.stage) for worker in set(failed))), names


def rename(plan: IterationPlan, names: Mapping[int, int]) -> IterationPlan:
    """The plan with other names of pipelines; each old name must have a different new one."""
    if all(old == new for old, new in names.items()):
        return plan
    rows = {
        PlannedWorker(names[worker.pipeline], worker.stage): tuple(
            [action._replace(pipeline=names[action.pipeline]) for action in row]
        )
        for worker, row in plan.schedule.rows.items()
    }
    route = {
        (names[d], s, j): PlannedWorker(names[worker.pipeline], worker.stage)
        for (d, s, j), worker in plan.route.items()
    }
    failed = tuple(sorted(PlannedWorker(names[worker.pipeline], worker.stage) for worker in plan.failed))
    return replace(plan, failed=failed, route=route, schedule=Schedule(dict(sorted(rows.items()))))


def patterns(topology: Topology, failures: int, times: Times = EQUAL_SLOTS) -> list[tuple[PlannedWorker, ...]]:
    """All failures of so many workers that can be survived, one of each sort, in order."""
    found: set[tuple[PlannedWorker, ...]] = {()}
    for _ in range(failures):
        found = {
            canonical(topology, {*pattern, worker}, times)[0]
            for pattern in found
            for worker in topology.workers()
            if worker not in pattern
        }
        found = {pattern for pattern in found if _survivable(topology, pattern)}
    return sorted(found)


def _survivable(topology: Topology, pattern: Collection[PlannedWorker]) -> bool:
    return all(
        sum(worker.stage == stage for worker in pattern) < topology.pipelines for stage in range(topology.stages)
    )

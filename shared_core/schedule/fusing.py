"""Backwards are split only where that pays: I and W in a row become B where nobody loses by it."""

from __future__ import annotations

from dataclasses import replace

from shared_core.schedule.greedy import FoundSchedule, objective
from shared_core.schedule.schedule import Action, Kind, PlannedWorker, Schedule
from shared_core.schedule.timing import simulate

#: Actions that all simulations together may run.
EFFORT = 200_000

Spot = tuple[PlannedWorker, Action]


def fuse(found: FoundSchedule) -> FoundSchedule:
    """The same schedule with as few split backwards as its cost takes: tries all, half of the workers', and so on."""
    spots = [
        (worker, action)
        for worker, row in found.schedule.rows.items()
        for action, following in zip(row, row[1:], strict=False)
        if action.kind is Kind.I and following == action._replace(kind=Kind.W)
    ]
    goal = max(found.cost, found.bound) * (1 + 1e-9)
    budget = EFFORT // max(1, sum(len(row) for row in found.schedule.rows.values()))
    groups = [spots] if spots else []
    while groups and budget > 0:
        group = groups.pop()
        budget -= 1
        schedule = _fused(found.schedule, set(group))
        timeline = simulate(schedule, found.problem.times, staggered=found.problem.staggered)
        if objective(found.problem, timeline) <= goal:
            found = replace(found, schedule=schedule, timeline=timeline)
        elif len(group) > 1:
            middle = len(group) // 2
            groups += [group[middle:], group[:middle]]
    return found


def _fused(schedule: Schedule, spots: set[Spot]) -> Schedule:
    rows: dict[PlannedWorker, tuple[Action, ...]] = {}
    for worker, row in schedule.rows.items():
        new: list[Action] = []
        for action in row:
            if action.kind is Kind.I and (worker, action) in spots:
                new.append(action._replace(kind=Kind.B))
            elif not (action.kind is Kind.W and new and new[-1] == action._replace(kind=Kind.B)):
                new.append(action)
        rows[worker] = tuple(new)
    return Schedule(rows)

"""Good plans without a solver: the best of many list schedules."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from shared_core.schedule.bound import lower_bound
from shared_core.schedule.listing import Arrays, Rule
from shared_core.schedule.problem import Problem, Variant
from shared_core.schedule.schedule import Schedule
from shared_core.schedule.timing import ROUNDS, SimulatedTimes, Timeline

#: Actions that all passes together may place.
EFFORT = 100_000
_SAME = 1e-9


@dataclass(frozen=True)
class FoundSchedule:
    """A schedule and its cost; no schedule of the problem costs less than ``bound``."""

    problem: Problem
    schedule: Schedule
    timeline: Timeline
    bound: float

    @property
    def cost(self) -> float:
        return objective(self.problem, self.timeline)

    @property
    def optimal(self) -> bool:
        return self.cost <= self.bound * (1 + _SAME)


def objective(problem: Problem, timeline: Timeline) -> float:
    """What is minimized: the period if staggered, else the slots."""
    return timeline.period if problem.staggered else timeline.slots


def greedy(problem: Problem, effort: int = EFFORT) -> FoundSchedule:
    """The best of the rules, then of random changes of the best ones, until nothing better can exist. Deterministic.

    Args:
        problem: what to schedule; ``split_last`` is chosen here.
        effort: actions that all passes together may place; the first pass is always made.

    Raises InvalidSchedule if no order fits into the memory.
    """
    topology = problem.topology
    passes = max(1, effort // (3 * topology.pipelines * topology.stages * topology.micro_batches))
    count, stages = topology.micro_batches, topology.stages
    lasts = sorted({0, 1, min(stages // 2, count), min(stages, count), count})
    if problem.variant is Variant.COUPLED:
        lasts = [0]
    elif passes == 1:
        lasts = [min(stages, count)]
    choices = [Arrays(replace(problem, split_last=last)) for last in lasts]
    goal = lower_bound(problem)
    tried: list[tuple[float, int, Rule]] = []
    best: tuple[float, int, list[list[int]], SimulatedTimes] | None = None
    attempts = _attempts(len(choices), problem, tried, hurry=passes < 50)
    rounds = 2 if passes == 1 else 8
    for _ in range(passes):
        which, rule = next(attempts)
        rows = choices[which].schedule(rule)
        measured = choices[which].measure(rows, rounds)
        cost = measured.period if problem.staggered else measured.slots
        tried.append((cost, which, rule))
        if best is None or cost < best[0] * (1 - _SAME):
            best = cost, which, rows, measured
        if cost <= goal * (1 + _SAME):
            break
    assert best is not None
    _, which, rows, measured = best
    arrays = choices[which]
    if passes > 1:
        measured = arrays.measure(rows, ROUNDS)
    schedule = arrays.schedule_of(rows)
    return FoundSchedule(arrays.problem, schedule, arrays.timeline(rows, schedule, measured), goal)


def _attempts(
    choices: int, problem: Problem, tried: list[tuple[float, int, Rule]], *, hurry: bool
) -> Iterator[tuple[int, Rule]]:
    """First every rule, then the five best with noise, again and again.

    Rules that take little memory come first; in a ``hurry`` those that take much, which are the better ones.
    """
    whiches, aheads = list(range(choices)), [0, 1, 2, problem.topology.stages]
    whole = problem.variant is Variant.COUPLED
    # Whole backwards lose less where forwards are ready for the next one; split ones continue with a W.
    first, second = (math.inf, -math.inf) if whole else (-math.inf, math.inf)
    if hurry:
        aheads.reverse()
        whiches = [*whiches[-2:], *reversed(whiches[:-2])]
    for hosted in (0.5, -0.5, 1.5, -1.5, 99.0, -99.0):
        for which in whiches:
            for ahead in aheads:
                for lead in (first, second):
                    yield which, Rule(hosted, ahead, lead)
                if hosted == 0.5:
                    yield which, Rule(0.0, ahead, first, arrival=True)
    limited = any(problem.memory.at(worker) < math.inf for worker in problem.topology.workers())
    for hosted, which, ahead in product((0.5, -0.5), whiches, aheads):
        for lead in (-1.0, 1.0):
            yield which, Rule(hosted, ahead, lead)
        if limited and not whole:
            for lead in (first, second):
                yield which, Rule(hosted, ahead, lead, frees=True)
    seed = 0
    while True:
        tried.sort(key=lambda one: one[0])
        for _, which, rule in tried[:5]:
            seed += 1
            yield which, replace(rule, noise=seed, width=(0.6, 1.5, 3.0)[seed % 3])

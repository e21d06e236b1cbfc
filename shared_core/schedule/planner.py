"""Plans: what every surviving worker computes while some fail."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from shared_core.errors import ConfigError, InvalidSchedule
from shared_core.plain_json import is_count, parse
from shared_core.schedule.bound import lower_bound
from shared_core.schedule.greedy import EFFORT, FoundSchedule, greedy, objective
from shared_core.schedule.optimal import improve
from shared_core.schedule.problem import NO_LIMIT, Memory, Problem, Variant
from shared_core.schedule.routing import Route, deal
from shared_core.schedule.schedule import (
    Action,
    Kind,
    PlannedWorker,
    Schedule,
    Topology,
    held_without_failure,
    one_f_one_b,
)
from shared_core.schedule.timing import Times, simulate

_WORKER = re.compile(r"([0-9]{1,9}):([0-9]{1,9})")


@dataclass(frozen=True)
class IterationPlan:
    """What every surviving worker computes in an iteration.

    Attributes:
        failed: places without a worker, in order.
        ordered: whether the sums of gradients can be made equal bit for bit; see ``check``.
        schedule: the rows, each with ``OPT`` at its end.
        route: who computes the micro-batches of failed workers: (home pipeline, stage, micro-batch) to the worker.
        slots: predicted time from the first action to the end of the last backward, in the unit of the times.
        period: predicted time from one iteration to the next, with the optimizer.
        bound: no plan with this route takes fewer slots (``staggered``: a shorter period).
        solver: ``1f1b``, ``greedy`` or ``cp-sat``.
        optimal: whether the bound is reached. With another route, so with micro-batches dealt out to peers in another
            way, there may still be a better plan.
    """

    topology: Topology
    variant: Variant
    failed: tuple[PlannedWorker, ...]
    ordered: bool
    schedule: Schedule
    route: Route
    slots: float
    period: float
    bound: float
    solver: str
    optimal: bool

    def host(self, pipeline: int, stage: int, micro_batch: int) -> PlannedWorker:
        return self.route.get((pipeline, stage, micro_batch)) or PlannedWorker(pipeline, stage)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON. A route is, for every failed worker, the pipeline that computes each micro-batch."""
        count = range(self.topology.micro_batches)
        return {
            "pipelines": self.topology.pipelines,
            "stages": self.topology.stages,
            "micro_batches": self.topology.micro_batches,
            "variant": self.variant.value,
            "failed": [f"{d}:{s}" for d, s in self.failed],
            "ordered": self.ordered,
            "slots": self.slots,
            "period": self.period,
            "bound": self.bound,
            "solver": self.solver,
            "optimal": self.optimal,
            "route": {f"{d}:{s}": [self.route[d, s, j].pipeline for j in count] for d, s in self.failed},
            "workers": self.schedule.to_text(),
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict())

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> IterationPlan:
        """Reverse of ``to_dict``; ConfigError or InvalidSchedule where something cannot be read."""
        try:
            topology = Topology(data["pipelines"], data["stages"], data["micro_batches"])
            failed = tuple(parse_worker(text) for text in data["failed"])
            route = {
                (*parse_worker(text), j): PlannedWorker(pipeline, parse_worker(text).stage)
                for text, pipelines in data["route"].items()
                for j, pipeline in enumerate(pipelines)
            }
            if len(route) != len(failed) * topology.micro_batches or not all(
                (d, s) in failed and is_count(host.pipeline) for (d, s, _), host in route.items()
            ):
                raise ValueError("its route does not lead the micro-batches of failed workers to others")
            schedule = Schedule.from_text(data["workers"])
            named = {*failed, *route.values(), *schedule.rows}
            named |= {PlannedWorker(each.pipeline, each.stage) for row in schedule.rows.values() for each in row}
            if not all(d < topology.pipelines and s < topology.stages for d, s in named):
                raise ValueError("it names workers that the job has not")
            return cls(
                topology=topology,
                variant=Variant(data["variant"]),
                failed=failed,
                ordered=_is(bool, data["ordered"]),
                schedule=schedule,
                route=route,
                slots=_is(float, data["slots"]),
                period=_is(float, data["period"]),
                bound=_is(float, data["bound"]),
                solver=_is(str, data["solver"]),
                optimal=_is(bool, data["optimal"]),
            )
        except (InvalidSchedule, ConfigError):
            raise
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ConfigError(f"this is not a plan: {error!r}; make it again with swiftctl lab plan --json") from error

    @classmethod
    def from_json(cls, text: str) -> IterationPlan:
        """Reverse of ``to_json``; raises the same errors as ``from_dict``."""
        try:
            data = parse(text)
        except ValueError as error:
            raise ConfigError(f"this is not a plan: {error}; make it again with swiftctl lab plan --json") from error
        return cls.from_dict(data)


def _is(kind: type, value: Any) -> Any:
    """The value, if it is of that kind; whole numbers are floats, too. Raises TypeError for another kind."""
    if type(value) is not kind and not (kind is float and type(value) is int):
        raise TypeError(f"{value!r:.40} is not a {kind.__name__}")
    return value


def parse_worker(text: str) -> PlannedWorker:
    """A worker from ``pipeline:stage``, counted from zero. Raises ConfigError for any other text."""
    match = _WORKER.fullmatch(text)
    if match is None:
        raise ConfigError(f"a worker is given as PIPELINE:STAGE, for example 1:2, got {text!r}")
    return PlannedWorker(int(match[1]), int(match[2]))


def plan(
    topology: Topology,
    failed: Collection[PlannedWorker] = (),
    *,
    times: Times | None = None,
    variant: Variant = Variant.STAGGERED,
    memory: Memory = NO_LIMIT,
    ordered: bool = False,
    time_limit: float = 0.0,
    threads: int = 2,
    effort: int = EFFORT,
) -> IterationPlan:
    """Plan an iteration without the failed workers. Without a failure it is plain 1F1B.

    Args:
        times: durations; one slot each and three for the optimizer where left out.
        ordered: all micro-batches of a failed worker go to one peer, W in ascending order.
        time_limit: seconds for the exact solver, which starts from the greedy's plan; 0 leaves it out.
        effort: actions that the greedy may place; see ``greedy``.

    Raises:
        ConfigError: nobody is left of a stage, or a value is out of range.
        InvalidSchedule: no order fits into the memory.
        MissingExtra: ``time_limit`` is given, and OR-tools is not installed.
    """
    times = Times() if times is None else times
    gone = tuple(sorted(set(failed)))
    route = deal(topology, gone, times=times, ordered=ordered)
    problem = Problem(topology, times, variant, frozenset(gone), route, memory, ordered)
    if not gone and (healthy := _healthy(problem)) is not None:
        return healthy
    found, solver = greedy(problem, effort), "greedy"
    if time_limit > 0 and not found.optimal:
        better = improve(found, time_limit, threads)
        solver = "greedy" if better.schedule is found.schedule else "cp-sat"
        found = better
    found = fuse(found)
    return IterationPlan(
        topology=topology,
        variant=variant,
        failed=gone,
        ordered=ordered,
        schedule=found.schedule,
        route=route,
        slots=found.timeline.slots,
        period=found.timeline.period,
        bound=found.bound,
        solver=solver,
        optimal=found.optimal,
    )


def _healthy(problem: Problem) -> IterationPlan | None:
    """1F1B; None if it does not fit into the memory."""
    topology, schedule = problem.topology, one_f_one_b(problem.topology)
    if any(held_without_failure(topology, worker.stage) > problem.memory.at(worker) for worker in schedule.rows):
        return None
    timeline = simulate(schedule, problem.times, staggered=problem.staggered)
    healthy = FoundSchedule(problem, schedule, timeline, lower_bound(problem))
    return IterationPlan(
        topology,
        problem.variant,
        (),
        problem.ordered,
        schedule,
        {},
        timeline.slots,
        timeline.period,
        healthy.bound,
        "1f1b",
        healthy.optimal,
    )


#: Actions that all simulations together may run.
FUSE_EFFORT = 200_000

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
    budget = FUSE_EFFORT // max(1, sum(len(row) for row in found.schedule.rows.values()))
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

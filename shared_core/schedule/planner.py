"""Plans: what every surviving worker computes while some fail, in a whole iteration and in the rest of one."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from shared_core.errors import ConfigError, InvalidSchedule
from shared_core.plain_json import is_count, parse
from shared_core.schedule.greedy import EFFORT, FoundSchedule, greedy, lower_bound, objective
from shared_core.schedule.optimal import improve
from shared_core.schedule.problem import NO_LIMIT, Memory, Problem, Route, Variant, deal, survivors
from shared_core.schedule.schedule import (
    Action,
    Kind,
    PlannedWorker,
    Schedule,
    Topology,
    held_without_failure,
    one_f_one_b,
)
from shared_core.schedule.timing import EQUAL_SLOTS, StageTimes, Times, simulate

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
    times: Times = EQUAL_SLOTS,
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


# -- inside a running iteration: survivors keep what they did, and peers repeat what failed workers did ---------------


#: Actions that the greedy may place: this planning is on the way of a recovery.
REPLAN_EFFORT = 4_000

Executed = Mapping[PlannedWorker, tuple[Action, ...]]


@dataclass(frozen=True)
class Remainder:
    """The rest of an iteration in which workers failed.

    Attributes:
        plan: rows of the survivors from here on; its times are counted from the failure.
        done: what was executed before and need not be done again: by survivors, and by failed workers of stages that
            have their sum of gradients.
        extra: predicted time that the iteration takes longer than it would have without the failure.
    """

    plan: IterationPlan
    done: Executed
    extra: float


def replan(
    plan: IterationPlan,
    progress: Mapping[PlannedWorker, int],
    failed: Collection[PlannedWorker],
    *,
    times: Times = EQUAL_SLOTS,
    measured: Times | None = None,
    before: Executed | None = None,
    summed: Collection[int] = (),
    memory: Memory = NO_LIMIT,
    effort: int = REPLAN_EFFORT,
) -> Remainder:
    """Plan the rest of an iteration after a failure.

    What a failed worker had accumulated is gone: all its micro-batches, its own and those that it computed for others,
    pass its stage again at peers. A survivor that has not used a result of it yet waits for the peer's.

    Where a survivor has the stage's sum of gradients, the failed worker's are in it. Then a micro-batch passes that
    stage again only for the neighboring stages: where one of them needs a result that only the failed worker had.

    Args:
        plan: the plan under way; after an earlier failure of the same iteration, the plan of that ``Remainder``.
        progress: how many actions of its row each worker has finished.
        measured: durations that ``extra`` is computed with; ``times`` where left out.
        before: ``done`` of the earlier ``Remainder``, if there was one.
        summed: stages whose sum a survivor has; those at which one has stepped count anyway.

    Raises ConfigError if a stage has nobody left, InvalidSchedule if no order fits into the memory.
    """
    gone = tuple(sorted({*plan.failed, *failed}))
    survivors(plan.topology, gone)
    rows, earlier = plan.schedule.rows, before or {}
    finished = dict(earlier) | {
        worker: (*earlier.get(worker, ()), *row[: progress.get(worker, 0)]) for worker, row in rows.items()
    }
    done = {worker: actions for worker, actions in finished.items() if worker not in gone}
    stepped = {*summed, *(worker.stage for worker, actions in done.items() if _has_stepped(actions))}
    again = _moved(plan, failed, stepped)
    left = [action for worker in done for action in rows.get(worker, ())[progress.get(worker, 0) :]]
    again += _for_neighbors(plan, again, left, stepped, gone)
    repeated = set(again)
    kept = {
        worker: tuple(one for one in actions if (one.pipeline, one.stage, one.micro_batch) not in repeated)
        for worker, actions in finished.items()
        if worker in gone and worker.stage in stepped
    }
    route = dict(plan.route) | _deal_again(plan, again, done, gone, times)
    problem = Problem(
        plan.topology, times, plan.variant, frozenset(gone), route, memory, plan.ordered, done={**done, **kept}
    )
    found = greedy(problem, effort)
    rest = {worker: row[:-1] if _has_stepped(done[worker]) else row for worker, row in found.schedule.rows.items()}
    schedule = Schedule(rest)
    old = Schedule({worker: row[progress.get(worker, 0) :] for worker, row in rows.items()})
    clock = times if measured is None else measured
    without = simulate(old, clock, done=[one for actions in finished.values() for one in actions])
    timeline = found.timeline
    there = [one for actions in (*done.values(), *kept.values()) for one in actions]
    slots = timeline.slots if measured is None else simulate(schedule, clock, done=there).slots
    new = replace(
        plan,
        failed=gone,
        schedule=schedule,
        route=route,
        slots=timeline.slots,
        period=timeline.period,
        bound=found.bound,
        solver="greedy",
        optimal=found.optimal,
    )
    return Remainder(new, {**done, **kept}, slots - without.slots)


def _moved(plan: IterationPlan, failed: Collection[PlannedWorker], stepped: set[int]) -> list[tuple[int, int, int]]:
    """(pipeline, stage, micro-batch) of everything that failed workers computed or were to compute."""
    topology = plan.topology
    return [
        (d, s, j)
        for s in sorted({worker.stage for worker in failed} - stepped)
        for d in range(topology.pipelines)
        for j in range(topology.micro_batches)
        if plan.host(d, s, j) in failed
    ]


def _for_neighbors(
    plan: IterationPlan,
    again: list[tuple[int, int, int]],
    left: Iterable[Action],
    summed: Collection[int],
    gone: Collection[PlannedWorker],
) -> list[tuple[int, int, int]]:
    """What passes ``summed`` stages again, because ``again`` and ``left`` need a result of failed workers."""
    found = set[tuple[int, int, int]]()
    waiting = [*left, *(Action(s, kind, j, d) for d, s, j in again for kind in (Kind.F, Kind.B))]
    steps = {Kind.F: -1, Kind.I: 1, Kind.B: 1}
    while waiting:
        stage, kind, j, d = waiting.pop()
        source = (d, stage + steps.get(kind, 0), j)
        if source[1] == stage or source[1] not in summed or source in found or plan.host(*source) not in gone:
            continue
        found.add(source)  # forward and backward: then who makes it again needs no other plan if more fails
        waiting += [Action(source[1], each, j, d) for each in (Kind.F, Kind.B)]
    return sorted(found, key=lambda place: (place[1], place[0], place[2]))


def _deal_again(
    plan: IterationPlan,
    again: list[tuple[int, int, int]],
    done: Executed,
    gone: tuple[PlannedWorker, ...],
    times: Times,
) -> Route:
    """Each to the peer that has least left to do; ``ordered``, all of a pipeline to one."""
    left: dict[PlannedWorker, float] = {}
    for worker, row in plan.schedule.rows.items():
        if worker not in gone:
            at, ran = times.at(worker), set(done[worker])
            left[worker] = sum(at.of(action.kind) for action in row if action not in ran)
    route: Route = {}
    hosts: dict[tuple[int, int], PlannedWorker] = {}
    for d, s, j in again:
        peers = [worker for worker in left if worker.stage == s]
        host = hosts.get((d, s)) if plan.ordered else None
        if host is None:
            host = min(peers, key=lambda worker: (left[worker], worker))
        route[d, s, j] = hosts[d, s] = host
        at = times.at(host)
        left[host] += at.forward + at.backward_input + at.backward_weight
    return route


def _has_stepped(actions: tuple[Action, ...]) -> bool:
    return any(one.kind is Kind.OPT for one in actions)


# -- failures that differ only in which pipelines they hit need one plan: pipelines are renamed -----------------------


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

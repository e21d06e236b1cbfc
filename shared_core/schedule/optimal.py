"""Exact plans with the CP-SAT solver of OR-tools, starting from the greedy's."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import replace
from typing import Any

from shared_core.errors import MissingExtra
from shared_core.schedule.greedy import FoundSchedule, objective
from shared_core.schedule.problem import Problem, Variant
from shared_core.schedule.schedule import Action, Kind, PlannedWorker, Schedule
from shared_core.schedule.timing import StageTimes, simulate

#: Ticks of the shortest duration that are tried, so that all durations are whole numbers of ticks.
_TICKS = range(1, 13)
MISSING = "exact planning needs OR-tools: pip install 'swift-recovery[all]', or plan without a time limit"
#: Ticks of the longest duration where no such tick exists.
_FINE = 200


def import_solver() -> Any:
    """The module ``cp_model``; raises MissingExtra where OR-tools is not installed."""
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        raise MissingExtra(MISSING) from error
    return cp_model


def has_solver() -> bool:
    """Whether OR-tools is installed; it is not loaded for that."""
    try:
        return importlib.util.find_spec("ortools.sat.python.cp_model") is not None
    except ImportError:
        return False


def improve(found: FoundSchedule, time_limit: float, workers: int = 2) -> FoundSchedule:
    """A better plan if there is one, with the bound that was proven.

    The solver may split every backward. Micro-batches of a pipeline that pass the same workers keep their order in F
    and in I at every stage, which costs nothing: two that do not can be exchanged from there on. Nothing is proven
    beyond the bound of ``found`` where durations are no whole numbers of a common tick.

    Args:
        found: the greedy's plan of a whole iteration.
        time_limit: seconds; of one thread, those of the solver's own count, so that the same input gives the same plan.
        workers: threads.

    Raises MissingExtra if OR-tools is not installed.
    """
    cp_model = import_solver()
    problem = found.problem
    if problem.variant is not Variant.COUPLED:
        problem = replace(problem, split_last=problem.topology.micro_batches)
    model = _Model(cp_model, problem, found)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = workers
    if workers == 1:
        solver.parameters.max_deterministic_time = time_limit
    else:
        solver.parameters.max_time_in_seconds = time_limit
    status = solver.solve(model.model)
    if model.exact and status in (cp_model.OPTIMAL, cp_model.FEASIBLE, cp_model.UNKNOWN):
        proven = model.tick * math.ceil(solver.best_objective_bound - 1e-6)
        found = replace(found, bound=max(found.bound, proven))
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return found
    schedule = model.schedule(solver)
    timeline = simulate(schedule, problem.times, staggered=problem.staggered)
    if objective(problem, timeline) >= found.cost * (1 - 1e-9):
        return found
    return FoundSchedule(problem, schedule, timeline, found.bound)


class _Model:
    """Start times as whole numbers; one interval an action, which may not overlap at a worker."""

    def __init__(self, cp_model: Any, problem: Problem, found: FoundSchedule) -> None:
        self.model = cp_model.CpModel()
        self.problem = problem
        self.tick = _tick(problem)
        span = max((row[-1].end for row in found.timeline.rows.values() if row), default=0.0)
        self.horizon = 2 * self._ticks(max(span, found.cost)) + 1
        self.starts: dict[Action, Any] = {}
        self.ends: dict[Action, Any] = {}
        self.at: dict[Action, PlannedWorker] = {}
        self.intervals: dict[PlannedWorker, list[Any]] = {}
        self.whole: dict[Action, Any] = {}  # of an I: whether it and its W are run as B, which then is shorter
        stages = range(problem.topology.stages)
        self.begins = [self.model.new_int_var(0, self.horizon, f"begin {s}") for s in stages]
        self._actions()
        self._dependencies()
        self._memory()
        for intervals in self.intervals.values():
            self.model.add_no_overlap(intervals)
        # A tick of rounding for every action on the longest way, if times are not whole.
        self.exact = all(abs(value / self.tick - round(value / self.tick)) < 1e-6 for value in _durations(problem))
        slack = 0 if self.exact else 2 * (problem.topology.stages + problem.topology.micro_batches)
        self._objective(self._ticks(found.bound) - slack, self._ticks(found.cost) + slack)
        self._hint(found)

    def _ticks(self, value: float) -> int:
        return round(value / self.tick)

    def _times(self, worker: PlannedWorker) -> StageTimes:
        return self.problem.times.at(worker)

    def _add(self, action: Action, worker: PlannedWorker) -> None:
        length = self._length(action, worker)
        start = self.model.new_int_var(0, self.horizon, str(action))
        if isinstance(length, int):
            end = start + length
        else:  # an interval takes no sum of two variables
            end = self.model.new_int_var(0, 2 * self.horizon, "")
        self.starts[action], self.ends[action], self.at[action] = start, end, worker
        interval = self.model.new_interval_var(start, length, end, f"{action}")
        self.intervals.setdefault(worker, []).append(interval)

    def _length(self, action: Action, worker: PlannedWorker) -> Any:
        """Ticks of an action. A backward that is shorter in one piece is run as B (in the place of I) or as I and W."""
        times = self._times(worker)
        length, whole = self._ticks(times.of(action.kind)), self._ticks(times.of(Kind.B))
        if action.kind not in (Kind.I, Kind.W) or whole >= self._ticks(times.of(Kind.I)) + self._ticks(
            times.of(Kind.W)
        ):
            return length
        if action.kind is Kind.W:
            return length - length * self.whole[action._replace(kind=Kind.I)]
        chosen = self.whole[action] = self.model.new_bool_var(f"{action} whole")
        return length + (whole - length) * chosen

    def _actions(self) -> None:
        topology = self.problem.topology
        for d in range(topology.pipelines):
            for s in range(topology.stages):
                for j in range(topology.micro_batches):
                    split = self.problem.splits(d, s, j)
                    for kind in (Kind.F, Kind.I, Kind.W) if split else (Kind.F, Kind.B):
                        self._add(Action(s, kind, j, d), self.problem.host(d, s, j))

    def backward(self, d: int, s: int, j: int) -> Action:
        """The action that makes the gradient of the input."""
        return Action(s, Kind.I if self.problem.splits(d, s, j) else Kind.B, j, d)

    def weight(self, d: int, s: int, j: int) -> Action:
        """The action that makes the gradient of the weights."""
        return Action(s, Kind.W if self.problem.splits(d, s, j) else Kind.B, j, d)

    def _dependencies(self) -> None:
        topology, add = self.problem.topology, self.model.add
        communication = self._ticks(self.problem.times.communication)
        for d in range(topology.pipelines):
            for s in range(topology.stages):
                for j in range(topology.micro_batches):
                    forward, backward = Action(s, Kind.F, j, d), self.backward(d, s, j)
                    if s:
                        add(self.starts[forward] >= self.ends[Action(s - 1, Kind.F, j, d)] + communication)
                    elif self.problem.times.data_apart and self.at[forward].pipeline != d:
                        add(self.starts[forward] >= self.begins[-1] + communication)
                    if s + 1 < topology.stages:
                        add(self.starts[backward] >= self.ends[self.backward(d, s + 1, j)] + communication)
                    add(self.starts[backward] >= self.ends[forward])
                    weight = self.weight(d, s, j)
                    if weight != backward:
                        add(self.starts[weight] >= self.ends[backward])
                    before = self._twin(d, j)
                    if before is not None:
                        add(self.starts[forward] >= self.starts[Action(s, Kind.F, before, d)])
                        add(self.starts[backward] >= self.starts[self.backward(d, s, before)])
                    if j and self.problem.ordered:
                        add(self.starts[weight] >= self.ends[self.weight(d, s, j - 1)])

    def _twin(self, d: int, j: int) -> int | None:
        """The last micro-batch before j of its pipeline that passes the same workers, if there is one."""
        for before in range(j - 1, -1, -1):
            stages = range(self.problem.topology.stages)
            if all(self.problem.host(d, s, before) == self.problem.host(d, s, j) for s in stages):
                return before
        return None

    def _memory(self) -> None:
        memory, topology = self.problem.memory, self.problem.topology
        held: dict[PlannedWorker, list[Any]] = {}
        for d in range(topology.pipelines):
            for s in range(topology.stages):
                for j in range(topology.micro_batches):
                    worker = self.problem.host(d, s, j)
                    if memory.at(worker) >= topology.pipelines * topology.micro_batches:
                        continue
                    span = self._span(self.starts[Action(s, Kind.F, j, d)], self.ends[self.weight(d, s, j)])
                    held.setdefault(worker, []).append(span)
        for worker, spans in held.items():
            self.model.add_cumulative(spans, [1] * len(spans), int(memory.at(worker)))

    def _span(self, start: Any, end: Any) -> Any:
        length = self.model.new_int_var(0, self.horizon, "")
        return self.model.new_interval_var(start, length, end, "")

    def _objective(self, bound: int, cost: int) -> None:
        problem, topology = self.problem, self.problem.topology
        self.cost = self.model.new_int_var(max(0, bound), max(bound, cost), "cost")
        ends = [self.model.new_int_var(0, self.horizon, f"end {s}") for s in range(topology.stages)]
        for d in range(topology.pipelines):
            for s in range(topology.stages):
                for j in range(topology.micro_batches):
                    self.model.add(ends[s] >= self.ends[self.weight(d, s, j)])
                    self.model.add(self.begins[s] <= self.starts[Action(s, Kind.F, j, d)])
        for s in range(topology.stages):
            if problem.staggered:
                steps = [self._times(PlannedWorker(d, s)).optimizer for d in range(topology.pipelines)]
                self.model.add(self.cost >= ends[s] - self.begins[s] + self._ticks(max(steps)))
            else:
                self.model.add(self.cost >= ends[s])
        self.model.minimize(self.cost)

    def _hint(self, found: FoundSchedule) -> None:
        for row in found.timeline.rows.values():
            for action, start, _ in row:
                if action in self.starts:
                    self.model.add_hint(self.starts[action], self._ticks(start))
                elif action.kind is Kind.B:
                    first, second = action._replace(kind=Kind.I), action._replace(kind=Kind.W)
                    self.model.add_hint(self.starts[first], self._ticks(start))
                    length = self._times(self.at[first]).backward_input
                    self.model.add_hint(self.starts[second], self._ticks(start + length))
        self.model.add_hint(self.cost, self._ticks(found.cost))

    def schedule(self, solver: Any) -> Schedule:
        rows: dict[PlannedWorker, list[tuple[int, Action]]] = {}
        for action, worker in self.at.items():
            named = action
            if action.kind in (Kind.I, Kind.W) and self._is_whole(solver, action):
                if action.kind is Kind.W:
                    continue
                named = action._replace(kind=Kind.B)
            rows.setdefault(worker, []).append((solver.value(self.starts[action]), named))
        order = {Kind.F: 0, Kind.I: 1, Kind.B: 1, Kind.W: 2, Kind.OPT: 3}
        return Schedule(
            {
                worker: (
                    *(one for _, one in sorted(row, key=lambda item: (item[0], order[item[1].kind], item[1]))),
                    Action(worker.stage, Kind.OPT, -1, worker.pipeline),
                )
                for worker, row in sorted(rows.items())
            }
        )

    def _is_whole(self, solver: Any, action: Action) -> bool:
        chosen = self.whole.get(action._replace(kind=Kind.I))
        return chosen is not None and bool(solver.value(chosen))


def _durations(problem: Problem) -> list[float]:
    values = [problem.times.communication]
    for times in (*problem.times.stages, *(one for _, one in problem.times.own)):
        values += [times.of(kind) for kind in Kind]
    return values


def _tick(problem: Problem) -> float:
    """The duration that counts as one: small enough that rounding does not matter, as large as it can be."""
    values = [value for value in _durations(problem) if value > 0]
    if not values:
        return 1.0
    for parts in _TICKS:
        tick = min(values) / parts
        if all(abs(value / tick - round(value / tick)) < 1e-6 for value in values):
            return tick
    return max(values) / _FINE

"""When each action of a schedule runs: a simulation with given durations."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, NoReturn

from shared_core.errors import ConfigError, InvalidSchedule
from shared_core.schedule.schedule import Action, Kind, PlannedWorker, Schedule

#: Rounds after which the period of a staggered schedule counts as found; before, the value is an upper bound.
ROUNDS = 32
_KINDS = (Kind.F, Kind.I, Kind.W, Kind.B)
#: Time of a result that nobody has computed yet, and of one that is there from the beginning.
_NEVER, _AT_HAND = float("-inf"), -1e300


@dataclass(frozen=True)
class StageTimes:
    """Durations of the actions of one stage, in seconds, slots or any unit.

    Attributes:
        optimizer: OPT, with the reduction of the stage's gradients over the pipelines.
        backward: B, I and W at once; None is their sum.
    """

    forward: float = 1.0
    backward_input: float = 1.0
    backward_weight: float = 1.0
    optimizer: float = 3.0
    backward: float | None = None

    def __post_init__(self) -> None:
        for name in ("forward", "backward_input", "backward_weight", "optimizer", "backward"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < float("inf"):
                raise ConfigError(f"{name} must be a finite number of at least 0, got {value!r}")

    def of(self, kind: Kind) -> float:
        if kind is Kind.F:
            return self.forward
        if kind is Kind.I:
            return self.backward_input
        if kind is Kind.W:
            return self.backward_weight
        if kind is Kind.B:
            return self.backward_input + self.backward_weight if self.backward is None else self.backward
        return self.optimizer


@dataclass(frozen=True)
class Times:
    """Durations of everything.

    Attributes:
        stages: of each stage; a single entry holds for all.
        communication: from the end of an action until its result can be used at the neighboring stage.
        data_apart: only the two ends of a pipeline have its data. Those of a failed first stage come from the last one,
            which sends them when it begins an iteration; staggered, that is later than a first stage could use them.
        own: of workers that differ from their stage.
    """

    stages: tuple[StageTimes, ...] = (StageTimes(),)
    communication: float = 0.0
    data_apart: bool = False
    own: tuple[tuple[PlannedWorker, StageTimes], ...] = ()

    def __post_init__(self) -> None:
        if not self.stages:
            raise ConfigError("times of at least one stage are needed")
        if not 0 <= self.communication < float("inf"):
            raise ConfigError(f"communication must be a finite number of at least 0, got {self.communication!r}")

    def at(self, worker: PlannedWorker) -> StageTimes:
        """Durations at a worker. Raises ConfigError where there are none of its stage."""
        return self._by_worker.get(worker) or self.of_stage(worker.stage)

    def of_stage(self, stage: int) -> StageTimes:
        """Durations at the workers of a stage that have none of their own. Raises ConfigError where there are none."""
        if len(self.stages) == 1:
            return self.stages[0]
        if stage >= len(self.stages):
            raise ConfigError(f"times are given for {len(self.stages)} stages, but there is a worker of stage {stage}")
        return self.stages[stage]

    @cached_property
    def _by_worker(self) -> dict[PlannedWorker, StageTimes]:
        return dict(self.own)


#: One slot for every action, three for the optimizer.
EQUAL_SLOTS = Times()


class Slot(NamedTuple):
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A schedule with times, the first action starting at 0.

    Attributes:
        slots: from the first start to the end of the last forward or backward.
        period: from one iteration to the next, with the optimizer, in a steady state.
    """

    rows: Mapping[PlannedWorker, tuple[Slot, ...]]
    slots: float
    period: float


def simulate(
    schedule: Schedule,
    times: Times,
    *,
    staggered: bool = False,
    done: Collection[Action] = (),
    rounds: int = ROUNDS,
    late: Mapping[PlannedWorker, float] | None = None,
) -> Timeline:
    """Run every action as early as the order of its row and its inputs allow.

    The optimizer starts together: when all gradients are complete (all stages), or, ``staggered``, when those of its
    stage are, which lets the next iteration start there while other stages still compute the last one. Then the period
    is max over stages of (last end + optimizer - first start), and it is found by running iterations until they repeat.

    Args:
        schedule: what to run; rows may leave ``OPT`` out, it is counted anyway.
        staggered: each stage steps on its own.
        done: actions of an iteration under way that were executed already; their results are at hand at time 0.
        rounds: iterations to run at most.
        late: of workers that begin an iteration so much later than their stage can.

    Raises InvalidSchedule if an action waits for one that never runs; both are named.
    """
    actions = [action for row in schedule.rows.values() for action in row] + list(done)
    stages = 1 + max([worker.stage for worker in schedule.rows] + [action.stage for action in actions], default=0)
    count = 1 + max((action.micro_batch for action in actions), default=0)
    pipelines = 1 + max((action.pipeline for action in actions), default=0)
    workers = list(schedule.rows)
    rows = [codes(row, stages, count) for row in schedule.rows.values()]
    shape, ran = (pipelines, stages, max(1, count)), codes(done, stages, count)
    replay = Simulation(workers, rows, shape, times, ran, late)
    return replay.timeline(replay.measure(staggered, rounds), schedule)


def codes(actions: Collection[Action], stages: int, count: int) -> list[int]:
    """Actions as numbers, without ``OPT``; see ``Simulation``."""
    kinds = {Kind.F: 0, Kind.I: 1, Kind.W: 2, Kind.B: 3}
    return [
        4 * ((action.pipeline * stages + action.stage) * count + action.micro_batch) + kinds[action.kind]
        for action in actions
        if action.kind is not Kind.OPT
    ]


class SimulatedTimes(NamedTuple):
    """Start times by row; when each stage can start the iteration, and the next one; slots; period."""

    starts: list[list[float]]
    ready: list[float]
    after: list[float]
    slots: float
    period: float


class Simulation:
    """A schedule as arrays, so that it can be run several times.

    An operation has the number (pipeline * stages + stage) * micro-batches + micro-batch; the code of an action is four
    times that, plus 0 for F, 1 for I, 2 for W and 3 for B.

    Args:
        rows: codes of its actions, without ``OPT``.
        done: codes of actions whose results are at hand at time 0.
        late: see :func:`simulate`.
    """

    def __init__(
        self,
        workers: Sequence[PlannedWorker],
        rows: Sequence[list[int]],
        shape: tuple[int, int, int],
        times: Times,
        done: Sequence[int] = (),
        late: Mapping[PlannedWorker, float] | None = None,
    ) -> None:
        self.workers, self.rows, self.times, self.done = workers, rows, times, done
        self.late = [0.0 if late is None else late.get(worker, 0.0) for worker in workers]
        pipelines, self.stages, self.count = shape
        self.size = pipelines * self.stages * self.count
        at = [times.at(worker) for worker in workers]
        self.durations = [tuple(one.of(kind) for kind in _KINDS) for one in at]
        self.optimizer = [0.0] * self.stages
        for worker, one in zip(workers, at, strict=True):
            self.optimizer[worker.stage] = max(self.optimizer[worker.stage], one.optimizer)

    def measure(self, staggered: bool, rounds: int = ROUNDS) -> SimulatedTimes:
        """Run it, staggered until the period repeats or the rounds are over; raises as :func:`simulate`."""
        ready = [0.0] * self.stages
        starts, after, slots = self.run(ready, staggered)
        period = max(after)
        for _ in range(rounds if staggered else 0):
            # What carries over is how far the stages are apart. The largest growth of a round bounds the period from
            # above, the smallest from below: it is the eigenvalue of a matrix in the max-plus algebra.
            low = min(after)
            ready = [value - low for value in after]
            starts, after, slots = self.run(ready, True)
            growth = [new - old for new, old in zip(after, ready, strict=True)]
            period = min(period, max(growth))
            if max(growth) - min(growth) <= 1e-9 * max(1.0, period):
                break
        return SimulatedTimes(starts, ready, after, slots, period)

    def run(self, ready: list[float], staggered: bool) -> tuple[list[list[float]], list[float], float]:
        """Start times of every row, when each stage can start the next iteration, and the slots of this one."""
        communication = self.times.communication
        forward, backward = [_NEVER] * self.size, [_NEVER] * self.size
        for code in self.done:  # its message has arrived
            if code & 3 == 0:
                forward[code >> 2] = -communication
            elif code & 3 != 2:
                backward[code >> 2] = -communication
        workers, rows, count, last = self.workers, self.rows, self.count, self.stages - 1
        apart = self.times.data_apart
        waiting: dict[int, int] = {}  # worker that waits for a result; every result has one reader elsewhere
        position = [0] * len(rows)
        free = [ready[worker.stage] + late for worker, late in zip(workers, self.late, strict=True)]
        starts: list[list[float]] = [[] for _ in rows]
        stack = list(range(len(rows) - 1, -1, -1))
        while stack:
            w = stack.pop()
            row, stage, now, began = rows[w], workers[w].stage, free[w], starts[w]
            lengths = self.durations[w]
            for at in range(position[w], len(row)):
                code = row[at]
                q, kind = code >> 2, code & 3
                arrived = _AT_HAND
                if kind == 2:
                    if backward[q] == _NEVER:
                        self._stuck(w, at, code - 1)
                elif kind == 0:
                    if stage:
                        needed, arrived = code - 4 * count, forward[q - count]
                    elif apart and q // (self.stages * count) != workers[w].pipeline:
                        arrived = ready[last]
                else:
                    if forward[q] == _NEVER:
                        self._stuck(w, at, 4 * q)
                    if stage != last:
                        needed, arrived = 4 * (q + count) + 1, backward[q + count]
                if arrived == _NEVER:
                    waiting[needed] = w
                    position[w] = at
                    break
                if arrived + communication > now:
                    now = arrived + communication
                began.append(now)
                now += lengths[kind]
                if kind == 0:
                    forward[q] = now
                elif kind != 2:
                    backward[q] = now
                else:
                    continue
                woken = waiting.pop(code if kind == 0 else 4 * q + 1, -1)
                if woken >= 0:
                    stack.append(woken)
            else:
                position[w] = len(row)
            free[w] = now
        if waiting:
            needed, w = min(waiting.items(), key=lambda item: item[1])
            self._stuck(w, position[w], needed)
        begin = min((row[0] for row in starts if row), default=0.0)
        return starts, self._after(free, staggered), max(free, default=0.0) - begin

    def _after(self, free: list[float], staggered: bool) -> list[float]:
        ends = [0.0] * self.stages
        for worker, end in zip(self.workers, free, strict=True):
            ends[worker.stage] = max(ends[worker.stage], end)
        if not staggered:
            ends = [max(ends)] * self.stages
        return [end + step for end, step in zip(ends, self.optimizer, strict=True)]

    def _action(self, code: int) -> Action:
        place, index = divmod(code >> 2, self.count)
        return Action(place % self.stages, _KINDS[code & 3], index, place // self.stages)

    def _stuck(self, w: int, position: int, needed: int) -> NoReturn:
        worker, missing = self.workers[w], self._action(needed)
        what = str(missing) if missing.kind is Kind.F else f"{missing} (or B)"
        raise InvalidSchedule(
            f"{worker} cannot run {self._action(self.rows[w][position]).text(worker)}: it needs {what}, which never "
            "runs before it; correct the order of the rows"
        )

    def timeline(self, measured: SimulatedTimes, schedule: Schedule) -> Timeline:
        """The rows with times, shifted so that the first action starts at 0."""
        origin = min((row[0] for row in measured.starts if row), default=0.0)
        rows: dict[PlannedWorker, tuple[Slot, ...]] = {}
        for worker, began, lengths in zip(self.workers, measured.starts, self.durations, strict=True):
            by_kind = dict(zip(_KINDS, lengths, strict=True))
            row, at = [], iter(began)
            for action in schedule.rows[worker]:
                if action.kind is Kind.OPT:
                    end = measured.after[worker.stage] - origin
                    row.append(Slot(action, end - self.optimizer[worker.stage], end))
                else:
                    start = next(at) - origin
                    row.append(Slot(action, start, start + by_kind[action.kind]))
            rows[worker] = tuple(row)
        return Timeline(rows, measured.slots, measured.period)

"""Discrete events: one system through one trace. Between two changes throughput is constant, so a year costs as many
steps as the trace has events, whatever a training step takes.

Work is in seconds of training without failures, progress in work a second.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from benchmarks.simulate.layout import Layout, Pattern
from benchmarks.simulate.trace import Trace, TraceEvent
from shared_core.errors import ConfigError


@dataclass(frozen=True)
class FailureCost:
    """What a change costs.

    Attributes:
        stall_s: seconds in which nobody makes progress.
        back_to: work is regained from the last multiple of this many seconds of work: of a step, or between
            checkpoints. None if all work is kept.
        replay: None if work since then fails. Else all wait while it is made again, in this share of its time.
    """

    stall_s: float = 0.0
    back_to: float | None = None
    replay: float | None = None


class System(Protocol):
    """How a system trains and what failures cost it: no state, only functions of the pattern of vacant places."""

    @property
    def name(self) -> str:
        """As in tables."""

    @property
    def layout(self) -> Layout:
        """The job's shape."""

    def throughput(self, pattern: Pattern) -> float:
        """As a share of training without failures and without the system's own overhead; 0 if it must wait."""

    def failure(self, before: Pattern, after: Pattern, event: TraceEvent) -> FailureCost:
        """Of losing ``event.lost``; places in ``event.joined`` are filled in the same moment."""

    def join(self, before: Pattern, after: Pattern) -> FailureCost:
        """Of filling places when nobody fails."""


@dataclass(frozen=True)
class ProgressSegment:
    """A time of constant progress: from ``start_s`` to ``end_s`` with ``live`` workers at ``rate`` work a second."""

    start_s: float
    end_s: float
    live: int
    rate: float


@dataclass
class SimulationResult:
    """What became of a job.

    Attributes:
        system: its name.
        workers: its places.
        seconds: simulated.
        work: kept, in seconds of training without failures.
        stalled_s: time in stalls.
        waiting_s: time in which it could not train for want of workers, outside stalls.
        lost: work that was made and lost.
        failures: workers failed.
        by_live: by number of live workers: seconds and kept work. Work lost at a change counts for the time after it.
        segments: by time.
    """

    system: str
    workers: int
    seconds: float = 0.0
    work: float = 0.0
    stalled_s: float = 0.0
    waiting_s: float = 0.0
    lost: float = 0.0
    failures: int = 0
    by_live: dict[int, tuple[float, float]] = field(default_factory=dict)
    segments: list[ProgressSegment] = field(default_factory=list)

    @property
    def useful(self) -> float:
        """Average throughput, as a share of that without failures."""
        return self.work / self.seconds

    def average(self, at_least: int) -> float:
        """The same over the times with at least so many live workers; NaN if there are none."""
        there = [row for live, row in self.by_live.items() if live >= at_least]
        return sum(work for _, work in there) / sum(seconds for seconds, _ in there) if there else math.nan


def simulate(trace: Trace, system: System) -> SimulationResult:
    """Run ``system`` through ``trace``.

    A stall that is interrupted by another change lasts at least as long as the new one asks for: a recovery that loses
    a worker starts again.

    Raises:
        ConfigError: if the trace is of another number of workers than the system's layout.
    """
    if trace.workers != system.layout.workers:
        raise ConfigError(f"the trace has {trace.workers} workers, the layout of {system.name} {system.layout.workers}")
    run = _Run(system, trace)
    for event in trace.events:
        if event.time_s > trace.duration_s:
            break
        run.advance(event.time_s)
        run.change(event)
    run.advance(trace.duration_s)
    return run.result


def merge(results: Sequence[SimulationResult]) -> SimulationResult:
    """Several runs of one system as one, without segments: their averages are those over all."""
    total = SimulationResult(results[0].system, results[0].workers)
    for one in results:
        for name in ("seconds", "work", "stalled_s", "waiting_s", "lost", "failures"):
            setattr(total, name, getattr(total, name) + getattr(one, name))
        for live, (seconds, work) in one.by_live.items():
            _add(total.by_live, live, seconds, work)
    return total


class _Run:
    def __init__(self, system: System, trace: Trace) -> None:
        self.system = system
        self.pattern = Pattern(system.layout)
        self.result = SimulationResult(system.name, trace.workers)
        self.now = self.stalled_until = 0.0

    def advance(self, until: float) -> None:
        resumed = min(max(self.now, self.stalled_until), until)
        self.result.stalled_s += resumed - self.now
        self._pass(resumed, 0.0)
        rate = self.system.throughput(self.pattern)
        if rate == 0:
            self.result.waiting_s += until - resumed
        self._pass(until, rate)
        self.result.seconds = until

    def change(self, event: TraceEvent) -> None:
        before, after = self.pattern, self.pattern.after(event.lost, event.joined)
        cost = self.system.failure(before, after, event) if event.lost else self.system.join(before, after)
        self.pattern = after
        self.result.failures += len(event.lost)
        stall = cost.stall_s
        if cost.back_to is not None:
            since = self.result.work - math.floor(self.result.work / cost.back_to + 1e-9) * cost.back_to
            since = max(since, 0.0)
            if cost.replay is None:
                self.result.work -= since
                self.result.lost += since
                _add(self.result.by_live, after.live, 0.0, -since)
            else:
                stall += cost.replay * since
        self.stalled_until = max(self.stalled_until, self.now + stall)

    def _pass(self, until: float, rate: float) -> None:
        seconds = until - self.now
        if seconds > 0:
            live = self.pattern.live
            self.result.work += seconds * rate
            self.result.segments.append(ProgressSegment(self.now, until, live, rate))
            _add(self.result.by_live, live, seconds, seconds * rate)
        self.now = until


def _add(table: dict[int, tuple[float, float]], live: int, seconds: float, work: float) -> None:
    before = table.get(live, (0.0, 0.0))
    table[live] = (before[0] + seconds, before[1] + work)

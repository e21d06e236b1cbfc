"""What workers report of their durations while they train, and how they come to new times together.

In every :data:`EVERY`-th step each worker reports its medians to the first worker of the last stage, which reads them
when it tells all others the losses of a step. By then everybody has begun the step and has reported, so nobody waits.
When the times that follow have drifted in :data:`STEADY` reports in a row, that worker proposes them with those losses.
Plans for them are made in the background, and reports say who has the one that is needed. When all have it, the worker
tells all, again with the losses, that the new times hold from the next step on; nobody begins that step without having
heard it. A failure makes all that was proposed void; new times hold for all or for nobody, as the survivors tell each
other.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from shared_core.faults import inject
from shared_core.reroute.history import PlanHistory
from shared_core.reroute.messages import MessageChannel, MessageKey, MessageKind, Tensors
from shared_core.reroute.places import WorkerPlace
from shared_core.reroute.planning import Plans, Proposal, TimesInUse
from shared_core.reroute.times import (
    COMMUNICATION,
    EQUAL,
    Medians,
    MemoryUse,
    Profile,
    agree,
    bytes_held,
    completed,
    drifts,
    spare_bytes,
)
from shared_core.schedule.schedule import Kind, PlannedWorker
from shared_core.schedule.timing import Times

#: Steps after whose last all workers go by measured times.
MEASURED = 3

#: Steps from one report to the next, and steps of which medians are taken.
EVERY = 4
#: Reports in a row that must show a drift.
STEADY = 2


class Word(IntEnum):
    NOTHING = 0
    PROPOSAL = 1  # new times, for which plans are to be made; they follow
    SWITCH = 2  # the times of the last proposal hold from the next step on


@dataclass(frozen=True)
class Reported:
    """Medians of a worker, empty from one that has just come, and the proposal that it has the plan for, or -1."""

    medians: Medians
    ready: int = -1


@dataclass(frozen=True)
class Deliberation:
    """The state of the worker that decides. It starts from scratch when workers come or go.

    Attributes:
        number: the step in which the last proposal was made; -1 before one.
        proposed: times of a proposal that do not hold yet; None when there is none.
        seen: reports in a row that have shown a drift.
    """

    number: int = -1
    proposed: Times | None = None
    seen: int = 0


def decide(
    before: Deliberation, step: int, reports: Mapping[PlannedWorker, Reported], used: Times, stages: int
) -> tuple[Deliberation, Word]:
    """What to say after the reports of ``step``, and the new state. ``reports`` are of all workers that are there."""
    if before.proposed is not None and all(one.ready == before.number for one in reports.values()):
        return Deliberation(before.number), Word.SWITCH
    found = agree(((worker, one.medians) for worker, one in reports.items()), stages, used)
    if found is None or not drifts(found, before.proposed or used, reports):
        return replace(before, seen=0), Word.NOTHING
    if before.seen + 1 < STEADY:
        return replace(before, seen=before.seen + 1), Word.NOTHING
    return Deliberation(step, found), Word.PROPOSAL


#: Order of the medians in a report.
_NAMES = (*(kind.value for kind in Kind), COMMUNICATION)


class Measuring:
    """Measures the actions of one worker, and has all workers agree on times: at the end of the first steps, and later
    when they have drifted.
    """

    _channel: MessageChannel

    def __init__(self, place: WorkerPlace, planner: Plans, history: PlanHistory) -> None:
        self._place, self._planner, self._history = place, planner, history
        self._topology, self._me, self._rank = place.topology, place.me, place.places.rank
        self._deliberation = Deliberation()
        self._reported = -1
        self._rows: Mapping[PlannedWorker, Reported] = {}
        self._profile = Profile()
        self._held_bytes: int | None = None
        #: First step of the job; the same at all workers once they have exchanged it.
        self._first: int | None = None
        self._began: int | None = None

    def begin(self, step: int) -> None:
        if self._first is None:
            self._first = step
        if self._began is None:
            self._began = step

    def takes(self, step: int) -> bool:
        """Whether durations are taken: not in this worker's first step, in which allocators and caches warm up."""
        return self._began is not None and step > self._began

    def takes_halves(self, step: int) -> bool:
        return self._planner.times is None and self.takes(step)

    def add(self, step: int, kind: Kind, began: float) -> None:
        """Note an action that ends now; ``began`` is a time of ``time.perf_counter``."""
        if self.takes(step):
            self._profile.add(kind, time.perf_counter() - began, step)

    def recent(self, since: int) -> dict[str, float]:
        """Medians in seconds from step ``since`` on, completed; empty before there are any, or times are agreed."""
        medians, used = self._profile.medians(since), self._planner.times
        if used is None or not medians.keys() & {Kind.F, Kind.I, Kind.W, Kind.B}:
            return {}
        return completed(medians, used.at(self._me))

    def measure_held(self, step: int, tensors: Tensors, outputs: Tensors, parameters: Sequence[Tensor]) -> None:
        """After a forward: measure once what it holds until its backward."""
        if self._held_bytes is None and self.takes(step):
            self._held_bytes = bytes_held(tensors, outputs, parameters)

    def view(self) -> dict[str, Any]:
        """What others are told after a failure; plain data."""
        return {"began": self._first} | self._planner.view()

    def learn(self, views: Mapping[int, Any]) -> None:
        """Take over the times in use, and the first measured step, from what others have told."""
        self._first = min((view["began"] for view in views.values() if view["began"] is not None), default=None)
        self._planner.learn(views.values())

    def agree(self, channel: MessageChannel, step: int, activations: Sequence[Tensors]) -> None:
        """At the end of the last measured step: all exchange medians, and use the same times and limits."""
        if self._planner.times is not None:  # always at another's place: nobody moves before there are times
            return
        assert self._first is not None
        if step + 1 < self._first + MEASURED:
            return
        survivor_group = channel.survivor_group
        self._ping(channel, step, survivor_group.exchange(bool(activations)), activations[:1])
        use = MemoryUse(self._held_bytes, spare_bytes())
        found = survivor_group.exchange({"medians": self._profile.medians(), "memory": list(use)})
        workers = self._place.places.workers()
        times = agree(((workers[rank], one["medians"]) for rank, one in found.items()), self._topology.stages)
        room = self._planner.room_for((workers[rank].stage, MemoryUse(*one["memory"])) for rank, one in found.items())
        self._planner.adopt(TimesInUse(step + 1, EQUAL if times is None else times), room)

    def _ping(self, channel: MessageChannel, step: int, sends: Mapping[int, bool], parts: Sequence[Tensors]) -> None:
        """Measure how long activations take to the next stage: half of the way there and back, in turn."""
        d, s = self._me
        there = {w.stage: self._rank(w) for w in self._topology.workers() if w.pipeline == d}
        for number in range(2):  # the first time connections and shapes are new
            ask, answer = (MessageKey(step, MessageKind.PING, stage, d, number) for stage in (s, s - 1))
            if s > 0 and sends.get(there[s - 1]):
                got = channel.fetch(ask, there[s - 1])
                channel.send(answer, got, there[s - 1])
            if parts and there.get(s + 1) in sends:
                began, ask = time.perf_counter(), ask._replace(stage=s + 1)
                channel.send_shaped(ask, parts[0], there[s + 1])
                channel.fetch_like(answer._replace(stage=s), parts[0], there[s + 1])
                if number:
                    self._profile.add(COMMUNICATION, (time.perf_counter() - began) / 2)

    # -- reports -------------------------------------------------------------------------------------------------------

    def connect(self, channel: MessageChannel) -> None:
        """A new survivor group makes reports and proposals void."""
        self._channel, self._deliberation, self._reported = channel, Deliberation(), -1
        self._planner.proposal = None

    def _there(self) -> dict[PlannedWorker, int]:
        return {w: self._rank(w) for w in self._topology.workers() if w not in self._history.failed}

    def _decider(self) -> PlannedWorker:
        return min(worker for worker in self._there() if worker.stage == self._topology.stages - 1)

    def _due(self, step: int) -> bool:
        return step % EVERY == 0 and 0 <= self._planner.since <= step

    def _mine(self, step: int) -> Reported:
        return Reported(self.recent(step - EVERY), self._planner.ready_for(self._history.failed))

    def report(self, step: int) -> None:
        """Report, if it is due, when a step begins or continues over a new survivor group."""
        decider = self._decider()
        if not self._due(step) or self._reported == step or decider == self._me:
            return
        self._reported = step
        mine = self._mine(step)
        values = torch.tensor([mine.ready, *_values(mine.medians)], dtype=torch.float64)
        self._channel.send(self._key(step, MessageKind.REPORT, self._me), [values], self._rank(decider))

    def word(self, step: int) -> Word:
        """At the worker that decides, before it tells losses: wait for the reports and decide what else to tell."""
        used = self._planner.times
        if not self._due(step) or used is None or self._decider() != self._me:
            return Word.NOTHING
        reports = {self._me: self._mine(step)}
        like = torch.empty(1 + len(_NAMES), dtype=torch.float64)
        for worker, rank in self._there().items():
            if worker != self._me:
                (values,) = self._channel.fetch_like(self._key(step, MessageKind.REPORT, worker), [like], rank)
                ready, *medians = values.tolist()
                reports[worker] = Reported(_medians(medians), int(ready))
        self._rows = reports
        self._deliberation, word = decide(self._deliberation, step, reports, used, self._topology.stages)
        return word

    def tell(self, step: int, word: Word) -> None:
        """At the worker that decides, after the losses: send what goes with the word, and apply it here."""
        if word is Word.PROPOSAL:
            rows = [self._rows.get(worker, Reported({})) for worker in self._topology.workers()]
            values = torch.tensor([_values(row.medians) for row in rows], dtype=torch.float64)
            for worker, rank in self._there().items():
                if worker != self._me:
                    self._channel.send(self._key(step, MessageKind.PROPOSAL, self._me), [values], rank)
            self._propose(step, values)
        elif word is Word.SWITCH:
            self._switch(step)

    def hear(self, step: int, word: Word) -> None:
        """Apply the word that came with the losses of a step. Raises SurvivorGroupBroken after a failure."""
        if word is Word.PROPOSAL:
            decider = self._decider()
            like = torch.empty(len(self._topology.workers()), len(_NAMES), dtype=torch.float64)
            key = self._key(step, MessageKind.PROPOSAL, decider)
            (values,) = self._channel.fetch_like(key, [like], self._rank(decider))
            self._propose(step, values)
        elif word is Word.SWITCH:
            self._switch(step)

    def _propose(self, step: int, values: Tensor) -> None:
        rows = zip(self._topology.workers(), map(_medians, values.tolist()), strict=True)
        times = agree(rows, self._topology.stages, self._planner.times)
        assert times is not None
        self._planner.proposal = Proposal(step, times)
        inject.point("reroute.proposed")

    def _switch(self, step: int) -> None:
        assert self._planner.proposal is not None
        used = TimesInUse(step + 1, self._planner.proposal.times, self._history.failed)
        self._planner.adopt(used, self._planner.room)
        inject.point("reroute.switched")

    def _key(self, step: int, kind: MessageKind, worker: PlannedWorker) -> MessageKey:
        return MessageKey(step, kind, worker.stage, worker.pipeline)


def _values(medians: Medians) -> list[float]:
    return [medians.get(name, math.nan) for name in _NAMES]


def _medians(values: list[float]) -> dict[str, float]:
    return {name: value for name, value in zip(_NAMES, values, strict=True) if not math.isnan(value)}

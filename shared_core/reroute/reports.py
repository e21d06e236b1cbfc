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
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import IntEnum

import torch
from torch import Tensor

from shared_core.faults import inject
from shared_core.reroute.history import PlanHistory
from shared_core.reroute.measuring import Measuring
from shared_core.reroute.messages import MessageChannel, MessageKey, MessageKind
from shared_core.reroute.places import WorkerPlace
from shared_core.reroute.planning import Plans, Proposal, TimesInUse
from shared_core.reroute.times import Medians, agree, drifts
from shared_core.schedule.profile import COMMUNICATION
from shared_core.schedule.schedule import Kind, PlannedWorker
from shared_core.schedule.timing import Times

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


class RerouteReports:
    _channel: MessageChannel

    def __init__(self, place: WorkerPlace, planner: Plans, measuring: Measuring, history: PlanHistory) -> None:
        self._topology, self._me, self._rank = place.topology, place.me, place.rank_of
        self._planner, self._measuring, self._history = planner, measuring, history
        self._deliberation = Deliberation()
        self._reported = -1
        self._rows: Mapping[PlannedWorker, Reported] = {}

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
        return Reported(self._measuring.recent(step - EVERY), self._planner.ready_for(self._history.failed))

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

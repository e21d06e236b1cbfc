"""Durations that a worker takes, and the times that all workers plan with after the first steps."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from shared_core.reroute.messages import MessageChannel, MessageKey, MessageKind, Tensors
from shared_core.reroute.places import WorkerPlace
from shared_core.reroute.planning import Plans, TimesInUse
from shared_core.reroute.room import MemoryUse, bytes_held, spare_bytes
from shared_core.reroute.times import EQUAL, agree, completed
from shared_core.schedule.profile import COMMUNICATION, Profile
from shared_core.schedule.schedule import Kind

#: Steps after whose last all workers go by measured times.
MEASURED = 3


class Measuring:
    """Measures the actions of one worker, and has all workers agree on times at the end of the first steps."""

    def __init__(self, place: WorkerPlace, planner: Plans) -> None:
        self._place, self._planner = place, planner
        self._topology, self._me, self._rank = place.topology, place.me, place.rank_of
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
        workers = self._place.workers()
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

"""Durations that workers take in the first steps, and the times that all of them then plan with."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from shared_core.reroute.messages import MessageChannel, MessageKey, MessageKind, Tensors
from shared_core.reroute.planning import EQUAL, Plans, agree, from_dict, to_dict
from shared_core.reroute.step import WorkerPlace
from shared_core.schedule.profile import COMMUNICATION, Profile
from shared_core.schedule.schedule import Kind

#: Steps after whose last all workers go by measured times.
MEASURED = 3


class Measuring:
    """Measures the actions of one worker until all workers have agreed on times.

    Args:
        place: of this worker.
        planner: goes by the times.
    """

    def __init__(self, place: WorkerPlace, planner: Plans) -> None:
        self._place, self._planner = place, planner
        self._topology, self._me, self._rank = place.topology, place.me, place.rank_of
        self._profile = Profile()
        #: First step of the job; the same at all workers once they have told each other.
        self._first: int | None = None

    def begin(self, step: int) -> None:
        """A step begins."""
        if self._first is None:
            self._first = step

    def takes(self, step: int) -> bool:
        """Whether durations are taken in a step: not in the first, in which allocators and caches warm up."""
        return self._planner.times is None and self._first is not None and step > self._first

    def add(self, step: int, kind: Kind, began: float) -> None:
        """An action of a step is over; it began at this time of ``time.perf_counter``."""
        if self.takes(step):
            self._profile.add(kind, time.perf_counter() - began)

    def view(self) -> dict[str, Any]:
        """What others are told after a loss; plain data."""
        times = self._planner.times
        return {"began": self._first, "times": None if times is None else to_dict(times)}

    def learn(self, views: Mapping[int, Any]) -> None:
        """Take over the times that others go by, or from which step on they measure."""
        self._first = min((view["began"] for view in views.values() if view["began"] is not None), default=None)
        known = next((view["times"] for view in views.values() if view["times"] is not None), None)
        if known is not None and self._planner.times is None:
            self._planner.adopt(from_dict(known))

    def agree(self, channel: MessageChannel, step: int, activations: Sequence[Tensors]) -> None:
        """At the end of the last step that is measured, all workers tell what they found, and go by the same times.

        Args:
            channel: joins the workers that are there.
            step: which has ended.
            activations: that this worker has sent in it.

        Raises:
            LaneBroken: somebody was lost.
        """
        assert self._first is not None
        if self._planner.times is not None or step + 1 < self._first + MEASURED:
            return
        lane = channel.lane
        self._ping(channel, step, lane.exchange(bool(activations)), activations[:1])
        found = lane.exchange(self._profile.medians())
        workers = self._place.workers()
        times = agree(((workers[rank].stage, one) for rank, one in found.items()), self._topology.stages)
        self._planner.adopt(EQUAL if times is None else times)

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

"""A replacement takes the failed worker's place, at the step boundary where that was."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

import torch

from shared_core.encoding.plain import dumps
from shared_core.faults import inject
from shared_core.protocol import progress_file
from shared_core.worker.checkpoints.recovery_line import Restored
from shared_core.worker.fatal_actions import EXIT_STALE
from shared_core.worker.program.boundary_state import BoundaryState
from shared_core.worker.program.publishing import Publishing
from shared_core.worker.program.trained import Trained
from shared_core.worker.recovery.replay import Replays
from shared_core.worker.recovery.reporting import RecoveryReporter
from shared_core.worker.recovery.start_point import WorkerStart
from shared_core.worker.state.local_state import BoundaryPosition


class Joining:
    """Runs the program to the place that this worker begins from, where that is not its start."""

    def __init__(
        self,
        start: WorkerStart,
        position: BoundaryPosition,
        state: BoundaryState,
        trained: Trained,
        progress: progress_file.ProgressFile,
        replays: Replays,
        reporter: RecoveryReporter,
        publishing: Publishing,
    ) -> None:
        self._start, self._position, self._state, self._trained = start, position, state, trained
        self._progress = progress
        self._replays, self._reporter, self._publishing = replays, reporter, publishing

    @property
    def pending(self) -> bool:
        """Whether there is a place to reach, and it is not reached yet."""
        return self._start.start_point.joining

    def at(self, kind: str) -> bool:
        """The program is at a step boundary of this kind. True if this was the place: it is taken now."""
        if not self._start.start_point.is_here(kind, self._position.entry):
            return False
        self._join()
        return True

    def here(self, kind: str, began: float) -> None:
        """This is a copy of the worker that has left, at the step boundary where that did so: it has all of the state,
        and joins. ``began``: ``time.time()``. The process exits if the place is another one, or a fork has changed what
        was published: another replacement follows.
        """
        start_point, position = self._start.start_point, self._position
        if not start_point.is_here(kind, position.entry):
            os._exit(EXIT_STALE)
        self._trained.updates.stay()
        place, received = start_point.reach(position.entry, self._trained.replicas)
        if received is None or place.boundary.index != position.boundaries or self._changed(place.parts):
            os._exit(EXIT_STALE)
        self._trained.updates.load(place.boundary.version, place.description, place.tensors, owned=True)
        self._start.checkpoints.joined(place.boundary, saved=False)
        start_point.joined()
        inject.set_step(position.boundaries)
        self._reporter.began(place.boundary.index, start_point.reached(place))
        self._reporter.joined(received, joined_s=time.time() - began)

    def _changed(self, published: Mapping[str, Any]) -> bool:
        """Whether this copy has other rank-local state than was published. What holds a clock changes by itself, from
        one look to the next.
        """
        once, again = self._state.capture(None), self._state.capture(None)
        return any(
            dumps(once[name]) == dumps(again[name]) != dumps(published[name]) for name in once.keys() & published.keys()
        )

    def _join(self) -> None:
        inject.point("join")
        started = time.time()
        start_point = self._start.start_point
        place, received = start_point.reach(self._position.entry, self._trained.replicas)
        admitted = received is not None and place.added
        if received is not None:
            self._replays.begin(received.replaying)
        self._trained.load(place)
        with self._position.restoring(resized=place.resized, added=place.added):
            gradients = self._take_place(place)
        self._position.note_rejoined(admitted)
        self._reporter.began(place.boundary.index, start_point.reached(place))
        self._reporter.passed()
        if admitted or received is None:
            # Where a checkpoint is there already, or others make none, none is made.
            self._publishing.publish(place.boundary.kind, gradients, save=not (admitted or place.tier))
        if received is not None:
            self._reporter.joined(received, **({} if admitted else {"joined_s": time.time() - started}))

    def _take_place(self, place: Restored) -> dict[int, torch.Tensor] | None:
        """Returns the pending gradients."""
        self._position.boundaries = place.boundary.index
        self._start.checkpoints.joined(place.boundary, saved=bool(place.tier))
        self._start.start_point.joined()
        gradients = self._state.restore(place)
        inject.set_step(self._position.boundaries)
        self._progress.boundary(self._position.boundaries)
        return gradients

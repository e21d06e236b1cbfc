"""The step boundaries of the program: which are recovery points, what is published there, where a replacement takes the
failed worker's place, and where a worker leaves.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from shared_core.encoding.plain import dumps
from shared_core.faults import inject
from shared_core.protocol import progress_file
from shared_core.protocol.frontier import StepBoundary
from shared_core.protocol.leaving import EXIT_LEFT, FILE
from shared_core.worker.checkpoints.recovery_line import Restored
from shared_core.worker.checkpoints.resharding import GRADIENTS
from shared_core.worker.comm import Runtime, compat
from shared_core.worker.comm.group import SwiftProcessGroup
from shared_core.worker.comm.state import EXIT_STALE
from shared_core.worker.integrity import StateCheck
from shared_core.worker.program.own_standby import OwnStandby, flush
from shared_core.worker.program.trained import StepClock, Trained
from shared_core.worker.recovery.replay import Replays
from shared_core.worker.recovery.replicas import Replicas
from shared_core.worker.recovery.reporting import RecoveryReporter
from shared_core.worker.recovery.start_point import WorkerStart
from shared_core.worker.recovery.survivor_groups import SurvivorGroups
from shared_core.worker.state.local_state import BoundaryPosition, StateParts
from shared_core.worker.state.publications import UNOPTIMIZED, SharedMemoryPublisher

_PLACE, _GROUPS = "swift.place", "swift.groups_made"


def _capture_groups(runtime: Runtime) -> dict[str, Any]:
    """The groups that the program has made, as plain data: the number of the next one, how often each name was given,
    and those that are there.

    A group is named by how many were made before it, and a replacement has made those of the start-up only. At its step
    boundary it makes the others that are there, under their names, and counts on from where the failed worker was.
    """
    groups = [
        [name, list(group.ranks), group.timeout.total_seconds(), desc]
        for name, group, desc in _groups_there()
        if group is not runtime.world
    ]
    with runtime.lock:
        return {"next": compat.groups_made(), "given": dict(runtime.groups.given), "groups": groups}


def _restore_groups(runtime: Runtime, captured: dict[str, Any], *, missing: bool) -> None:
    """Make the groups of ``captured`` that are missing and have this rank, and count on from there. With ``missing``
    False it makes none, for another number of ranks.
    """
    given, there = captured["given"], {name for name, _, _ in _groups_there()}
    wanted = [each for each in captured["groups"] if each[0] not in there and runtime.rank in each[1]]
    with runtime.generations.in_the_background():
        for name, ranks, timeout_s, desc in wanted if missing else ():
            with runtime.lock:
                runtime.groups.given[name] = given[name] - 1
            compat.make_group(name, ranks, timedelta(seconds=timeout_s), desc)
    with runtime.lock:
        dict.update(runtime.groups.given, given)  # a Counter's own would add
    compat.name_groups_from(captured["next"])


def _groups_there() -> list[tuple[str, Any, str]]:
    """torch's name of each group, its state, and its description."""
    return [
        (compat.group_name(group), group._state, group.group_desc)
        for group in compat.groups_there()
        if isinstance(group, SwiftProcessGroup)
    ]


class Checkpointing:
    """What the program says and asks of the job's checkpoints."""

    def __init__(self, start: WorkerStart, position: BoundaryPosition, publisher: SharedMemoryPublisher) -> None:
        self._start, self._position, self._publisher = start, position, publisher
        self._reachable = True

    @property
    def near(self) -> bool:
        """Rank 0: whether a checkpoint may be made at the next boundary; first flush what it counts as written."""
        return self._start.checkpoints.near(self._position.boundaries + 1)

    @property
    def due(self) -> bool:
        """Whether a checkpoint was due at the present step boundary; all ranks agree on it."""
        return self._position.boundaries > 0 and self._start.checkpoints.due_boundary == self._position.boundaries

    def keep_number(self, reason: str) -> None:
        """Checkpoints made from now on serve no other number of workers; the reason is shown to the user."""
        self._start.checkpoints.keep_number(reason)

    def note_reachable(self, reachable: bool) -> None:
        """Whether a fresh worker that runs the script gets to the present place; elsewhere no checkpoint is written."""
        self._reachable = reachable

    def note_loss(self, loss: torch.Tensor | float) -> None:
        if (pricing := self._start.checkpoints.pricing) is not None:
            pricing.loss(self._position.boundaries, loss)

    def at_boundary(self, boundary: StepBoundary, parts: dict[str, Any]) -> None:
        if self._reachable:
            self._start.checkpoints.at_boundary(boundary, parts, self._publisher)


class Publishing:
    """Publishes step boundaries, and drops what no replacement needs any more."""

    def __init__(
        self,
        position: BoundaryPosition,
        parts: StateParts,
        trained: Trained,
        runtime: Runtime,
        publisher: SharedMemoryPublisher,
        survivor_groups: SurvivorGroups,
        replicas: Replicas,
        checkpoints: Checkpointing,
    ) -> None:
        self._position, self._parts, self._trained, self._runtime = position, parts, trained, runtime
        self._publisher, self._survivor_groups, self._replicas = publisher, survivor_groups, replicas
        self._checkpoints = checkpoints

    def capture(self, gradients: dict[int, torch.Tensor] | None) -> dict[str, Any]:
        """Plain data, in part live; ``gradients``: pending ones, by place."""
        parts = self._parts.capture() | self._trained.capture()
        parts |= {_GROUPS: _capture_groups(self._runtime), _PLACE: self._runtime.place.capture()}
        return parts if gradients is None else parts | {GRADIENTS: gradients}

    def restore(self, place: Restored) -> dict[int, torch.Tensor] | None:
        """Put back what ``place`` has beside replicated state, which is there. Returns the pending gradients."""
        parts = place.parts | self._parts.of_main(place.main)
        self._runtime.place.restore(parts[_PLACE])
        # Before variables, which may name groups.
        _restore_groups(self._runtime, parts[_GROUPS], missing=not (place.resized or place.added))
        self._parts.restore(parts)
        self._trained.set_gradients(parts.get(GRADIENTS, {}))
        self._trained.restore(parts, place.boundary.index, again=bool(place.tier) or place.resized)
        return place.parts.get(GRADIENTS)

    def at_boundary(self, kind: str, grads: dict[int, torch.Tensor] | None = None) -> None:
        """As :meth:`publish`, under the publisher's lock: no replacement is given a state from the middle of it."""
        with self._publisher.publishing:
            self.publish(kind, grads)

    def publish(self, kind: str, grads: dict[int, torch.Tensor] | None = None, *, save: bool = True) -> None:
        """Publish the present step boundary. ``grads``: pending ones, by place; ``save``: a checkpoint may be made."""
        if kind != "batch":  # a batch has been begun, and nothing has run since
            self._trained.updates.outside.see()
        if self._trained.shard is not None:
            self._trained.shard.reshard()
        # First make room: drop what nobody needs any more.
        self._publisher.drop_before(self._settled())
        parts = self.capture(grads)
        boundary = self._boundary(kind)
        values = parts.get(UNOPTIMIZED)
        refers = (
            {UNOPTIMIZED: self._trained.unoptimized.publish(self._publisher, boundary.index, values)} if values else {}
        )
        self._publisher.publish_boundary(boundary, parts | refers)
        self._passed(boundary)
        if save and kind == "batch" and not self._runtime.absent:
            self._checkpoints.at_boundary(boundary, parts)

    def _boundary(self, kind: str) -> StepBoundary:
        runtime = self._runtime
        with runtime.lock:
            groups = {name: group.next for name, group in runtime.groups.items()}
            marks = {name: group.channels.watermarks() for name, group in runtime.groups.items()}
        return StepBoundary(
            index=self._position.boundaries,
            version=self._trained.updates.version,
            entry=self._position.entry,
            kind=kind,
            groups=groups,
            received={name: mark[0] for name, mark in marks.items() if mark[0]},
            sent={name: mark[1] for name, mark in marks.items() if mark[1]},
            members={name: group.members for name, group in runtime.groups.items()},
            replicas=self._trained.replicas,
            own=self._trained.shard is not None,
        )

    def _settled(self) -> int:
        """The newest step boundary that every rank has published."""
        return self._runtime.stable if self._trained.shard is None else self._runtime.results.settle_marked()

    def _passed(self, boundary: StepBoundary) -> None:
        """Drop logs and publications of boundaries that no replacement of this rank begins at any more."""
        self._runtime.passed_boundary(boundary.index)
        self._runtime.results.mark(boundary.index)
        stable = self._settled()
        if self._survivor_groups.formed:
            stable = boundary.index  # a replacement is a copy of a replica as it is at its newest boundary
            self._runtime.results.settle(stable)
        self._publisher.drop_before(stable)
        self._trained.at_boundary(boundary.index, stable)
        self._replicas.compare(self._trained.compared, alike=self._trained.kept_alike, last=boundary.kind != "batch")


class Joining:
    """Runs the program to the place that this worker begins from, where that is not its start."""

    def __init__(
        self,
        start: WorkerStart,
        position: BoundaryPosition,
        trained: Trained,
        progress: progress_file.ProgressFile,
        replays: Replays,
        reporter: RecoveryReporter,
        publishing: Publishing,
    ) -> None:
        self._start, self._position, self._trained = start, position, trained
        self._progress = progress
        self._replays, self._reporter, self._publishing = replays, reporter, publishing

    @property
    def pending(self) -> bool:
        return self._start.joining

    def at(self, kind: str) -> bool:
        """The program is at a step boundary of this kind. True if this was the place: it is taken now."""
        if not self._start.is_here(kind, self._position.entry):
            return False
        self._join()
        return True

    def here(self, kind: str, began: float) -> None:
        """This is a copy of the worker that has left, at the step boundary where that did so: it has all of the state,
        and joins. ``began``: ``time.time()``. The process exits if the place is another one, or a fork has changed what
        was published: another replacement follows.
        """
        start, position = self._start, self._position
        if not start.is_here(kind, position.entry):
            os._exit(EXIT_STALE)
        self._trained.updates.stay()
        place, received = start.reach(position.entry, self._trained.replicas)
        if received is None or place.boundary.index != position.boundaries or self._changed(place.parts):
            os._exit(EXIT_STALE)
        self._trained.updates.load(place.boundary.version, place.description, place.tensors, owned=True)
        start.checkpoints.joined(place.boundary, saved=False)
        start.joined()
        inject.set_step(position.boundaries)
        self._reporter.began(place.boundary.index, start.reached(place))
        self._reporter.joined(received, joined_s=time.time() - began)

    def _changed(self, published: Mapping[str, Any]) -> bool:
        """Whether this copy has other rank-local state than was published, but for what holds a clock."""
        once, again = self._publishing.capture(None), self._publishing.capture(None)
        return any(
            dumps(once[name]) == dumps(again[name]) != dumps(published[name]) for name in once.keys() & published.keys()
        )

    def _join(self) -> None:
        inject.point("join")
        started = time.time()
        place, received = self._start.reach(self._position.entry, self._trained.replicas)
        admitted = received is not None and place.added
        if received is not None:
            self._replays.begin(received.replaying)
        self._trained.load(place)
        with self._position.restoring(resized=place.resized, added=place.added):
            gradients = self._take_place(place)
        self._position.note_rejoined(admitted)
        self._reporter.began(place.boundary.index, self._start.reached(place))
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
        self._start.joined()
        gradients = self._publishing.restore(place)
        inject.set_step(self._position.boundaries)
        self._progress.boundary(self._position.boundaries)
        return gradients


#: The launcher ends a worker whose copy is ready; after so many seconds the worker leaves without one.
_COPY_S = 10.0


class LeavingPublisher:
    """Publishes step boundaries, and looks there whether this worker is to leave. ``folder``: of the rank."""

    def __init__(
        self,
        folder: Path,
        publishing: Publishing,
        publisher: SharedMemoryPublisher,
        own_standby: OwnStandby,
        joining: Joining,
    ) -> None:
        self._file, self._publishing, self._publisher = folder / FILE, publishing, publisher
        self._own_standby, self._joining = own_standby, joining

    def at_boundary(self, kind: str, grads: dict[int, torch.Tensor] | None = None) -> None:
        """As :meth:`Publishing.at_boundary`, before anything of the batch is done. Returns where this worker stays, and
        in its copy.
        """
        self._publishing.at_boundary(kind, grads)
        if not os.path.lexists(self._file):
            return
        if self._file.read_text() != str(os.getpid()):  # for one that held the rank before
            return
        inject.point("leave")
        self._publisher.sync()
        flush()
        if self._own_standby.may_leave():
            began = time.time()
            if self._own_standby.copy():
                self._joining.here(kind, began)
                return
            threading.Event().wait(_COPY_S)
        os._exit(EXIT_LEFT)


#: So many boundaries in a row are no recovery points for pending gradients; then these are published, too.
_MAX_DEFERRED = 16


class StepBoundaries:
    """Counts step boundaries, and publishes those that are recovery points."""

    def __init__(
        self,
        position: BoundaryPosition,
        trained: Trained,
        runtime: Runtime,
        reporter: RecoveryReporter,
        publishing: LeavingPublisher,
        joining: Joining,
        clock: StepClock,
        state_check: StateCheck,
        resizes: bool,
    ) -> None:
        self._position, self._trained, self._runtime, self._resizes = position, trained, runtime, resizes
        self._progress, self._reporter, self._publishing, self._joining = clock.progress, reporter, publishing, joining
        self._clock, self._state_check = clock, state_check
        self._deferred = 0
        self._loss: torch.Tensor | float | None = None

    def note_loss(self, loss: torch.Tensor | float) -> None:
        """The training loss of this batch, for those who watch the job: told at the next step boundary, where a tensor
        of the host has its value. One of another device is not waited for.
        """
        self._loss = loss.detach() if isinstance(loss, torch.Tensor) else loss

    def expect(self, left: int) -> None:
        self._progress.expect(left)

    def batch(self, accumulating: bool, epoch: int | None) -> bool:
        if self._state_check.in_copy:  # it ends where gradients are reduced
            self._position.boundaries += 1
            self._runtime.place.step(epoch)
            return False
        inject.point("step_boundary")
        self._reporter.deliver()
        if self._joining.at("batch"):
            return True
        self._pass(epoch)
        updated = self._trained.updates.in_batch > 0
        self._trained.updates.next_batch()
        shard = self._trained.shard
        if accumulating or (shard is not None and shard.unsettled):
            return False
        grads = None
        pending = self._trained.updates.pending_gradients()
        if pending:
            self._deferred += 1
            # Pending gradients of a failed worker could not be divided among others, so with resizes nothing is
            # published. Those of a shard are small. Those that a whole step has left behind are there at each boundary.
            if shard is None and (self._resizes or (self._deferred <= _MAX_DEFERRED and not updated)):
                return False
            grads = self._trained.gradients() if shard is not None or not updated else None
        if self._trained.unsettled():  # counts the boundaries that could be recovery points, so it is asked last
            return False
        self._deferred = 0
        self._trained.meet()
        self._state_check.before_boundary(bool(grads))
        self._publishing.at_boundary("batch", self._trained.left_over(pending) if grads is None else grads)
        self._state_check.after_boundary()
        return False

    def evaluation(self) -> bool:
        """As :meth:`batch`, at the start of a stand-alone evaluation."""
        if self._state_check.in_copy:
            os._exit(0)
        self._reporter.deliver()
        if self._joining.at("eval"):
            return True
        self._pass(None)
        self._publishing.at_boundary("eval")
        return False

    def _pass(self, epoch: int | None) -> None:
        if (loss := self._loss) is not None:
            self._loss = None
            if not isinstance(loss, torch.Tensor) or (loss.is_cpu and loss.numel() == 1):
                self._progress.loss(float(loss))
        self._position.boundaries += 1
        self._clock.boundary(self._position.boundaries)
        self._runtime.place.step(epoch)
        self._progress.boundary(self._position.boundaries, self._runtime.groups.log_bytes())
        self._reporter.passed()

"""Publishes this worker at its step boundaries, and makes the job's checkpoints there."""

from __future__ import annotations

from typing import Any

import torch

from shared_core.protocol.frontier import StepBoundary
from shared_core.worker.comm import Runtime
from shared_core.worker.program.boundary_state import BoundaryState
from shared_core.worker.program.trained import Trained
from shared_core.worker.recovery.replicas import Replicas
from shared_core.worker.recovery.start_point import WorkerStart
from shared_core.worker.recovery.survivor_groups import SurvivorGroups
from shared_core.worker.state.local_state import BoundaryPosition
from shared_core.worker.state.publications import UNOPTIMIZED, SharedMemoryPublisher


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
        """See :meth:`Job.note_loss`."""
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
        state: BoundaryState,
        trained: Trained,
        runtime: Runtime,
        publisher: SharedMemoryPublisher,
        survivor_groups: SurvivorGroups,
        replicas: Replicas,
        checkpoints: Checkpointing,
    ) -> None:
        self._position, self._state, self._trained, self._runtime = position, state, trained, runtime
        self._publisher, self._survivor_groups, self._replicas = publisher, survivor_groups, replicas
        self._checkpoints = checkpoints

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
        parts = self._state.capture(grads)
        boundary = self._boundary(kind)
        values = parts.get(UNOPTIMIZED)
        refers = (
            {UNOPTIMIZED: self._trained.publish_unoptimized(self._publisher, boundary.index, values)} if values else {}
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

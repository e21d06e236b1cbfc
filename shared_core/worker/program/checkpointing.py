"""What the program says and asks of the job's checkpoints."""

from __future__ import annotations

from typing import Any

import torch

from shared_core.protocol.frontier import StepBoundary
from shared_core.worker.recovery.start import WorkerStart
from shared_core.worker.state.local_state import BoundaryPosition
from shared_core.worker.state.publications import SharedMemoryPublisher


class Checkpointing:
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

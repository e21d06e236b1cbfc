"""What a worker gives to others: its replicated state to a replacement, and, when the number of workers changes, to
those that follow. Meanwhile it makes no update.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from shared_core.encoding.plain import pieces
from shared_core.protocol.cut import Cut, Offer
from shared_core.protocol.mirroring import REPLICATED
from shared_core.protocol.worker_env import WorkerEnv
from shared_core.worker.state.local_state import BoundaryPosition
from shared_core.worker.state.publications import SharedMemoryPublisher
from shared_core.worker.state.updates import Updates


class Donor:
    """This worker as the exchange sees it. Recovery threads call."""

    def __init__(
        self, env: WorkerEnv, publisher: SharedMemoryPublisher, updates: Updates, position: BoundaryPosition
    ) -> None:
        self._env, self._publisher, self._updates, self._position = env, publisher, updates, position
        self._leaving = ExitStack()

    @property
    def version(self) -> int:
        return self._updates.state_version

    @property
    def keeps(self) -> dict[str, Any]:
        """Fields of a frontier: which states this worker has."""
        outside = self._updates.outside
        return {"boundary": outside.boundary, "kept": outside.boundaries.indices, "outside": outside.active}

    @contextmanager
    def frozen(
        self, min_version: int, boundary: int, *, wait: bool = True
    ) -> Iterator[tuple[dict[str, Any], list[torch.Tensor]]]:
        """The state at step boundary ``boundary``, or at a moment when no update runs and at least ``min_version``
        steps are in it; no update begins inside. Such a moment is waited for, ``wait_timeout_s`` at most, unless
        ``wait`` is False. See :meth:`Updates.frozen`.
        """
        timeout_s = self._env.config.detection.wait_timeout_s if wait else 0.0
        with self._updates.frozen(min_version, timeout_s, boundary) as exported:
            yield exported

    def stays_with(self, version: int) -> bool:
        """Whether this replacement is a copy of the worker that left, and has the state of this version itself."""
        return self._updates.stays_with(version)

    def places(self, count: int) -> list[torch.Tensor]:
        """A replacement's parameters, detached views that alias them, into which those of its donor are received: it
        has no state of its own yet. Empty if the donor has another number of them.
        """
        state = self._updates.replicated
        return [] if state is None or len(state.parameters) != count else [p.detach() for p in state.parameters]

    def offer(self) -> Offer:
        """Say what this worker has. From now on it passes no step boundary and makes no update,
        until :meth:`withdraw`.
        """
        self._leaving.close()
        self._leaving.enter_context(self._publisher.publishing)
        self._leaving.enter_context(self._updates.gate.held())
        self._publisher.sync()
        boundaries = tuple(
            (boundary.index, boundary.version, boundary.kind) for boundary in self._publisher.boundaries()
        )
        # A replacement that is still behind has parameters that no step boundary knows.
        has_state = not self._position.joining and self._updates.exact
        return Offer(self._env.rank, self._env.slot, boundaries, self._updates.state_version if has_state else None)

    def withdraw(self) -> None:
        self._leaving.close()

    def drain_for_resize(self, cut: Cut) -> None:
        """Write the replicated state at the cut to shared memory, for the workers that follow. Raises RecoveryFailed if
        it cannot be had.
        """
        with self._updates.at_version(cut.version, cut.boundary) as (description, tensors):
            self._publisher.put(REPLICATED, b"", pieces((description, list(tensors))))

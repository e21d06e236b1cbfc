"""What the forming of generations tells, and asks, the rest of the worker."""

from __future__ import annotations

from typing import Any, Protocol

from shared_core.protocol.frontier import StepBoundary
from shared_core.worker.recovery.exchange import Replaying


class RecoveryListener(Protocol):
    """Given to :class:`~shared_core.worker.recovery.recovery.WorkerRecovery`. Called on any thread."""

    def recovered(self, fields: dict[str, Any]) -> None:
        """Recovery thread of a survivor: a generation is formed. ``fields`` are those of its event."""

    def irreplaceable(self) -> str:
        """Why no failed worker of this job can be replaced; empty where one can."""

    def rerouted(self, detected: float) -> None:
        """Recovery thread of a survivor: it continues without a rank whose failure was noticed at ``detected``, in
        seconds since the epoch.
        """

    def replaying(self, replaying: Replaying) -> None:
        """Replacements run on from a checkpoint, and this survivor waits for them."""

    def saved_boundaries(self) -> list[StepBoundary]:
        """Step boundaries of the checkpoints that this rank can begin from."""

    def together(self) -> tuple[int, ...]:
        """Ranks that start again together with this one; empty without a log on disk."""

    def await_absent(self) -> bool:
        """A collective of all ranks waits for absent ones: admit them. False if nobody admits them."""

"""What one rank has of a model that is divided over the ranks, whoever has divided it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Protocol


class OwnState(Protocol):
    """Parameters and optimizer state that this rank publishes, because no other one has all of them.

    Attributes:
        unsettled: there is what belongs to no shard (gradients that are not reduced yet), so no replacement can begin
            here. All ranks agree, because the script decides it.
        step_bytes: what the logs of a step take of memory, about, in bytes.
        padded: inputs of reductions have places that nobody has written.
        apart: no operation of the model is of all ranks.
    """

    @property
    def unsettled(self) -> bool: ...
    @property
    def step_bytes(self) -> int: ...
    @property
    def padded(self) -> bool: ...
    @property
    def apart(self) -> bool: ...

    def reshard(self) -> None:
        """Let go of gathered parameters, so that a replacement and its peers gather the same from here on."""

    def capture(self) -> dict[str, Any]:
        """All of it: live tensors, to be written at once."""

    def restore(self, values: Mapping[str, Any]) -> None:
        """Inverse of :meth:`capture`."""

    def gradients(self) -> dict[int, Any]:
        """Those that are pending where it is not unsettled, by place, as plain data."""

    def left_over(self) -> dict[int, Any]:
        """Those that a batch with a whole update has left behind, by place; None for one that needs no copy."""

    def set_gradients(self, gradients: Mapping[int, Any]) -> None:
        """Inverse of :meth:`gradients` and :meth:`left_over`."""


class Owner(ABC):
    """Base of modules that divide a model themselves: engines."""

    @abstractmethod
    def own_state(self) -> OwnState:
        """What this rank has.

        Raises:
            Unsupported: it cannot be recovered.
        """

    @abstractmethod
    def holds(self, each: object) -> bool:
        """Whether this is a part of the engine, and what it has is in :meth:`own_state`: its optimizer, say."""

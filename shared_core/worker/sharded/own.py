"""What one rank has of a model that is divided over the ranks, whoever has divided it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Protocol


class OwnState(Protocol):
    """Parameters and optimizer state that this rank publishes, because no other rank has all of them.

    Attributes:
        unsettled: there is what belongs to no shard (gradients that are not reduced yet), so no replacement can begin
            here. All ranks agree, because it follows from the script.
        step_bytes: about what the logs of one step take of memory.
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
        """Free gathered parameters, so that a replacement and its peers gather the same from here on."""

    def capture(self) -> dict[str, Any]:
        """All of it: live tensors, to be written before the next update."""

    def restore(self, values: Mapping[str, Any]) -> None:
        """Inverse of :meth:`capture`."""

    def gradients(self) -> dict[int, Any]:
        """Pending gradients by place, as plain data; only where nothing is ``unsettled``."""

    def left_over(self) -> dict[int, Any]:
        """Those that a batch with a whole update has left behind, by place; None for one that needs no copy."""

    def set_gradients(self, gradients: Mapping[int, Any]) -> None:
        """Inverse of :meth:`gradients` and :meth:`left_over`."""


class Owner(ABC):
    """Base of modules that divide a model themselves: engines."""

    @abstractmethod
    def own_state(self) -> OwnState:
        """What this rank has; raises Unsupported if it cannot be recovered."""

    @abstractmethod
    def holds(self, each: object) -> bool:
        """Whether :meth:`own_state` covers this object, the engine's optimizer for instance."""

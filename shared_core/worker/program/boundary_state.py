"""The state of this worker at a step boundary, as it is published, and put back in a replacement."""

from __future__ import annotations

from typing import Any

import torch

from shared_core.worker.checkpoints.recovery_line import Restored
from shared_core.worker.checkpoints.resharding import GRADIENTS
from shared_core.worker.comm import Runtime
from shared_core.worker.comm.made_groups import MadeGroups
from shared_core.worker.program.trained import Trained
from shared_core.worker.state.local_state import StateParts

_PLACE, _GROUPS = "swift.place", "swift.groups_made"


class BoundaryState:
    """What the program has registered, with what belongs to the boundary itself: the place in the program, the groups
    that it has made, pending gradients.
    """

    def __init__(self, runtime: Runtime, parts: StateParts, trained: Trained) -> None:
        self._place, self._made_groups, self._parts, self._trained = runtime.place, MadeGroups(runtime), parts, trained

    def capture(self, gradients: dict[int, torch.Tensor] | None) -> dict[str, Any]:
        """Plain data, in part live; ``gradients``: pending ones, by place."""
        parts = self._parts.capture() | self._trained.capture()
        parts |= {_GROUPS: self._made_groups.capture(), _PLACE: self._place.capture()}
        return parts if gradients is None else parts | {GRADIENTS: gradients}

    def restore(self, place: Restored) -> dict[int, torch.Tensor] | None:
        """Put back what ``place`` has beside replicated state, which is there. Returns the pending gradients."""
        parts = place.parts | self._parts.of_main(place.main)
        if _PLACE in parts:  # not in older checkpoints
            self._place.restore(parts[_PLACE])
        if _GROUPS in parts:  # before variables, which may name groups
            self._made_groups.restore(parts[_GROUPS], missing=not (place.resized or place.added))
        self._parts.restore(parts)
        self._trained.set_gradients(parts.get(GRADIENTS, {}))
        self._trained.restore(parts, place.boundary.index, again=bool(place.tier) or place.resized)
        return place.parts.get(GRADIENTS)

"""Parameters and optimizer state as they were at step boundaries, for replacements of scripts that change them
outside updates.

Such a script's replacement cannot continue from newer state: what the script does in the batch would be in it already,
or would be done to other values. With the state of its step boundary it makes the updates itself, and the changes too.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Kept:
    """State with ``version`` updates at one step boundary; see :meth:`Replicated.export`. ``tensors`` are copies, but
    for those that were left out, which are live; ``copies`` has the copies by place in ``tensors``.
    """

    version: int
    description: dict[str, Any]
    tensors: list[torch.Tensor]
    copies: dict[int, torch.Tensor]


class KeptBoundaries:
    """States of the newest step boundaries. The memory of those that were dropped is used again: to write to memory
    that the process has not touched before costs many times more.
    """

    def __init__(self) -> None:
        self._kept: dict[int, Kept] = {}
        self._spare: dict[int, torch.Tensor] = {}

    @property
    def indices(self) -> list[int]:
        return sorted(self._kept)

    def get(self, index: int | None) -> Kept | None:
        return self._kept.get(index) if index is not None else None

    @torch.no_grad()
    def keep(
        self, index: int, version: int, exported: tuple[dict[str, Any], list[torch.Tensor]], left_out: Collection[int]
    ) -> None:
        """Copy ``exported``, of :meth:`Replicated.export`, as the state with ``version`` updates at step boundary
        ``index``. Places in ``left_out`` are published elsewhere, and not copied.
        """
        description, tensors = exported
        copies: dict[int, torch.Tensor] = {}
        for place, tensor in enumerate(tensors):
            if place in left_out:
                continue
            spare = self._spare.pop(place, None)
            fits = spare is not None and spare.shape == tensor.shape and spare.dtype == tensor.dtype
            copies[place] = spare if spare is not None and fits else torch.empty_like(tensor)
        if copies:
            torch._foreach_copy_(list(copies.values()), [tensors[place] for place in copies])
        state = [copies.get(place, tensor) for place, tensor in enumerate(tensors)]
        self._kept[index] = Kept(version, description | {"version": version, "images": []}, state, copies)

    def drop_before(self, index: int, *, reuse: bool) -> None:
        """Drop what was kept before step boundary ``index``. With ``reuse`` nobody reads it, and its memory is
        used again.
        """
        for old in [each for each in self._kept if each < index]:
            dropped = self._kept.pop(old)
            self._spare = dict(dropped.copies) if reuse else {}

    def clear(self) -> None:
        self._kept.clear()
        self._spare.clear()

"""What a script changes outside updates, and what is kept for replacements because it does."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch

from shared_core.errors import RecoveryFailed
from shared_core.worker.state.change_detection import ChangeWatch
from shared_core.worker.state.replicated import Replicated
from shared_core.worker.state.unoptimized import UnoptimizedParameters


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
    """States of the newest step boundaries, for replacements of scripts that change state outside updates: what such a
    script does in the batch would be in newer state already, or would be done to other values.

    The memory of those that were dropped is used again: to write to memory that the process has not touched before
    costs many times more.
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


class ExternalMutation:
    """Looks for changes that the script makes outside updates. From the first one on the state at step boundaries
    is kept.

    The first step boundary after :meth:`attach` is kept in any case where a copy costs little: most scripts that change
    something do so from the first batch on. It is dropped when that batch has ended without a change.

    Args:
        policy: ``always``, ``never`` or ``auto``; see the option ``preimages``.

    Attributes:
        active: something is changed, or will be: a replacement is given the state of its own step boundary, never a
            newer one.
    """

    def __init__(self, policy: str) -> None:
        self._policy = policy
        self.active = False
        self.boundaries = KeptBoundaries()
        self.boundary = 0
        self._replicated: Replicated | None = None
        self._unoptimized: UnoptimizedParameters | None = None
        self._watch: ChangeWatch | None = None
        self._changed = "a parameter"
        self._first = False
        self._first_version = -1

    def attach(self, replicated: Replicated, unoptimized: UnoptimizedParameters | None) -> None:
        """Watch ``replicated`` from the next step boundary on. Without ``unoptimized`` nothing is looked for."""
        watches = unoptimized is not None and self._policy != "never"
        self._replicated, self._unoptimized = replicated, unoptimized if watches else None
        self._watch = ChangeWatch(replicated) if watches else None
        self._first = watches and bool(replicated.optimizers)
        self.active = self._unoptimized is not None and (self._policy == "always" or self._unoptimized.own)

    def expect(self) -> bool:
        """The script will change something. Returns whether that is looked for at all."""
        self.active = self.active or self._watch is not None
        return self.active

    def see(self, *, pieces: bool = False) -> None:
        """See whether there is something else than what was there at the start or was made by an update. ``pieces``:
        look at a piece of the values, too: once in a step is enough.
        """
        if self._watch is not None and not self.active and (name := self._watch.changed(pieces=pieces)) is not None:
            self.active, self._changed = True, name

    def updated(self) -> None:
        if self._watch is not None and not self.active:
            self._watch.note()

    def part_updated(self) -> None:
        if self._watch is not None and not self.active:
            self._watch.note_part()

    @property
    def local(self) -> list[int]:
        """Places of parameters that each rank has for itself, and publishes."""
        return self._unoptimized.places if self.active and self._unoptimized is not None else []

    # -- step boundaries ------------------------------------------------------------------------------------

    def next_batch(self, version: int) -> None:
        self.see()
        if not self.active and self.boundaries.indices and version > self._first_version:
            self.boundaries.clear()

    def at_boundary(self, index: int, version: int) -> None:
        if self.active or (self._first and self._unoptimized is not None and self._unoptimized.small):
            self._keep(index, version)
        if self._first and self._watch is not None:
            self._first, self._first_version = False, version
            self._watch.note()
        self.boundary = index

    def resume(self, index: int, version: int, active: bool, *, exact: bool, watched: int) -> None:
        """Replacement, at its step boundary.

        Args:
            exact: the state is that of the step boundary.
            watched: updates that the failed worker has watched.
        """
        self.active, self.boundary = active, index
        if self._watch is not None:
            self._watch.resume(watched)
            if exact:
                self.at_boundary(index, version)
            self._first = False
            self._watch.note()

    def _keep(self, index: int, version: int) -> None:
        assert self._replicated is not None
        self.boundaries.keep(index, version, self._replicated.export(), self.local)

    # -- for a replacement --------------------------------------------------------------------------------

    def given(self, index: int | None) -> tuple[dict[str, Any], list[torch.Tensor]] | None:
        """Description and tensors of the state at a step boundary, not to be written; None if it is not kept."""
        kept = self.boundaries.get(index)
        return None if kept is None else (kept.description, list(kept.tensors))

    def decided(self, index: int | None) -> bool:
        """Whether the state at a step boundary is kept, or will never be."""
        return index is not None and (
            self.boundaries.get(index) is not None or (self.active and self.boundary >= index)
        )

    def waits(self, index: int | None) -> bool:
        """Whether the state at a step boundary will be kept when it is reached."""
        return index is not None and self.active and self.boundary < index

    def refuse(self) -> None:
        """The state as it is now is to serve an earlier step boundary. Raises RecoveryFailed if it is not what updates
        have made of the state there.
        """
        if self.active or (self._watch is not None and self._watch.counted):
            raise RecoveryFailed(
                f"the script has just changed {self._changed} outside an optimizer's update for the first time, so the "
                "state at the failed worker's step boundary is gone. From the next step boundary on it is kept; with "
                "state.preimages='always' it is kept from the start"
            )

"""What a script changes outside updates: how it is seen, and what is kept for replacements because of it.

A tensor counts the changes made to it, except those made through ``.data``. So values are looked at too: all of them
after the first updates, where scripts that do so begin, and later a small piece after each.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import chain, compress
from operator import attrgetter
from typing import Any

import torch

from shared_core.encoding.raw_memory import memory_of
from shared_core.errors import RecoveryFailed
from shared_core.worker.state.checksums import checksum
from shared_core.worker.state.publications import SharedMemoryPublisher
from shared_core.worker.state.replicated import Replicated

#: So many times all values are looked at.
_WHOLE = 2
#: Elements of the piece that is looked at later.
_PIECE = 1024
_version = attrgetter("_version")


class ChangeWatch:
    """Whether parameters and optimizer state are as they were noted last."""

    def __init__(self, replicated: Replicated) -> None:
        self._replicated = replicated
        self._versions: list[int] | None = None
        self._sums: list[tuple[int, int, int]] = []
        self._noted = self._place = self._start = 0
        self._kinds: list[type] = []
        self._tensors: list[bool] = []

    def resume(self, updates: int) -> None:
        """The failed worker has watched so many updates, and compared values whole."""
        self._noted = min(updates, _WHOLE)

    def note(self, *, values: bool = True) -> None:
        """What there is now is as it should be. ``values`` False notes version counters only."""
        self._versions = self._count()
        if not values:
            return
        if self._noted < _WHOLE:
            self._sums = [(i, 0, checksum(p)) for i, p in enumerate(self._replicated.parameters)]
        else:
            self._sums = self._next_piece()
        self._noted += 1

    def note_part(self) -> None:
        """As :meth:`note`, in the middle of an update. Values are not looked at before it is complete."""
        self._versions, self._sums = self._count(), []

    def _next_piece(self) -> list[tuple[int, int, int]]:
        parameters = self._replicated.parameters
        if not parameters:
            return []
        self._start += _PIECE
        if self._start >= parameters[self._place].numel():
            self._place, self._start = (self._place + 1) % len(parameters), 0
        return [(self._place, self._start, self._piece(self._place, self._start))]

    def _piece(self, place: int, start: int) -> int:
        parameter = self._replicated.parameters[place]
        if not parameter.is_contiguous():
            return 0
        if not parameter.is_cpu:
            return checksum(parameter.detach().view(-1)[start : start + _PIECE])
        size = parameter.element_size()
        return zlib.crc32(memory_of(parameter)[start * size : min(start + _PIECE, parameter.numel()) * size])

    def _count(self) -> list[int]:
        states = chain.from_iterable(optimizer.state.values() for optimizer in self._replicated.optimizers)
        values = [*chain.from_iterable(state.values() for state in states)]
        kinds = [*map(type, values)]
        if kinds != self._kinds:
            self._kinds, self._tensors = kinds, [issubclass(kind, torch.Tensor) for kind in kinds]
        return [*map(_version, self._replicated.parameters), *map(_version, compress(values, self._tensors))]

    @property
    def counted(self) -> bool:
        """Whether a tensor has counted a change; also for other threads, while no update runs."""
        return self._versions is not None and self._versions != self._count()

    def changed(self, *, pieces: bool = True) -> str | None:
        """Name of a parameter that is not as it was noted, or "the state of an optimizer"; None if nothing is known to
        have changed. ``pieces``: look at a piece of the values, once no longer all of them are looked at.
        """
        if self._versions is None:
            return None
        replicated, counts = self._replicated, self._count()
        if counts != self._versions:
            pairs = zip(replicated.names, counts, self._versions, strict=False)
            return next((name for name, new, old in pairs if new != old), "the state of an optimizer")
        whole = self._noted <= _WHOLE
        for place, start, known in self._sums if whole or pieces else ():
            now = checksum(replicated.parameters[place]) if whole else self._piece(place, start)
            if now != known:
                return replicated.names[place]
        return None


#: Parameters up to this size are copied in case the script turns out to change them, in bytes.
SMALL = 16 << 20


class UnoptimizedParameters:
    """The parameters of ``replicated`` that none of its optimizers has in a group. ``shared`` are identities (``id``)
    of parameters that ``DistributedDataParallel`` has made alike on all ranks.
    """

    def __init__(self, replicated: Replicated, shared: Collection[int]) -> None:
        self._replicated = replicated
        self._shared = shared
        self._known: dict[int, tuple[int, int]] = {}
        self._files: dict[int, int] = {}

    @property
    def places(self) -> list[int]:
        """Their places in the shared order; empty where nothing is optimized."""
        if not self._replicated.optimizers:
            return []
        stepped = self._replicated.stepped()
        return [i for i, p in enumerate(self._replicated.parameters) if id(p) not in stepped]

    @property
    def own(self) -> bool:
        """Whether some were not made alike, as those of an average or a target network beside the model."""
        return any(id(self._replicated.parameters[place]) not in self._shared for place in self.places)

    @property
    def small(self) -> bool:
        """Whether all parameters together have at most :data:`SMALL` bytes."""
        return sum(p.nbytes for p in self._replicated.parameters) <= SMALL

    def capture(self) -> dict[int, torch.Tensor]:
        """Values by place; the tensors are live."""
        return {place: self._replicated.parameters[place].detach() for place in self.places}

    def restore(self, values: Mapping[int, torch.Tensor]) -> None:
        """Copy values back; between two entry calls, when nothing is optimized, nothing."""
        for place, value in values.items() if self._replicated.optimizers else ():
            self._replicated.parameters[place].data.copy_(value)
        self._known.clear()

    def publish(self, publisher: SharedMemoryPublisher, boundary: int, values: Mapping[int, Any]) -> dict[int, int]:
        """Write those that have changed since the last time. ``values`` come from :meth:`capture`. Returns for each
        place the step boundary with whose file it was written.
        """
        changed = {}
        for place, value in values.items():
            known = self._known.get(place)
            # A change through .data is not counted, so equal counts say nothing.
            if known is None or known[0] != value._version or known[1] != checksum(value):
                changed[place] = value
        if changed:
            publisher.write_unoptimized(boundary, changed)
        for place, value in changed.items():
            known = self._known.get(place)
            counted = known is not None and known[0] != value._version
            # What counts its changes is not looked at again before it counts none.
            self._known[place] = (value._version, -1 if counted else checksum(value))
            self._files[place] = boundary
        return {place: self._files[place] for place in values}


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
        """Drop what is older than a step boundary; with ``reuse`` its memory is used again."""
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

    def next_batch(self, version: int) -> None:
        self.see()
        if not self.active and self.boundaries.indices and version > self._first_version:
            self.boundaries.clear()

    def at_boundary(self, index: int, version: int) -> None:
        if self.active or (self._first and self._unoptimized is not None and self._unoptimized.small):
            assert self._replicated is not None
            self.boundaries.keep(index, version, self._replicated.export(), self.local)
        if self._first and self._watch is not None:
            self._first, self._first_version = False, version
            self._watch.note()
        self.boundary = index

    def resume(self, index: int, version: int, active: bool, *, exact: bool, watched: int) -> None:
        """Replacement, at its step boundary. ``exact``: the state is that of the boundary; ``watched``: updates that
        the failed worker has watched.
        """
        self.active, self.boundary = active, index
        if self._watch is not None:
            self._watch.resume(watched)
            if exact:
                self.at_boundary(index, version)
            self._first = False
            self._watch.note()

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
        """Raises RecoveryFailed if the state is not what updates have made of an earlier boundary's."""
        if self.active or (self._watch is not None and self._watch.counted):
            raise RecoveryFailed(
                f"the script has just changed {self._changed} outside an optimizer's update for the first time, so the "
                "state at the failed worker's step boundary is gone. From the next step boundary on it is kept; with "
                "state.preimages='always' it is kept from the start"
            )

"""Parameters before an update, of which each rank of a machine keeps a part, in memory that all of them can read.

Replicas have the same parameters, so one copy a machine is enough. A rank copies its part before it contributes to the
gradients that the update is made of, so the copy is complete where an update begins. That is looked up there, not
assumed. The parts are files in the job's folder, which outlive their writers: a failure takes none of them away.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

from shared_core.errors import OutOfResources, RecoveryFailed
from shared_core.resources import map_file
from shared_core.worker.spans import Span, divided

#: Parts that a rank has room for: of the version that it is at, and of the one before, while a rank is still there.
_SLOTS = 2
#: Parameters are cut at multiples of so many bytes.
_UNIT = 4 << 10
_ODD, _MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1


@dataclass(frozen=True)
class Layout:
    """How the parameters at ``places`` are divided: ``parts`` by rank. ``key`` differs between layouts."""

    key: int
    places: tuple[int, ...]
    like: tuple[tuple[torch.Size, torch.dtype], ...]
    parts: tuple[tuple[Span, ...], ...]

    def stamp(self, version: int) -> int:
        return (self.key ^ ((version + 1) * _ODD)) & _MASK or 1


class _Heads:
    """Version and stamp of each slot; 0 while the part is written. Written and read without a lock."""

    def __init__(self, path: Path, slots: int) -> None:
        self._words = memoryview(map_file(path, 16 * slots)).cast("Q")

    def stamp(self, slot: int) -> int:
        return self._words[2 * slot]

    def version(self, slot: int) -> int:
        return self._words[2 * slot + 1]

    def empty(self, slot: int) -> None:
        self._words[2 * slot] = 0

    def fill(self, slot: int, version: int, stamp: int) -> None:
        self._words[2 * slot + 1] = version
        self._words[2 * slot] = stamp  # last: from here on others read the part

    def find(self, slots: Iterable[int], stamp: int) -> int | None:
        return next((slot for slot in slots if self._words[2 * slot] == stamp), None)


class SharedImages:
    """The parts of one rank, and those of the others. The program's thread calls, but for :meth:`read`.

    Args:
        job_dir: of the machine that has all ranks.
        attempt: number of the job's attempt: versions are counted again in each.
    """

    def __init__(self, job_dir: Path, attempt: int, rank: int, world_size: int) -> None:
        self._job_dir, self._attempt, self._rank, self._world_size = job_dir, attempt, rank, world_size
        self._heads: _Heads | None = None
        self._layout: Layout | None = None
        self._rooms: dict[int, torch.Tensor] = {}
        self._attached = 0

    def attach(self, parameters: Mapping[int, torch.Tensor]) -> None:
        """These, by place, are the same on all ranks. Only plain tensors in host memory are shared."""
        self._attached += 1
        self._rooms.clear()
        self._layout = None
        if self._world_size < 2 or not parameters or not all(map(_plain, parameters.values())):
            return
        like = tuple((each.shape, each.dtype) for each in parameters.values())
        parts = divided([each.nbytes for each in parameters.values()], self._world_size, _UNIT)
        # What is attached later may have the same shapes, and other values at the same version.
        said = repr((self._attached, tuple(parameters), like)).encode()
        key = int.from_bytes(blake2b(said, digest_size=8).digest(), "little")
        self._layout = Layout(key, tuple(parameters), like, tuple(map(tuple, parts)))

    def put(self, version: int, oldest: int, parameters: Sequence[torch.Tensor]) -> None:
        """Copy this rank's part of the parameters, which have had ``version`` updates, unless it is there. Nobody asks
        for what is older than ``oldest``: its room is used again. Without room nothing is copied, and all ranks see
        that.
        """
        layout = self._layout
        if layout is None or not (spans := layout.parts[self._rank]):
            return
        heads, stamp, mine = self._all_heads(), layout.stamp(version), _slots(self._rank)
        if heads.find(mine, stamp) is not None:
            return
        slot = next((each for each in mine if heads.stamp(each) == 0 or heads.version(each) < oldest), None)
        tensors = {span.tensor: parameters[layout.places[span.tensor]] for span in spans}
        if slot is None or any(not _plain(t) or (t.shape, t.dtype) != layout.like[i] for i, t in tensors.items()):
            return
        try:
            room = self._room(slot, sum(span.size for span in spans))
        except OutOfResources:
            self._layout = None
            return
        heads.empty(slot)
        at = room.data_ptr()
        for span in spans:  # of contiguous tensors; a call of torch's takes twice as long where caches are cold
            ctypes.memmove(at, tensors[span.tensor].data_ptr() + span.start, span.size)
            at += span.size
        heads.fill(slot, version, stamp)

    def _room(self, slot: int, size: int) -> torch.Tensor:
        if slot not in self._rooms:
            self._rooms[slot] = torch.frombuffer(map_file(self._path(slot), size), dtype=torch.uint8)
        return self._rooms[slot]

    def _path(self, slot: int) -> Path:
        rank, number = divmod(slot, _SLOTS)
        return self._job_dir / f"rank{rank}" / f"attempt{self._attempt}" / f"image{number}"

    def _all_heads(self) -> _Heads:
        if self._heads is None:
            path = self._job_dir / f"images{self._attempt}.{self._world_size}"
            self._heads = _Heads(path, _SLOTS * self._world_size)
        return self._heads

    def complete(self, version: int, places: Collection[int]) -> SharedImage | None:
        """The parameters at ``places`` with ``version`` updates in them, if all parts are there."""
        layout = self._layout
        if layout is None or not set(layout.places).issuperset(places):
            return None
        if any(self._slot(layout, rank, version) is None for rank, spans in enumerate(layout.parts) if spans):
            return None
        return SharedImage(self, layout, version, tuple(places))

    def _slot(self, layout: Layout, rank: int, version: int) -> int | None:
        return self._all_heads().find(_slots(rank), layout.stamp(version))

    def read(self, layout: Layout, version: int, places: Iterable[int]) -> dict[int, torch.Tensor]:
        """Copies of the parameters at ``places``, contiguous. Raises RecoveryFailed if a part is no longer there."""
        tensors = [torch.empty(shape, dtype=dtype) for shape, dtype in layout.like]
        flat: list[Any] = [_bytes(tensor).numpy() for tensor in tensors]
        for rank, spans in enumerate(layout.parts):
            slot = self._slot(layout, rank, version) if spans else None
            if slot is None and spans:
                raise RecoveryFailed(f"rank {rank}'s part of the parameters before update {version + 1} is gone")
            if slot is None:
                continue
            try:
                with self._path(slot).open("rb") as file:
                    whole = all(file.readinto(flat[s.tensor][s.start : s.stop]) == s.size for s in spans)
            except OSError as error:
                raise RecoveryFailed(f"rank {rank}'s part of the parameters cannot be read: {error}") from error
            if not whole or self._slot(layout, rank, version) != slot:
                raise RecoveryFailed(f"rank {rank}'s part of the parameters was overwritten while it was read")
        return {place: tensors[layout.places.index(place)] for place in places}


@dataclass(frozen=True)
class SharedImage:
    """Parameters before one update, all of whose parts are there."""

    shared: SharedImages
    layout: Layout
    version: int
    places: tuple[int, ...]

    def read(self) -> dict[int, torch.Tensor]:
        return self.shared.read(self.layout, self.version, self.places)


def _slots(rank: int) -> range:
    return range(_SLOTS * rank, _SLOTS * (rank + 1))


def _plain(tensor: torch.Tensor) -> bool:
    data = tensor.detach()
    return type(data) is torch.Tensor and data.is_cpu and data.layout is torch.strided and data.is_contiguous()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(-1).view(torch.uint8)

"""A snapshot of this machine on its way to storage: its parts, room for them, and their durability."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared_core.checkpoint import store
from shared_core.checkpoint.spool import Sealed, Spool, Target
from shared_core.checkpoint.storage import CHUNK, TEMPORARY, Storage
from shared_core.errors import CorruptFile, StorageFull
from shared_core.plain_json import parse

#: What in the metadata tells whose a checkpoint is; only one's own are removed.
_OWNER = ("run",)


class QuotaFull(StorageFull):
    """The user's own limit is reached."""


@dataclass
class Outgoing:
    """A complete snapshot of this machine, on its way to storage.

    Attributes:
        begun: ``time.monotonic()`` at the first byte.
        durable: ``time.monotonic()`` when this machine's parts were; 0 before.
        marks: of other ranks, at the last look.
    """

    spool: Spool
    step: int
    parts: dict[int, Sealed]
    storage: Storage
    target: Target
    begun: float = 0.0
    durable: float = 0.0
    marks: int = 0

    @property
    def key(self) -> tuple[int, int]:
        return self.spool.attempt, self.step

    @property
    def one(self) -> Sealed:
        """Any of the parts: what it says of the job is the same in all."""
        return next(iter(self.parts.values()))

    @property
    def meta(self) -> Mapping[str, Any]:
        return self.one.meta

    @property
    def alone(self) -> bool:
        """Whether all ranks of the job are on this machine."""
        return len(self.one.local) == self.one.world_size

    @property
    def nbytes(self) -> int:
        return sum(self.spool.path_of(part, name).stat().st_size for part in self.parts.values() for name in part.files)

    def ours(self, found: store.Checkpoint) -> bool:
        return all(found.meta.get(key) == self.meta.get(key) for key in _OWNER)

    def same_start(self, note: Mapping[str, Any]) -> bool:
        """Whether another machine's note is of the same attempt of the same job."""
        return all(note.get(key) == self.meta.get(key) for key in (*_OWNER, "session", "attempt"))

    @property
    def committed(self) -> bool:
        with contextlib.suppress(CorruptFile, OSError):
            return store.load_manifest(self.storage, self.step).meta == self.meta
        return False

    def make_room(self, warn: Callable[[str], None]) -> None:
        """Remove old checkpoints until quota and device have room; raises StorageFull if they have not. ``warn`` is
        called if the quota leaves only one checkpoint meanwhile.
        """
        storage, need = self.storage, self.nbytes
        store.prune(storage, max(2, self.target.keep), self.ours, spare=[self.step])
        quota = self.target.quota_bytes
        if quota:
            mine = [each for each in store.committed(storage) if self.ours(each) and each.step != self.step]
            sizes = {each.step: store.parts_size(storage, each.step) for each in mine}
            while len(sizes) > 1 and sum(sizes.values()) + need > quota:
                oldest = min(sizes)
                warn(
                    f"checkpoint.quota_bytes={quota} has no room for two checkpoints and the one that is being written:"
                    " the oldest is removed first, so one is left meanwhile. Raise the quota to keep two"
                )
                store.remove(storage, oldest)
                del sizes[oldest]
            if sum(sizes.values()) + need > quota:
                raise QuotaFull(
                    f"the checkpoint of step {self.step} needs {need} bytes, and with the {sum(sizes.values())} of "
                    f"earlier ones they exceed the quota of {quota} bytes (checkpoint.quota_bytes). Earlier"
                    " checkpoints are as they were: raise the quota"
                )
        free = storage.free()
        if free is not None and free < need:
            raise StorageFull(
                f"no room to write {need} bytes to {storage.root}: {free} bytes are free; earlier checkpoints are as "
                "they were: make room, or set checkpoint.dir to a larger device"
            )

    def persist(self) -> None:
        """Make this machine's parts durable. Raises OSError or SwiftError if that cannot be."""
        storage, folder = self.storage, store.folder_name(self.step)
        if storage.is_link(folder):  # the user keeps an old checkpoint of this step elsewhere
            storage.remove_folder(folder)
        names = set(storage.names(folder))
        if store.MANIFEST in names:  # of another attempt, or damaged: from now on it is wrong
            storage.remove(f"{folder}/{store.MANIFEST}")
        store.sign(storage, self.step)
        if not self.alone and 0 in self.one.local:
            write_note(storage, self.step, store.BEGUN, self.meta)
        for rank, part in self.parts.items():
            self._persist_rank(rank, part, names)

    def _persist_rank(self, rank: int, part: Sealed, names: set[str]) -> None:
        storage, folder = self.storage, store.folder_name(self.step)
        mark = store.read_mark(storage, self.step, rank)
        if mark is not None and mark.meta == part.meta and mark.parts.keys() == set(part.files) <= names:
            return  # an earlier writer got as far; what it has written is never touched again
        for name in (f"rank{rank}{end}" for end in (store.DONE, store.MISSED, store.LAST)):
            if name in names:
                storage.remove(f"{folder}/{name}")
        for name in names:
            if store.left_over(name, part.files) or (self.alone and name.startswith(TEMPORARY)):
                storage.remove(f"{folder}/{name}")
        written = {}
        for name in part.files:
            path = self.spool.path_of(part, name)
            size = path.stat().st_size
            written[name] = (store.copy_part(storage, self.step, name, _pieces(path), size), size)
        store.write_mark(storage, self.step, rank, store.StoreMark(written, part.meta))


def _pieces(path: Path) -> Iterator[memoryview]:
    """A file in pieces; each is valid until the next one is asked for."""
    buffer = bytearray(CHUNK)
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            yield memoryview(buffer)[:count]


def write_note(storage: Storage, step: int, name: str, meta: Mapping[str, Any]) -> None:
    """Leave a note for the writers of other machines in a checkpoint's folder."""
    payload = json.dumps(dict(meta)).encode()
    storage.write(f"{store.folder_name(step)}/{name}", [payload], len(payload))


def read_note(storage: Storage, step: int, name: str) -> dict[str, Any] | None:
    """Another writer's note; None if there is none that can be read."""
    with contextlib.suppress(OSError, ValueError, CorruptFile):
        found = parse(store.read_file(storage, f"{store.folder_name(step)}/{name}"))
        return found if isinstance(found, dict) else None
    return None

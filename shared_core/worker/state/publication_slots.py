"""Publications that replace each other lie in files that stay mapped: to publish is to write to memory.

A file has the name of its publication, and its header, which is written last, is zero while there is none. So a writer
that dies at any moment leaves a file that is whole or one that counts as absent, and what was published before it is
not touched.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from shared_core.encoding.plain import Piece
from shared_core.resources import map_room
from shared_core.worker.state.publication_file import HEADER_BYTES, is_blank

_NOTHING = bytes(HEADER_BYTES)
_PAGE = 4096
#: A file is not used for what is this much smaller than it.
_MOST, _SMALL = 4, 1 << 16


@dataclass
class _Slot:
    path: str
    memory: mmap.mmap

    def clear(self) -> None:
        self.memory[:HEADER_BYTES] = _NOTHING

    def fill(self, data: Sequence[Piece]) -> None:
        """Write to a slot that is clear; the header last."""
        memory, first, at = self.memory, data[0], len(data[0])
        memory[HEADER_BYTES:at] = first[HEADER_BYTES:]
        for piece in data[1:]:
            end = at + len(piece)
            memory[at:end] = piece
            at = end
        memory[:HEADER_BYTES] = first[:HEADER_BYTES]


class Slots:
    """The mapped files of one writer, whose names begin with one of ``names``. Not thread-safe."""

    def __init__(self, folder: Path, names: tuple[str, ...]) -> None:
        self._folder, self._names = str(folder), names
        self._used: dict[str, _Slot] = {}
        self._free: list[_Slot] = []
        self._looked = False
        self._others: set[str] = set()

    def write(self, name: str, size: int, data: Sequence[Piece]) -> None:
        """Publish ``data``, which begins with a header and has ``size`` bytes, under a name. Raises OSError if there is
        no room; what had the name before still has it then.
        """
        if not self._looked:
            self._looked = True
            self._look()
        slot, path = self._clear_slot(size), f"{self._folder}/{name}"
        taken = name in self._used or name in self._others  # a replacement publishes the failed worker's again
        _rename(slot, f"{path}.tmp" if taken else path)
        slot.fill(data)
        if taken:
            _rename(slot, path)
            self._others.discard(name)
        if name in self._used:
            self._used[name].memory.close()
        self._used[name] = slot

    def retire(self, name: str) -> bool:
        """End the publication of this name, and use its memory again. False if it was not written here."""
        slot = self._used.pop(name, None)
        if slot is None:
            return False
        slot.clear()
        self._free.append(slot)
        if len(self._free) > max(1, len(self._used)):
            self._drop(self._free.pop(0))
        return True

    def _clear_slot(self, size: int) -> _Slot:
        fitting = [slot for slot in self._free if size <= len(slot.memory) <= _MOST * size + _SMALL]
        if fitting:
            best = min(fitting, key=lambda slot: len(slot.memory))
            self._free.remove(best)
            return best
        path, room = f"{self._folder}/new.tmp", -(-(size + size // 8) // _PAGE) * _PAGE
        try:
            made = _Slot(path, map_room(path, room))
        except OSError:
            with suppress(OSError):
                os.unlink(path)
            raise
        made.clear()  # a failed worker may have died while it wrote there
        return made

    def _drop(self, slot: _Slot) -> None:
        slot.memory.close()
        with suppress(OSError):
            os.unlink(slot.path)

    def _look(self) -> None:
        """Note what a failed worker has left, and remove what is no publication of it."""
        for each in os.scandir(self._folder):
            if not each.name.startswith(self._names):
                continue
            if each.is_file(follow_symlinks=False) and is_blank(Path(each.path)):
                os.unlink(each.path)
            else:
                self._others.add(each.name)


def _rename(slot: _Slot, path: str) -> None:
    os.rename(slot.path, path)
    slot.path = path

"""Checksums of the inputs of a rank's last operations, in shared memory: what its replacement computes again must have
the same. Likewise the senders of its last receives from any source: its replacement receives from the same, in the
same order.
"""

from __future__ import annotations

import struct
from pathlib import Path

from shared_core.resources import map_file
from shared_core.worker.state.overflow import Overflow

_ENTRY = struct.Struct("<IIQ")  # group, checksum, sequence number + 1
_ENTRIES = 8192


class InputChecksums:
    """A ring of the newest 8192. Callers of :meth:`add` hold the runtime's lock."""

    def __init__(self, folder: Path, disk: Overflow, name: str = "checks") -> None:
        room = _ENTRIES * _ENTRY.size
        self._ring = disk.write(folder / name, room, lambda path: map_file(path, room))
        self._count = 0

    def add(self, group: int, seq: int, checksum: int) -> None:
        """``group`` is its id; for receives a number of group and tag, with the sender in place of a checksum."""
        _ENTRY.pack_into(self._ring, (self._count % _ENTRIES) * _ENTRY.size, group, checksum, seq + 1)
        self._count += 1

    def read(self) -> dict[tuple[int, int], int]:
        """By (group, sequence number)."""
        entries = (_ENTRY.unpack_from(self._ring, place * _ENTRY.size) for place in range(_ENTRIES))
        return {(group, seq - 1): checksum for group, checksum, seq in entries if seq}

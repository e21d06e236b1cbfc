"""Which step boundaries the ranks have published, in memory that all of them share: one number for each rank."""

from __future__ import annotations

import struct
from pathlib import Path

from shared_core.resources import map_file

_MARK = struct.Struct("<Q")


class BoundaryMarks:
    """The newest published step boundary of every rank of a machine that has all ranks, in the file ``path``. Written
    and read without a lock. Raises OutOfResources if there is no room for it.

    A mark outlives its worker, as the publication does. A replacement that starts before the failed worker's newest
    boundary sets the mark back, before it takes part in any operation.
    """

    def __init__(self, path: Path, rank: int, world_size: int) -> None:
        self._map = map_file(path, world_size * _MARK.size)
        self._all = struct.Struct(f"<{world_size}Q")
        self._at = rank * _MARK.size

    def put(self, boundary: int) -> None:
        _MARK.pack_into(self._map, self._at, boundary)

    def lowest(self) -> int:
        """The newest step boundary that every rank has published; 0 if one has published none."""
        return int(min(self._all.unpack_from(self._map)))

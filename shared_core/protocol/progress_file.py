"""The progress file of a rank: the worker writes it, the agent reads it for the progress time-out."""

from __future__ import annotations

import os
import struct
import time
from pathlib import Path

from shared_core.resources import map_file

#: Layout of a progress file: batch tops passed, 1 inside a wait for a collective, ``time.time()`` of the last change.
PROGRESS = struct.Struct("<QQd")
PROGRESS_BYTES = 64


def path_of(job_dir: Path, rank: int) -> Path:
    """Where a rank's progress file is."""
    return job_dir / f"rank{rank}" / "progress"


class ProgressFile:
    """Writer of ``rank{r}/progress``, which the agent reads for the progress time-out. A write costs a microsecond."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        target = Path(path)
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._map = map_file(target, PROGRESS_BYTES)
        self._tops = 0

    def top(self, tops: int) -> None:
        """Batch top number ``tops`` is passed; outside any collective."""
        self._tops = tops
        self._write(0)

    def waiting(self, inside: bool) -> None:
        """Entering (True) or leaving (False) a wait for a collective."""
        self._write(int(inside))

    def _write(self, flag: int) -> None:
        PROGRESS.pack_into(self._map, 0, self._tops, flag, time.time())

    def close(self) -> None:
        """Release the mapping; the file stays."""
        self._map.close()


def read_progress(path: str | os.PathLike[str]) -> tuple[int, bool, float] | None:
    """``(tops, inside a collective, time of the last change)``; None if nothing was written yet."""
    try:
        with open(path, "rb") as file:
            raw = file.read(PROGRESS.size)
    except OSError:
        return None
    if len(raw) < PROGRESS.size:
        return None
    tops, flag, changed = PROGRESS.unpack(raw)
    return (tops, bool(flag), changed) if changed else None

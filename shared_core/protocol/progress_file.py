"""The progress file of a rank: the worker writes it, the agent reads it for the progress time-out."""

from __future__ import annotations

import math
import os
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shared_core.protocol.stragglers import PARTS, STEPS, Steps
from shared_core.resources import map_file

#: Layout of a progress file: step boundaries passed, 1 inside a wait for a collective, time of the last change in
#: seconds since the epoch.
PROGRESS = struct.Struct("<QQd")
#: What follows: an earlier step boundary and its time, the time of the newest one, bytes of message logs.
PACE = struct.Struct("<QddQ")
#: What follows: the step boundary at which the program will end, 0 where it is not known; then 1 and the newest
#: training loss, 0 before there is one. A replacement leaves what it does not know yet as it is.
END = struct.Struct("<Q")
LOSS = struct.Struct("<Qd")
#: What follows: for each of the last steps the step boundary that ends it, and the seconds in each part of it. The
#: place of a step is its number modulo theirs.
STEP = struct.Struct(f"<Q{len(PARTS)}f")
_END = PROGRESS.size + PACE.size
_LOSS = _END + END.size
_STEPS = _LOSS + LOSS.size
PROGRESS_BYTES = _STEPS + STEPS * STEP.size
#: The pace of a worker is that of its last batches, over one to two times so many seconds.
PACE_S = 10.0


@dataclass(frozen=True)
class Pace:
    """What an observer of the job sees of a worker. Times are in seconds since the epoch.

    Attributes:
        since_boundaries: step boundaries passed at ``since``.
        since: time of the step boundary from which its pace is measured.
        newest: time of the newest step boundary.
        expected: the step boundary at which the program will end, as far as its loops say; 0 where it is not known.
        loss: the newest training loss that it has told; None before there is one.
    """

    boundaries: int
    inside: bool
    changed: float
    since_boundaries: int
    since: float
    newest: float
    log_bytes: int
    expected: int = 0
    loss: float | None = None

    def steps_per_s(self, now: float) -> float | None:
        """Batches a second; None before two step boundaries. Falls while a batch takes longer than the mean."""
        steps, took = self.boundaries - self.since_boundaries, self.newest - self.since
        if steps <= 0 or took <= 0:
            return None
        return steps / (took + max(0.0, now - self.newest - took / steps))


def path_of(job_dir: Path, rank: int) -> Path:
    return job_dir / f"rank{rank}" / "progress"


class ProgressFile:
    """Writer of ``rank{r}/progress``, a mapped file. A write costs a microsecond."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        target = Path(path)
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._map = map_file(target, PROGRESS_BYTES)
        self._boundaries = 0
        self._since: tuple[int, float] | None = None
        self._next: tuple[int, float] = (0, 0.0)

    def boundary(self, boundaries: int, log_bytes: int = 0) -> None:
        """This step boundary is passed; the worker is outside any collective."""
        now = time.time()
        self._boundaries = boundaries
        if self._since is None or boundaries < self._since[0]:
            self._since = self._next = (boundaries, now)
        elif now - self._next[1] > PACE_S:
            self._since, self._next = self._next, (boundaries, now)
        PACE.pack_into(self._map, PROGRESS.size, *self._since, now, log_bytes)
        self._write(0)

    def expect(self, left: int) -> None:
        """So many step boundaries are still to come, if nothing changes."""
        END.pack_into(self._map, _END, self._boundaries + left)

    def loss(self, loss: float) -> None:
        """The training loss of the newest batch."""
        LOSS.pack_into(self._map, _LOSS, 1, loss)

    def step(self, number: int, parts: Sequence[float]) -> None:
        """A step is over, at this step boundary; ``parts``: seconds in each of :data:`PARTS`."""
        STEP.pack_into(self._map, _STEPS + number % STEPS * STEP.size, number, *parts)

    def waiting(self, inside: bool) -> None:
        """Entering (True) or leaving (False) a wait for a collective."""
        self._write(int(inside))

    def _write(self, flag: int) -> None:
        PROGRESS.pack_into(self._map, 0, self._boundaries, flag, time.time())


def _read(path: str | os.PathLike[str], size: int) -> bytes | None:
    """The first ``size`` bytes; None where there are not so many."""
    try:
        with open(path, "rb") as file:
            raw = file.read(size)
    except OSError:
        return None
    return raw if len(raw) == size else None


def read_progress(path: str | os.PathLike[str]) -> tuple[int, bool, float] | None:
    """``(boundaries, inside a collective, time of the last change)``; None if nothing was written yet."""
    if (raw := _read(path, PROGRESS.size)) is None:
        return None
    boundaries, flag, changed = PROGRESS.unpack(raw)
    return (boundaries, bool(flag), changed) if changed else None


def read_pace(path: str | os.PathLike[str]) -> Pace | None:
    """None if nothing was written yet, or the file is damaged."""
    if (raw := _read(path, _STEPS)) is None:
        return None
    boundaries, flag, changed = PROGRESS.unpack_from(raw)
    since_boundaries, since, newest, log_bytes = PACE.unpack_from(raw, PROGRESS.size)
    if not changed or not all(map(math.isfinite, (changed, since, newest))):
        return None
    (expected,), (told, loss) = END.unpack_from(raw, _END), LOSS.unpack_from(raw, _LOSS)
    known = loss if told and math.isfinite(loss) else None
    return Pace(boundaries, bool(flag), changed, since_boundaries, since, newest, log_bytes, expected, known)


def read_steps(path: str | os.PathLike[str]) -> Steps:
    """The last steps; none where nothing was written, or the file is damaged."""
    raw = _read(path, PROGRESS_BYTES)
    rows = list(STEP.iter_unpack(raw[_STEPS:])) if raw is not None else []
    return {row[0]: row[1:] for row in rows if row[0] and all(math.isfinite(each) and each >= 0 for each in row[1:])}

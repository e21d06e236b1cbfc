"""Looks at a job on this machine again and again: reads what was appended to its events, and where its workers are."""

from __future__ import annotations

import os
import re
import statistics
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from shared_core.events import Event, by_run, read_line
from shared_core.kinds import open_regular
from shared_core.protocol.progress_file import Pace, read_pace
from shared_core.system import process
from shared_core.system.jobdir import DISK, Card, is_held
from shared_core.watch.view import JobView, Live, Ranks, view_of

#: A view is this old at most, in seconds; who asks sooner is given the same again.
FRESH_S = 0.2
#: Points of a series; where there are more, every other one goes, and later ones are as far apart.
_POINTS = 240
_MOST_BYTES = 1 << 24


class FileTail:
    """What is appended to a file of events.

    Args:
        path: of the file, which need not be there yet.
        begin: where to begin, in bytes.
    """

    def __init__(self, path: Path, begin: int = 0) -> None:
        self._path, self._at = path, begin

    def read(self) -> list[Event]:
        """The events since the last call, up to the last whole line. OSError if it is there and cannot be read."""
        found: list[Event] = []
        try:
            file = open_regular(self._path)
        except FileNotFoundError:
            return found
        with file:
            while True:
                file.seek(self._at)
                raw = file.read(_MOST_BYTES)
                whole = raw[: raw.rfind(b"\n") + 1]
                if not whole:
                    return found
                self._at += len(whole)
                lines = whole.decode(errors="replace").split("\n")[:-1]
                found += filter(None, (read_line(f"{line}\n") for line in lines))


class Follower:
    """Follows one job.

    Args:
        job_dir: its private folder; None where it does not run here, or not any more.
        events: path of its events; by default that of the card in its folder.
        run: id of the run; by default that of the card, or the newest in the file.
    """

    def __init__(self, job_dir: Path | None, events: Path | None = None, run: str | None = None) -> None:
        self._job_dir, self._path, self._run = job_dir, events, run
        self._card: Card | None = None
        self._tail = FileTail(events) if events is not None else None
        self._events: list[Event] = []
        self._lock = threading.Lock()
        self._view: JobView | None = None
        self._paces: dict[int, Pace] = {}
        self._disk_bytes = 0
        self._used: dict[int, tuple[float, float]] = {}
        self._usage: dict[int, tuple[float | None, int]] = {}
        self._series: list[tuple[float, float | None, float | None]] = []
        self._apart_s = 1.0

    def view(self) -> JobView:
        """What there is to see now. OSError if the events cannot be read."""
        with self._lock:
            now = time.time()
            if self._view is None or not 0 <= now - self._view.now < FRESH_S:
                self._read()
                self._view = view_of(self._of_the_run(), self._look(now))
            return self._view

    def _read(self) -> None:
        card = Card.read(self._job_dir) if self._job_dir is not None else None
        if card is not None and card != self._card:
            if self._path is None and (self._card is None or card.run != self._card.run):
                self._tail, self._events = FileTail(Path(card.events), card.events_from) if card.events else None, []
            self._card = card
        if self._tail is not None:
            self._events += self._tail.read()
            if self._card is not None and self._path is None:
                self._events = [event for event in self._events if event.run == self._card.run]

    def _of_the_run(self) -> list[Event]:
        runs = by_run(self._events)
        if self._run is not None:
            return runs.get(self._run, [])
        return next(reversed(runs.values())) if runs else []

    def _look(self, now: float) -> Live:
        if self._job_dir is None or self._card is None:
            return Live(now)
        folder = self._job_dir
        if folder.exists():  # it goes with the job; what was seen last stays true
            self._paces = {int(path.parent.name[4:]): pace for path, pace in _paces(folder)}
            self._disk_bytes = _bytes_in(folder / DISK)
        ranks = Ranks()
        for event in self._of_the_run():
            ranks.take(event)
        states = {one.pid: process.state_of(one.pid) for one in ranks.held.values() if one.pid is not None}
        self._measure(now, states)
        return Live(now, is_held(folder), self._card, self._paces, states, self._disk_bytes, self._usage, self._series)

    def _measure(self, now: float, pids: Iterable[int]) -> None:
        """Add to what is known of processes and paces."""
        found = {pid: used for pid in pids if (used := process.usage(pid)) is not None}
        for pid, (seconds, size) in found.items():
            before = self._used.get(pid)
            if before is None or now - before[0] >= 1.0:
                took = now - before[0] if before is not None else 0.0
                cores = max(0.0, seconds - before[1]) / took if before is not None and took > 0 else None
                self._used[pid], self._usage[pid] = (now, seconds), (cores, size)
        for gone in self._used.keys() - found.keys():
            del self._used[gone], self._usage[gone]
        if self._series and now - self._series[-1][0] < self._apart_s:
            return
        speeds = [speed for pace in self._paces.values() if (speed := pace.steps_per_s(now)) is not None]
        losses = [pace.loss for _, pace in sorted(self._paces.items()) if pace.loss is not None]
        if speeds or losses:
            self._series.append((now, statistics.median(speeds) if speeds else None, losses[0] if losses else None))
        if len(self._series) > _POINTS:
            del self._series[1::2]
            self._apart_s *= 2


def _paces(job_dir: Path) -> list[tuple[Path, Pace]]:
    paths = (path for path in job_dir.glob("rank*/progress") if re.fullmatch(r"rank\d{1,9}", path.parent.name))
    return [(path, pace) for path in paths if (pace := read_pace(path)) is not None]


def _bytes_in(folder: Path) -> int:
    taken = 0
    for where, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                taken += os.lstat(os.path.join(where, name)).st_blocks * 512
    return taken

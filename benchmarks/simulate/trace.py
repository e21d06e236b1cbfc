"""Failure traces: when which workers fail, and when their places are filled again.

A trace names workers by place, ``pipeline * stages + stage``, so that all systems see the same failures. Files that
only count (``-2`` at some second) get their victims drawn from a seed.
"""

from __future__ import annotations

import csv
import json
import math
import random
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path

from shared_core.errors import ConfigError
from shared_core.kinds import open_regular

HOUR_S = 3600.0
_MOST_WORKERS = 100_000


@dataclass(frozen=True)
class TraceEvent:
    """A change at one moment.

    Attributes:
        time_s: seconds since the start.
        lost: workers that fail.
        joined: places that are filled again; a place in both is filled by a spare at once.
    """

    time_s: float
    lost: tuple[int, ...] = ()
    joined: tuple[int, ...] = ()


@dataclass(frozen=True)
class Trace:
    """Changes of a job that starts with all its workers.

    Attributes:
        workers: number of places.
        duration_s: length in seconds.
        events: by time.
        resolution_s: how far before its recorded time an event may really have been, in seconds.
    """

    workers: int
    duration_s: float
    events: tuple[TraceEvent, ...]
    resolution_s: float = 0.0

    @property
    def failures(self) -> int:
        """How many workers fail."""
        return sum(len(event.lost) for event in self.events)

    def jittered(self, seed: int) -> Trace:
        """The trace with each event shifted within the resolution, which leaves their order."""
        generator = random.Random(seed)
        times = sorted(max(0.0, e.time_s - generator.uniform(0, self.resolution_s)) for e in self.events)
        moved = (replace(event, time_s=time) for event, time in zip(self.events, times, strict=True))
        return replace(self, events=tuple(moved), resolution_s=0.0)

    def with_spares(self, spares: int) -> Trace:
        """The trace with this many spare workers: a repaired one fills the place vacant longest, or becomes a spare."""
        vacant: deque[int] = deque()
        events = []
        for event in self.events:
            spares += len(event.joined)
            vacant.extend(event.lost)
            filled = tuple(vacant.popleft() for _ in range(min(spares, len(vacant))))
            spares -= len(filled)
            if event.lost or filled:
                events.append(TraceEvent(event.time_s, event.lost, filled))
        return replace(self, events=tuple(events))


def from_counts(
    changes: Iterable[tuple[float, int]], workers: int, duration_s: float, seed: int = 0, resolution_s: float = 0.0
) -> Trace:
    """A trace from (seconds, change of the number of workers); victims are drawn, the longest vacant place is filled.

    Raises:
        ConfigError: if more workers fail or join than there are.
    """
    generator = random.Random(seed)
    vacant: deque[int] = deque()
    live = list(range(workers))
    events = []
    for time_s, change in sorted(changes):
        if time_s < 0 or -change > len(live) or change > len(vacant):
            raise ConfigError(f"at {time_s:g} s the trace changes {len(live)} of {workers} workers by {change:+d}")
        if change < 0:
            lost = tuple(live.pop(generator.randrange(len(live))) for _ in range(-change))
            vacant.extend(lost)
            events.append(TraceEvent(time_s, lost=lost))
        elif change > 0:
            joined = tuple(vacant.popleft() for _ in range(change))
            live.extend(joined)
            events.append(TraceEvent(time_s, joined=joined))
    return Trace(workers, max(duration_s, events[-1].time_s if events else 0.0), tuple(events), resolution_s)


def read_trace(path: Path, workers: int | None = None, seed: int = 0) -> Trace:
    """A trace from a file.

    CSV: rows ``time_s,change`` (``120,-1``), and comments ``# workers: 24``, ``# duration_s: 22896`` and
    ``# resolution_s: 144``. JSON: the same as ``{"workers": 24, "duration_s": 22896, "events": [[120, -1], ...]}``.

    Args:
        path: the file; its suffix tells the form.
        workers: number of workers where the file does not say it.
        seed: for the choice of victims.

    Raises:
        ConfigError: if it is not a trace, or cannot be read.
    """
    try:
        with open_regular(path) as file:
            text = file.read().decode()
    except OSError as error:
        raise ConfigError(f"--trace {path} is neither a file that can be read nor gcp: {error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} is not a trace of (seconds, change of workers): no text; see docs/design/simulator.md"
        ) from error
    return _parse(text, path.suffix.lower() == ".json", str(path), workers, seed)


def gcp_trace(seed: int = 0) -> Trace:
    """The spot instances on GCP that ReCycle was measured on: 24 GPUs, 6.4 h, down to 15 (digitised; see the file)."""
    text = resources.files("benchmarks.simulate").joinpath("data/gcp_24.csv").read_text(encoding="utf-8")
    return _parse(text, False, "gcp_24.csv", None, seed)


def _parse(text: str, is_json: bool, name: str, workers: int | None, seed: int) -> Trace:
    try:
        said, rows = _json_rows(text) if is_json else _csv_rows(text.splitlines())
        changes = [(float(time), int(change)) for time, change in rows]
        size = int(said["workers"]) if "workers" in said else workers
        duration = float(said.get("duration_s", max((time for time, _ in changes), default=0.0)))
        resolution = float(said.get("resolution_s", 0.0))
        if not all(map(math.isfinite, [duration, resolution, *(time for time, _ in changes)])):
            raise ValueError("its times must be finite")
    except (ValueError, TypeError, AttributeError, LookupError, OverflowError, RecursionError, csv.Error) as error:
        raise ConfigError(
            f"{name} is not a trace of (seconds, change of workers): {error}; see docs/design/simulator.md"
        ) from error
    if size is None:
        raise ConfigError(f"{name} does not say how many workers there are: give --workers or a line '# workers: N'")
    if not 0 <= size <= _MOST_WORKERS:
        raise ConfigError(f"{name} is of {size} workers: at most {_MOST_WORKERS} can be simulated")
    return from_counts(changes, size, duration, seed, resolution)


def _json_rows(text: str) -> tuple[dict[str, str], list[Sequence[str]]]:
    content = json.loads(text)
    if isinstance(content, list):
        return {}, content
    return content, content.get("events", [])


def _csv_rows(lines: Sequence[str]) -> tuple[dict[str, str], list[Sequence[str]]]:
    comments = (line.lstrip("# ").partition(":") for line in lines if line.startswith("#"))
    said = {key.strip(): value.strip() for key, _, value in comments}
    rows = list(csv.reader(line for line in lines if line.strip() and not line.startswith("#")))
    if rows and rows[0][0].strip() == "time_s":
        del rows[0]
    return said, list(rows)

"""Typed events: one JSON line each in ``events.jsonl``, one readable line each on the console."""

from __future__ import annotations

import errno
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from shared_core.resources import told_before, what_to_do

#: Kinds of events, in the order in which the life of a failure produces them.
KINDS = (
    "start",
    "lost",
    "generation",
    "survivor_ready",
    "newcomer_start",
    "newcomer_ready",
    "recovered",
    "resumed",
    "lane",
    "let_in",
    "rerouted",
    "update_taken_back",
    "took_over",
    "planned",
    "checkpoint",
    "restart",
    "resize",
    "together",
    "help",
    "groups",
    "warning",
    "log_memory",
    "fault",
    "end",
)
#: Environment variable: id of this start of the job.
RUN = "SWIFT_RECOVERY_RUN"
#: Environment variable: private folder of the job on this machine.
JOB_DIR = "SWIFT_RECOVERY_JOB_DIR"
#: With what every line begins.
_BEGIN = '{"kind":'


@dataclass(frozen=True)
class Event:
    """One event.

    Attributes:
        kind: one of :data:`KINDS`.
        time: seconds since the epoch (``time.time()``).
        rank: logical rank it concerns, -1 for the whole job.
        generation: generation it belongs to.
        fields: plain data particular to the kind, for instance ``cause`` and ``detected`` (``lost``), ``stall_s``,
            ``bytes_moved``,
            ``recomputed_steps`` (``recovered``).
        run: id of the job's start that it belongs to; empty in files of older versions.
    """

    kind: str
    time: float
    rank: int = -1
    generation: int = 0
    fields: dict[str, Any] = field(default_factory=dict)
    run: str = ""

    def to_json(self) -> str:
        """The event as one line of JSON, without the newline."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, line: str) -> Event:
        """Inverse of :meth:`to_json`."""
        raw = json.loads(line)
        kind, rank, generation = raw["kind"], raw.get("rank", -1), raw.get("generation", 0)
        return cls(kind, raw["time"], rank, generation, raw.get("fields", {}), raw.get("run", ""))


class EventLog:
    """Appends events to a file shared by all processes of the job; a line is one ``O_APPEND`` write, so lines never
    mix. An event that cannot be written is lost: no job depends on one.

    Args:
        path: of the file; None writes none.
        run: id of this start of the job, in every event.
        job_dir: see :func:`console_once`.
    """

    def __init__(self, path: str | os.PathLike[str] | None, run: str = "", job_dir: Path | None = None) -> None:
        self.path = Path(path) if path else None
        self.run = run
        self._job_dir, self._told = job_dir, False

    def emit(self, kind: str, *, rank: int = -1, generation: int = 0, **fields: Any) -> Event:
        """Append an event and return it.

        Raises:
            ValueError: for an unknown kind.
        """
        if kind not in KINDS:
            raise ValueError(f"unknown event kind {kind!r}; one of {', '.join(KINDS)}")
        event = Event(kind, time.time(), rank, generation, fields, self.run)
        if self.path is not None:
            try:
                self._append(self.path, (event.to_json() + "\n").encode())
            except OSError as error:
                self._lose(error)
        return event

    def _append(self, path: Path, line: bytes) -> None:
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            if os.write(fd, line) < len(line):  # never the rest: another's line may follow
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(fd)

    def _lose(self, error: OSError) -> None:
        if not self._told:
            self._told = True
            message = f"events are lost: {self.path} cannot be written {what_to_do(error)}. The job goes on"
            console_once("events", message, self._job_dir)


def read_events(path: str | os.PathLike[str], torn: list[str] | None = None) -> Iterator[Event]:
    """Events of a file in order; lines that cannot be read are left out.

    A line is torn where its writer was killed or the disk was full. What the next writer has appended to it is read.

    Args:
        path: of the file.
        torn: is given the lines that could not be read in full.
    """
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            event = _parse(line) if line.endswith("\n") else None
            if event is None:
                if torn is not None:
                    torn.append(line)
                event = _parse(line[max(0, line.rfind(_BEGIN)) :]) if line.endswith("\n") else None
            if event is not None:
                yield event


def _parse(line: str) -> Event | None:
    try:
        event = Event.from_json(line)
        return event if isinstance(event.time, float | int) and isinstance(event.fields, dict) else None
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def by_run(events: Iterable[Event]) -> dict[str, list[Event]]:
    """The events of each run, by its id, in the order in which the runs began."""
    runs: dict[str, list[Event]] = {}
    for event in events:
        runs.setdefault(event.run, []).append(event)
    return dict(sorted(runs.items(), key=lambda run: run[1][0].time))


def console(message: str) -> None:
    """One readable line on stderr, marked as ours; lost where nothing can be written there, such as to a full disk."""
    with suppress(OSError, ValueError):
        print(f"[swift] {visible(message)}", file=sys.stderr, flush=True)


def console_once(what: str, message: str, job_dir: Path | None = None) -> None:
    """As :func:`console`, in the first process of the job on this machine that has to say it.

    Args:
        what: a word for what it is about.
        message: the line.
        job_dir: private folder of the job; that of the environment by default.
    """
    folder = job_dir or os.environ.get(JOB_DIR)
    if folder is None or not told_before(Path(folder), what):
        console(message)


def visible(text: str) -> str:
    """``text`` for a terminal: characters that would control it are written out, as ``\\x1b``."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)

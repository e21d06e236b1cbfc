"""Typed events: one JSON line each in ``events.jsonl``, one readable line each on the console."""

from __future__ import annotations

import errno
import io
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypedDict

from shared_core.codec import Between, Count, fit
from shared_core.kinds import open_fd, open_regular
from shared_core.plain_json import parse
from shared_core.resources import told_before, what_to_do

#: Kinds of events, in the order in which the life of a failure produces them.
KINDS = (
    "start",
    "began",
    "failed",
    "drained",
    "straggler",
    "computed_again",
    "generation",
    "survivor_ready",
    "replacement_start",
    "replacement_ready",
    "recovered",
    "resumed",
    "survivor_group",
    "copying",
    "copied",
    "admitted",
    "rerouted",
    "update_taken_back",
    "took_over",
    "moved",
    "planned",
    "checkpoint",
    "restart",
    "resize",
    "together",
    "help",
    "groups",
    "preparing",
    "prepared",
    "warning",
    "log_memory",
    "fault",
    "end",
)
#: Environment variable: id of this start of the job.
RUN = "SWIFT_RECOVERY_RUN"
#: Environment variable: private folder of the job on this machine.
JOB_DIR = "SWIFT_RECOVERY_JOB_DIR"
#: Kinds whose fields reports calculate with.
_CALCULATED = frozenset(
    {
        "failed",
        "drained",
        "generation",
        "survivor_ready",
        "replacement_start",
        "replacement_ready",
        "recovered",
        "resumed",
        "admitted",
    }
)
_Whole = Annotated[int, Between(-(10**18), 10**18)]
_Seconds = Annotated[float, Between(-1e18, 1e18)]
#: Start and end of colored text on a terminal.
_COLOR, _PLAIN = "\033[36m", "\033[0m"
#: Start of every line.
_BEGIN = '{"kind":'


class _Calculated(TypedDict, total=False):
    """Fields of these kinds, as far as they are there."""

    detected: _Seconds
    ready_s: _Seconds
    start_s: _Seconds
    joined_s: _Seconds
    exchange_s: _Seconds
    stall_s: _Seconds
    bytes_moved: _Whole
    served_operations: _Whole
    recomputed_steps: _Whole
    boundary: _Whole | None
    failed: list[Count]
    stay: list[Count]
    absent: list[Count]


@dataclass(frozen=True)
class Event:
    """One event.

    Attributes:
        time: seconds since the epoch (``time.time()``).
        rank: logical rank it concerns, -1 for the whole job.
        fields: plain data particular to the kind, for instance ``cause`` and ``detected`` (``failed``), ``stall_s``,
            ``bytes_moved``, ``recomputed_steps`` (``recovered``).
        run: id of the job's start that it belongs to; empty in files of older versions.
    """

    kind: str
    time: Annotated[float, Between(-1e11, 1e11)]
    rank: _Whole = -1
    generation: _Whole = 0
    fields: dict[str, Any] = field(default_factory=dict)
    run: str = ""

    def to_json(self) -> str:
        """The event as one line of JSON, without the newline."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, line: str) -> Event:
        """Inverse of :meth:`to_json`. Raises ValueError for what is no event, or says something of another type than
        this product writes.
        """
        event: Event = fit(parse(line), cls)
        if event.kind in _CALCULATED:
            fit(event.fields, _Calculated)
        return event


class EventLog:
    """Appends events to a file that all processes of the job share.

    A line is one ``O_APPEND`` write, so lines never mix. An event that cannot be written is lost: no job depends
    on one.

    Args:
        path: of the file; None writes none.
        job_dir: see :func:`console_once`.
    """

    def __init__(self, path: str | os.PathLike[str] | None, run: str = "", job_dir: Path | None = None) -> None:
        self.path = Path(path) if path else None
        self.run = run
        self._job_dir, self._told = job_dir, False

    def emit(self, kind: str, *, rank: int = -1, generation: int = 0, **fields: Any) -> Event:
        """Append an event and return it. Raises ValueError for an unknown kind."""
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
        fd = open_fd(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, null=True)
        try:
            if os.write(fd, line) < len(line):  # never the rest: another's line may follow
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(fd)

    def _lose(self, error: OSError) -> None:
        if not self._told:
            self._told = True
            message = f"events are lost: {self.path} cannot be written {what_to_do(error)}. The job continues"
            console_once("events", message, self._job_dir)


def read_events(path: str | os.PathLike[str], torn: list[str] | None = None) -> Iterator[Event]:
    """Events of a file in order; lines that cannot be read are left out.

    A line is torn where its writer was killed or the disk was full. What the next writer has appended to it is read.
    ``torn``: gets the lines that could not be read in full. OSError if it cannot be read, or is no regular file.
    """
    with open_regular(path) as raw, io.TextIOWrapper(raw, encoding="utf-8", errors="replace") as file:
        for line in file:
            event = read_line(line, torn)
            if event is not None:
                yield event


def read_line(line: str, torn: list[str] | None = None) -> Event | None:
    """The event of a line, or what the next writer has appended to a torn one; None if neither can be read.

    Args:
        line: with its end.
        torn: gets the line if it could not be read in full.
    """
    event = _parse(line) if line.endswith("\n") else None
    if event is None:
        if torn is not None:
            torn.append(line)
        event = _parse(line[max(0, line.rfind(_BEGIN)) :]) if line.endswith("\n") else None
    return event


def _parse(line: str) -> Event | None:
    try:
        return Event.from_json(line)
    except ValueError:
        return None


def by_run(events: Iterable[Event]) -> dict[str, list[Event]]:
    """The events of each run, by its id, in the order in which the runs began."""
    runs: dict[str, list[Event]] = {}
    for event in events:
        runs.setdefault(event.run, []).append(event)
    return dict(sorted(runs.items(), key=lambda run: run[1][0].time))


def console(message: str) -> None:
    """One readable line on stderr, marked as ours, see :func:`visible`; lost where nothing can be written. On a
    terminal it is colored, unless ``NO_COLOR`` is set (https://no-color.org).
    """
    with suppress(OSError, ValueError, AttributeError):  # the last one: a process without standard streams
        line = marked(message)
        print(f"{_COLOR}{line}{_PLAIN}" if _is_colored() else line, file=sys.stderr, flush=True)


def _is_colored() -> bool:
    # A stream that a script has put there need not have all methods.
    is_terminal = getattr(sys.stderr, "isatty", lambda: False)()
    return bool(is_terminal) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def marked(message: str) -> str:
    return f"[swift] {visible(message)}"


def console_once(what: str, message: str, job_dir: Path | None = None) -> None:
    """As :func:`console`, in the first process of the job on this machine that has to say it.

    Args:
        what: a word for what it is about; the same word is said once.
        job_dir: private folder of the job; that of the environment by default.
    """
    folder = job_dir or os.environ.get(JOB_DIR)
    if folder is None or not told_before(Path(folder), what):
        console(message)


def visible(text: str) -> str:
    r"""``text`` as a part of one line for a terminal: what is not printable is written out, as ``\n`` and ``\x1b``.

    That includes line ends, escape sequences and marks that reverse the direction of writing. So what a worker or a
    file says makes no line of its own. All text of others that is shown goes through here.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)

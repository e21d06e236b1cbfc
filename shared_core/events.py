"""Typed events: one JSON line each in ``events.jsonl``, one readable line each on the console."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

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
    """

    kind: str
    time: float
    rank: int = -1
    generation: int = 0
    fields: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        """The event as one line of JSON, without the newline."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, line: str) -> Event:
        """Inverse of :meth:`to_json`."""
        raw = json.loads(line)
        return cls(raw["kind"], raw["time"], raw.get("rank", -1), raw.get("generation", 0), raw.get("fields", {}))


class EventLog:
    """Appends events to a file shared by all processes of the job; a line is one ``O_APPEND`` write, so lines never
    mix.
    """

    def __init__(self, path: str | os.PathLike[str] | None) -> None:
        self.path = Path(path) if path else None

    def emit(self, kind: str, *, rank: int = -1, generation: int = 0, **fields: Any) -> Event:
        """Append an event and return it.

        Raises:
            ValueError: for an unknown kind.
        """
        if kind not in KINDS:
            raise ValueError(f"unknown event kind {kind!r}; one of {', '.join(KINDS)}")
        event = Event(kind, time.time(), rank, generation, fields)
        if self.path is not None:
            fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                os.write(fd, (event.to_json() + "\n").encode())
            finally:
                os.close(fd)
        return event


def read_events(path: str | os.PathLike[str]) -> Iterator[Event]:
    """Events of a file in order; a torn last line (the writer was killed) is left out."""
    with open(path, encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n"):
                yield Event.from_json(line)


def console(message: str) -> None:
    """One readable line on stderr, marked as ours."""
    print(f"[swift] {message}", file=sys.stderr, flush=True)

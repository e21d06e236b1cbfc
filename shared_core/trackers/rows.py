"""Rows of one tracker, each written once although a replacement runs the script, or a batch of it, again.

What the service has is not written twice; what it lost with its buffer when the worker failed is written again.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from shared_core.encoding.plain import dumps, loads
from shared_core.encoding.values import NotPlain, decode, encode
from shared_core.job import Job

Row = Mapping[str, Any]
#: Writes a row: its values, its step, further arguments of the script's.
Write = Callable[[Row, Any, dict[str, Any]], None]
#: Most rows that are kept because the service may lose them; more come only from toys.
_KEPT = 1000


class Service:
    """What takes the rows. This one can only be told: what it was given, it is taken to have.

    ``buffer_s``: what is younger, in seconds, the service may lose with the process.
    """

    buffer_s = 0.0

    def place(self, row: Row, step: Any) -> Any:
        """Where the service puts a row that is given to it now, as plain data."""
        return None

    def has(self, place: Any, row: Row, step: Any) -> bool | None:
        """Whether it has this row of a failed worker; None if it cannot tell."""
        return None

    def passed(self, place: Any, step: Any) -> None:
        """A row was not written, because :meth:`has` said that it is there."""

    def carry_on(self, place: Any) -> None:
        """The row that comes next, to ``place``, is the first that is missing."""

    def wrote(self, place: Any, step: Any) -> None:
        """A row was written, to ``place``."""

    def state(self) -> Any:
        """Plain data for :meth:`restore`."""
        return None

    def restore(self, state: Any) -> None:
        """In a replacement: be where the failed worker was."""


def replaces_a_worker(job: Job) -> bool:
    """Whether another worker may have written what this one comes to."""
    return bool(job.joining or job.env.incarnation or job.env.restart)


class Rows:
    """Writes each row that the script gives to a tracker once, whoever runs the script.

    Args:
        job: of this worker, which holds rank 0.
        name: unique, and the same in a replacement.
    """

    def __init__(self, job: Job, name: str, service: Service, write: Write) -> None:
        self._service, self._write = service, write
        self._count = 0
        #: Number of the last row that is there, as far as this worker is concerned.
        self._done = 0
        self._written = job.notes.tally(f"rows.{name}")
        self._recent: deque[tuple[float, bytes]] = deque(maxlen=_KEPT)
        #: A failed worker may have written what comes next.
        self._behind = replaces_a_worker(job)

    def give(self, row: Row, step: Any = None, **more: Any) -> None:
        """Write a row that the script logs, unless the service has it from a failed worker. ``more``: further arguments
        for the tracker.
        """
        self._count = self._done = self._count + 1
        place = self._service.place(row, step)
        if self._behind:
            if self._has(self._count, place, row, step):
                self._service.passed(place, step)
                return
            self._catch_up(place)
        self._write(row, step, more)
        self._service.wrote(place, step)
        self._keep(place, row, step, more)
        self._written.value = self._count

    def state(self) -> Any:
        oldest = time.time() - self._service.buffer_s
        while self._recent and self._recent[0][0] < oldest:
            self._recent.popleft()
        return {"count": self._count, "recent": [row for _, row in self._recent], "service": self._service.state()}

    def restore(self, state: Any) -> None:
        """In a replacement: continue from the failed worker's :meth:`state`, and write what the service has lost."""
        self._service.restore(state["service"])
        self._recent.clear()
        for packed in state["recent"]:
            number, place, encoded, step, more = loads(packed)
            if number <= self._done:
                continue
            row, self._done = decode(encoded), number
            if self._behind:
                if self._has(number, place, row, step):
                    continue
                self._catch_up(place)
            self._write(row, step, decode(more))
            self._service.wrote(place, step)
            self._recent.append((time.time(), packed))
        self._count = self._done = state["count"]

    def _catch_up(self, place: Any) -> None:
        self._behind = False
        self._service.carry_on(place)

    def _has(self, number: int, place: Any, row: Row, step: Any) -> bool:
        has = self._service.has(place, row, step)
        return number <= self._written.value if has is None else has

    def _keep(self, place: Any, row: Row, step: Any, more: dict[str, Any]) -> None:
        if not self._service.buffer_s:
            return
        plain = {name: value.item() if hasattr(value, "item") else value for name, value in row.items()}
        try:
            packed = dumps((self._count, place, encode(plain), step, encode(more)))
        except NotPlain:  # pictures and the like: lost if the service loses them
            return
        self._recent.append((time.time(), packed))

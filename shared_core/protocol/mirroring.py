"""Copies of publications on other machines: what a worker asks its keeper for, and which machine that is."""

from __future__ import annotations

from collections.abc import Sequence

#: Kinds of frames: a whole file, more of one, one that goes; a copy of everything begins and ends; say when you have
#: all; what you have of a rank.
WRITE, APPEND, REMOVE, BEGIN, END, SYNC, GET = b"w", b"a", b"r", b"b", b"e", b"s", b"g"
#: Files of a rank that are not copied: they are written in place, and only serve to check.
LOCAL = frozenset({"checks"})
#: Name of the replicated state that a rank hands on when the number of workers changes; asked for by its name.
REPLICATED = "replicated"


def keeper(machines: Sequence[str | None], slot: int) -> str | None:
    """The machine that keeps the copies of place ``slot``: the next place that somebody holds."""
    for step in range(1, len(machines)):
        machine = machines[(slot + step) % len(machines)]
        if machine is not None:
            return machine
    return None

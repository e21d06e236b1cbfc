"""Copies of publications on other machines: the kinds of frames, and which machine keeps them."""

from __future__ import annotations

from collections.abc import Sequence

#: Kinds of frames: a whole file; more of a file; remove a file; a copy of everything begins; it ends; answer when you
#: have all; send what you have of a rank.
WRITE, APPEND, REMOVE, BEGIN, END, SYNC, GET = b"w", b"a", b"r", b"b", b"e", b"s", b"g"
#: Files of a rank that are not copied: they are written in place, and only serve to check.
LOCAL = frozenset({"checks"})
#: Name of the replicated state that a rank writes when the number of workers changes; sent only if asked for by name.
REPLICATED = "replicated"


def keeper(machines: Sequence[str | None], slot: int) -> str | None:
    """The machine that keeps the copies of place ``slot``: the next place that is held. None if there is no other."""
    for step in range(1, len(machines)):
        machine = machines[(slot + step) % len(machines)]
        if machine is not None:
            return machine
    return None

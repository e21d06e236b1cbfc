"""Open descriptors of this process, and which of them it had before the user's program."""

from __future__ import annotations

import os
from contextlib import suppress

_inherited: frozenset[str] = frozenset()


def descriptors() -> dict[int, str]:
    """What ``/proc`` says of each: a path, or a kind with a number."""
    links: dict[int, str] = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # that of the folder itself
            links[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return links


def note_inherited() -> None:
    """The user's program begins: what is open now is not its own."""
    global _inherited
    _inherited = frozenset(descriptors().values())


def inherited() -> frozenset[str]:
    """What was open then, as in :func:`descriptors`."""
    return _inherited

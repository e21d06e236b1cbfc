"""At which step boundaries checkpoints are due, where a policy decides: rank 0 decides, and all others know in time.

At a step boundary with ``v`` updates rank 0 writes down "at the first step boundary with at least ``v + 2`` updates",
before it contributes to any collective of that batch. Nobody gets there without an update that needed rank 0 after
that, so whoever looks at such a boundary finds the entry. No collective is added, nobody waits, and no clock but rank
0's decides. Where every update needs every rank (data parallel), any rank may so say that the next checkpoint is the
last. Entries are kept, so that a replacement that passes boundaries again finds the same ones due.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path

from shared_core.codec import Count, decode
from shared_core.errors import DamagedRecord
from shared_core.events import console
from shared_core.transport.store import Store

#: Updates from the decision to the checkpoint. One is enough; the second leaves room. The last one uses one.
AHEAD, AHEAD_LAST = 2, 1
_ENTRY = struct.Struct("<q")
#: In the place of an entry that is none.
_NEVER = -1


class FileEntries:
    """A list of numbers that grows, the same for all ranks. On one machine: a file in the job's folder. A look costs a
    microsecond.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)

    def append(self, number: int) -> None:
        """Add a number; any rank that looks after this has returned sees it."""
        os.write(self._fd, _ENTRY.pack(number))

    def after(self, count: int) -> list[int]:
        """The numbers after the first ``count``."""
        data = os.pread(self._fd, 1 << 16, count * _ENTRY.size)
        return [number for (number,) in _ENTRY.iter_unpack(data[: len(data) // _ENTRY.size * _ENTRY.size])]


class StoreEntries:
    """The same on several machines: keys of the agents' store. A look costs a round trip. ``store`` makes a client."""

    def __init__(self, store: Callable[[], Store]) -> None:
        self._store = store
        self._count = 0

    def append(self, number: int) -> None:
        store, said = self._store(), str(number)
        while bytes(store.compare_set(self._key(self._count), "", said)) != said.encode():
            self._count += 1  # a failed worker's, or another rank's

    def after(self, count: int) -> list[int]:
        store, found = self._store(), []
        while store.check([key := self._key(count)]):
            try:
                found.append(decode(store.get(key), Count, key))
            except DamagedRecord as error:
                console(f"{error}. The checkpoint that it asked for is not made; training continues")
                found.append(_NEVER)
            count += 1
        return found

    def _key(self, place: int) -> str:
        return f"checkpoint/due/{place}"


class Decisions:
    """The list, seen from one rank. ``pending``: updates at which the newest known entry is due; -1 for none."""

    def __init__(self, entries: FileEntries | StoreEntries) -> None:
        self._entries = entries
        self._known: list[tuple[int, bool]] = []
        self._version = -1
        self.pending = -1

    def joined(self, version: int) -> None:
        """This rank begins at a step boundary with this many updates; it passes over what was due there or before."""
        self._version = version

    def add(self, version: int, *, last: bool = False) -> None:
        """A checkpoint is due soon; ``last``: the job ends with it. Call with the version of the present step boundary,
        before any collective of that batch.
        """
        target = version + (AHEAD_LAST if last else AHEAD)
        self._entries.append(2 * target + int(last))
        self.pending = max(self.pending, target)

    def is_due(self, version: int) -> bool:
        """What :meth:`due` will say, at the next step boundary, which has this version."""
        self._look()
        return any(self._version < target <= version for target, _ in self._known)

    def due(self, version: int) -> tuple[bool, bool]:
        """(due here, the last one), at a step boundary with this version. Ask once a boundary."""
        self._look()
        here = [last for target, last in self._known if self._version < target <= version]
        self._version = version
        return bool(here), any(here)

    def _look(self) -> None:
        for number in self._entries.after(len(self._known)):
            self._known.append((number // 2, bool(number % 2)))
            self.pending = max(self.pending, number // 2)

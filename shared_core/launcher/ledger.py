"""The one order of what happens in an attempt: an append-only list of entries in the store, shared by all agents.

An entry is written with ``compare_set`` against nothing, so of two agents that append at the same moment one comes
first, and the other second, knowing the first. An entry that ends the attempt is the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from shared_core.protocol.generation import (
    GIVEN_UP,
    Entry,
    EntryKind,
    generation_key,
    go_key,
    plan_key,
    survivor_group_key,
)
from shared_core.protocol.rounds import NOBODY, still_absent


class Ledger:
    """One agent's view of the list, which it reads and appends to.

    Attributes:
        incarnations: for each rank, how many workers held it before the present one.
        machines: for each place, the machine that holds it; None while nobody does. Empty for a job on one machine.
        over: the last entry once the attempt is over.
        gone: machines that have lost their place; each has another name if it comes back.
        detected: when the failure was noticed that the newest generation answers, in seconds since the epoch; 0 before
            there is one.
        change: the newest generation, while the number of workers changes; else None.
        absent: ranks that failed and without which the others continued, as of the newest generation; None where every
            failure is answered by forming a generation with its replacement.

    Args:
        store: a client of the store; any object with ``check``, ``get`` and ``compare_set``.
        machines: who holds which place in generation 0.
    """

    def __init__(self, store: Any, prefix: str, world_size: int, machines: Sequence[str | None] = ()) -> None:
        self._store, self._prefix = store, prefix
        self.generation = 0
        self.incarnations: tuple[int, ...] = (0,) * world_size
        self.machines = tuple(machines)
        self.over: Entry | None = None
        self.gone: set[str] = set()
        self.detected = 0.0
        self.change: Entry | None = None
        self.absent: frozenset[int] | None = None
        self._news: list[Entry] = []

    def follow(self) -> list[Entry]:
        """Entries of others since the last call, in order; raises DamagedRecord."""
        while self.over is None and self._store.check([self._next]):
            self._take(self._store.get(self._next), ours=False)
        news, self._news = self._news, []
        return news

    def catch_up(self) -> None:
        """Read what was written before this view existed. Only the end of the attempt is returned by the next
        :meth:`follow`: a machine that comes after it must not wait for those that have left.
        """
        self._news = [entry for entry in self.follow() if entry.kind.over]

    def append(self, make: Callable[[], Entry | None]) -> Entry | None:
        """Append what ``make`` returns, and return it with what the ledger added; None if the attempt is over or
        ``make`` gave up.

        ``make`` is called with this view up to date, and again after each entry that came before ours; it returns None
        to give up.
        """
        while self.over is None:
            entry = make()
            if entry is None:
                return None
            entry = self._completed(entry)
            written = entry.to_json()
            # First, so that no worker waits for what will not come; if this agent ends here, another one appends
            # an entry.
            for key in (plan_key(self.generation), go_key(self.generation)):
                self._store.compare_set(self._prefix + key, "", GIVEN_UP)
            stored = bytes(self._store.compare_set(self._next, "", written))
            ours = stored == written.encode()
            self._take(stored, ours=ours)
            if ours:
                return entry
        return None

    def present(self) -> list[int]:
        def look(key: str) -> bytes | None:
            return self._store.get(self._prefix + key) if self._store.check([self._prefix + key]) else None

        away = still_absent(self.generation, self.absent or frozenset(), look)
        return [rank for rank in range(len(self.incarnations)) if rank not in away]

    def _completed(self, entry: Entry) -> Entry:
        """The entry with number, incarnations, absent ranks and machines filled in."""
        incarnations, kind, absent = list(self.incarnations), entry.kind, None
        for rank in entry.failed:
            incarnations[rank] += 1
        if not kind.over:
            absent = self._absent_after(entry.failed)
            kind = kind if kind is EntryKind.DRAIN else EntryKind.CARRY_ON if absent else EntryKind.FORM
        return replace(
            entry,
            generation=self.generation + 1,
            incarnations=tuple(incarnations),
            absent=absent,
            kind=kind,
            machines=entry.machines or self.machines,
        )

    def _absent_after(self, failed: Sequence[int]) -> frozenset[int] | None:
        """``absent`` of the generation that follows these failures. Once every worker uses survivor groups, the others
        continue without a failed rank. This settles whether replacements that are being admitted are in.
        """
        if self.absent is None:
            keys = [self._prefix + survivor_group_key(rank, n) for rank, n in enumerate(self.incarnations)]
            return frozenset(failed) if self._store.check(keys) else None

        def settle(key: str) -> bytes:
            return bytes(self._store.compare_set(self._prefix + key, "", NOBODY))

        return frozenset(failed) | still_absent(self.generation, self.absent, settle)

    @property
    def _next(self) -> str:
        return self._prefix + generation_key(self.generation + 1)

    def _take(self, raw: bytes, *, ours: bool) -> None:
        entry = Entry.from_json(raw, self.generation + 1, len(self.incarnations))
        before, self.machines = self.machines, entry.machines or self.machines
        self.gone |= {name for name in before if name is not None and name not in self.machines}
        if entry.kind.over:
            self.over = entry
        else:
            self.absent = entry.absent
            self.change = entry if entry.kind is EntryKind.DRAIN else None
            self.generation, self.incarnations, self.detected = entry.generation, entry.incarnations, entry.detected
        if not ours:
            self._news.append(entry)

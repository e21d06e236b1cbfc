"""The one order of what happens in an attempt: an append-only list of entries in the store, shared by all agents.

Entry g is the key ``gen/{g}``. It is written with ``compare_set`` against nothing, so that of two agents that append
at the same moment one comes first and the other second, knowing the first. An entry with ``over`` is the last one.
Workers follow the same keys.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

#: What ends an attempt: all workers said goodbye, all start again, another number goes on, the job failed.
RELEASE, RESTART, RESIZE, FAIL = "release", "restart", "resize", "fail"


class Ledger:
    """One reader's and writer's view.

    Attributes:
        generation: number of the newest generation.
        incarnations: for each rank, how many workers held it before the present one.
        machines: for each place, the machine that holds it; None while nobody does. Empty for a job on one machine.
        over: the last entry once the attempt is over.
        gone: machines that have lost their place; each has another name if it comes back.
        change: ``stay`` and ``after`` of the newest generation, while the number of workers changes.

    Args:
        store: a client of the store; any object with ``check``, ``get`` and ``compare_set``.
        prefix: key prefix of the attempt.
        world_size: number of logical ranks.
        machines: who holds which place in generation 0.
    """

    def __init__(self, store: Any, prefix: str, world_size: int, machines: Sequence[str | None] = ()) -> None:
        self._store, self._prefix = store, prefix
        self.generation = 0
        self.incarnations = [0] * world_size
        self.machines = list(machines)
        self.over: dict[str, Any] | None = None
        self.gone: set[str] = set()
        self.change: dict[str, Any] = {}
        self._news: list[dict[str, Any]] = []

    def follow(self) -> list[dict[str, Any]]:
        """Entries of others since the last call, in order."""
        while self.over is None and self._store.check([self._next]):
            self._take(self._store.get(self._next), ours=False)
        news, self._news = self._news, []
        return news

    def append(self, make: Callable[[], dict[str, Any] | None]) -> dict[str, Any] | None:
        """Append what ``make`` returns, and return it with what the ledger added.

        Args:
            make: called with this view up to date, again after each entry that came before ours; returns ``lost``
                (ranks), ``machines`` (the whole map, if it changes), ``over`` and anything else, or None to give up.

        Returns:
            The entry; None if the attempt is over or ``make`` gave up.
        """
        while self.over is None:
            entry = make()
            if entry is None:
                return None
            incarnations = list(self.incarnations)
            for rank in entry.get("lost", ()):
                incarnations[rank] += 1
            entry = {"generation": self.generation + 1, "incarnations": incarnations} | entry
            if self.machines or "machines" in entry:
                entry = {"machines": list(self.machines)} | entry
            written = json.dumps(entry)
            stored = bytes(self._store.compare_set(self._next, "", written))
            ours = stored == written.encode()
            self._take(stored, ours=ours)
            if ours:
                return entry
        return None

    @property
    def _next(self) -> str:
        return f"{self._prefix}gen/{self.generation + 1}"

    def _take(self, raw: bytes, *, ours: bool) -> None:
        entry = json.loads(raw)
        before, self.machines = self.machines, entry.get("machines", self.machines)
        self.gone |= {name for name in before if name is not None and name not in self.machines}
        if entry.get("over"):
            self.over = entry
        else:
            self.change = {name: entry[name] for name in ("stay", "after") if name in entry}
            self.generation, self.incarnations = entry["generation"], entry["incarnations"]
        if not ours:
            self._news.append(entry)

"""Which ranks of one machine are held by a worker, and when replacements are to be started."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from shared_core.launcher.workers import LiveWorker


class Roster:
    """The ranks of one machine in one attempt.

    Attributes:
        failed: ranks that no worker holds now.
        missing: ranks whose first worker does not run yet.
        pids: pid of the newest worker, by local rank.
    """

    def __init__(self) -> None:
        self.failed: set[int] = set()
        self.missing: set[int] = set()
        self.pids: dict[int, int] = {}
        self._due: list[tuple[float, int]] = []

    def begin(self, ranks: Iterable[int]) -> None:
        self.failed, self.missing = set(), set(ranks)
        self.forget_due()

    def lose(self, failed: Iterable[int]) -> None:
        self.failed.update(failed)

    def arrived(self, one: LiveWorker) -> None:
        self.missing.discard(one.rank)
        self.failed.discard(one.rank)
        self.pids[one.local_rank] = one.pid

    @property
    def due(self) -> list[tuple[float, int]]:
        """(``time.monotonic()``, local rank) of the replacements that are to be started."""
        return list(self._due)

    def replace_in(self, delay_s: float, local_rank: int) -> None:
        self._due.append((time.monotonic() + delay_s, local_rank))

    def replace_all(self, places: Mapping[int, int]) -> None:
        """Start replacements of all failed ranks now, unless due already. ``places``: local rank of each rank."""
        waiting = {place for _, place in self._due}
        for rank in sorted(self.failed & places.keys()):
            if places[rank] not in waiting:
                self.replace_in(0.0, places[rank])

    def take_due(self) -> list[int]:
        """Local ranks whose time has come."""
        now = time.monotonic()
        taken = [entry for entry in self._due if entry[0] <= now]
        self._due = [entry for entry in self._due if entry not in taken]
        return [place for _, place in taken]

    def forget_due(self) -> None:
        self._due.clear()

"""Which ranks of one machine are held by a worker, and whose replacements are to be started when."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from shared_core.launcher.workers import LiveWorker


class Roster:
    """The ranks of one machine in one attempt.

    Attributes:
        failed: ranks that no worker holds now.
        missing: ranks whose first worker does not run yet.
        pids: of the newest worker of each place.
    """

    def __init__(self) -> None:
        self.failed: set[int] = set()
        self.missing: set[int] = set()
        self.pids: dict[int, int] = {}
        self._due: list[tuple[float, int]] = []

    def begin(self, ranks: Iterable[int]) -> None:
        """The first workers of these ranks are being started."""
        self.failed, self.missing = set(), set(ranks)
        self.forget_due()

    def lose(self, failed: Iterable[int]) -> None:
        """No worker holds these ranks now."""
        self.failed.update(failed)

    def arrived(self, one: LiveWorker) -> None:
        """The process of a worker exists."""
        self.missing.discard(one.rank)
        self.failed.discard(one.rank)
        self.pids[one.local_rank] = one.pid

    @property
    def due(self) -> list[tuple[float, int]]:
        """When replacements are to be started, as ``time.monotonic()`` says it, with their places on this machine."""
        return list(self._due)

    def replace_in(self, delay_s: float, local_rank: int) -> None:
        """A replacement is to be started after so many seconds."""
        self._due.append((time.monotonic() + delay_s, local_rank))

    def replace_all(self, places: Mapping[int, int]) -> None:
        """Replacements of all failed ranks are to be started now, where that is not settled yet.

        Args:
            places: on this machine, by rank.
        """
        waiting = {place for _, place in self._due}
        for rank in sorted(self.failed & places.keys()):
            if places[rank] not in waiting:
                self.replace_in(0.0, places[rank])

    def take_due(self) -> list[int]:
        """Places of replacements whose time has come."""
        now = time.monotonic()
        taken = [entry for entry in self._due if entry[0] <= now]
        self._due = [entry for entry in self._due if entry not in taken]
        return [place for _, place in taken]

    def forget_due(self) -> None:
        """No replacement is to be started."""
        self._due.clear()

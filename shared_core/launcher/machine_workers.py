"""The workers that hold the ranks of one machine: how they are started, and how they are ended."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterable, Mapping

from shared_core.launcher.spares import Spares
from shared_core.launcher.starting import AttemptStart, Starter
from shared_core.launcher.wakeup import Wakeup
from shared_core.launcher.workers import CANCELLED, LiveWorker, WorkerPool
from shared_core.waiting import Wait, ranks_text


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


class MachineWorkers:
    """Starts and kills workers. ``tick_s``: how often they are looked at while they are being killed."""

    def __init__(self, pool: WorkerPool, starter: Starter, spares: Spares, wakeup: Wakeup, tick_s: float) -> None:
        self.pool, self.starter, self.spares, self._wakeup, self._tick_s = pool, starter, spares, wakeup, tick_s
        self.roster = Roster()

    @property
    def complete(self) -> bool:
        """Whether each rank has a worker."""
        return not self.roster.failed and not self.roster.missing

    def start(self, local_rank: int, start: AttemptStart) -> None:
        if self.spares.start(local_rank, start):
            self._wakeup.tell()  # its process is there

    def start_due(self, start: AttemptStart) -> None:
        for local_rank in self.roster.take_due():
            self.start(local_rank, start)

    def kill_ranks(self, killed: Collection[int], cause: str) -> None:
        for one in list(self.pool.live.values()):
            if one.rank in killed:
                one.kill(cause)

    def let_go(self, absent: Collection[int]) -> None:
        """These ranks are not needed any more, nor are replacements on their way."""
        self.roster.forget_due()
        self.pool.cancel_starts()
        self.kill_ranks(absent, CANCELLED)

    def kill_all(self) -> None:
        """SIGKILL to every worker, also those being forked; returns when all are reaped."""
        pool = self.pool
        self.roster.forget_due()
        self.spares.clear()
        pool.cancel_starts()
        # No time limit: a process that hangs in a file system cannot be killed, and its place must not be taken twice.
        whom = lambda: f"{ranks_text(one.rank for one in pool.live.values())} to end, killed with SIGKILL"  # noqa: E731
        wait = Wait("the launcher", whom, math.inf, ends="it continues when they have ended")
        while pool.live or pool.starting:
            wait.look()
            pool.started()
            for one in pool.live.values():
                one.kill(CANCELLED)
            self._wakeup.wait(self._tick_s)
            pool.reap()
            pool.look_after_standbys()

"""Finds slow ranks on this machine, reports them, and with ``stragglers="replace"`` has them replaced."""

from __future__ import annotations

import time
from dataclasses import asdict

from shared_core.config import SwiftConfig
from shared_core.errors import ConfigError
from shared_core.events import console
from shared_core.launcher.attempts import Attempts
from shared_core.launcher.job_reporter import JobReporter
from shared_core.launcher.leaving import PlannedLeaves
from shared_core.launcher.workers import LiveWorker
from shared_core.protocol import stragglers
from shared_core.protocol.agent_phase import AgentPhase
from shared_core.protocol.progress_file import read_steps
from shared_core.protocol.stragglers import Slow, Steps

#: Seconds from one look to the next: each asks the store for the times of every other machine.
LOOK_S = 1.0


class Stragglers:
    """Looks at the times of the last steps, of all machines."""

    def __init__(
        self, config: SwiftConfig, attempts: Attempts, leaves: PlannedLeaves, job_reporter: JobReporter
    ) -> None:
        self._answer, self._attempts = config.stragglers, attempts
        self._leaves, self._job_reporter = leaves, job_reporter
        #: Of each rank, the pid of its worker and the newest step of the one before; and who was named, or replaced.
        self._workers: dict[int, tuple[int, int]] = {}
        self._named: set[int] = set()
        self._replaced: set[int] = set()
        self._next = 0.0

    def look(self) -> None:
        """Call at each tick; most calls do nothing."""
        attempts = self._attempts
        if self._answer == "off" or attempts.phase is not AgentPhase.RUNNING or not attempts.workers.complete:
            return
        if (now := time.monotonic()) < self._next:
            return
        self._next = now + LOOK_S
        mine = {one.rank: self._steps(one) for one in attempts.workers.pool.live.values()}
        for one in stragglers.slow(attempts.now.with_others(mine), mine.keys() - self._named):
            self._name(one, self._workers[one.rank][0])

    def _steps(self, one: LiveWorker) -> Steps:
        """Those that this worker has made, and not the one that held the rank before."""
        steps = read_steps(self._attempts.progress_file(one.rank))
        pid, before = self._workers.get(one.rank, (one.pid, 0))
        if pid != one.pid:
            before = max(steps, default=0)
            self._named.discard(one.rank)
        self._workers[one.rank] = one.pid, before
        return {number: parts for number, parts in steps.items() if number > before}

    def _name(self, one: Slow, pid: int) -> None:
        self._named.add(one.rank)
        fields = {name: value for name, value in asdict(one).items() if name != "rank"}
        self._job_reporter.emit("straggler", rank=one.rank, pid=pid, **fields)
        console(f"rank {one.rank} (pid {pid}) is slow: it {one.text}")
        if self._answer != "replace":
            return
        if one.rank in self._replaced:
            console(f"rank {one.rank} is slow again after it was replaced: its machine may be the reason")
            return
        try:
            self._leaves.ask(str(one.rank), f"slow, {one.factor:.1f} times in {one.part}")
        except ConfigError as error:
            console(f"rank {one.rank} is not replaced: {error}")
            return
        self._replaced.add(one.rank)

"""Ranks of this machine that are slow for a reason of their own: named, and where that is asked for replaced."""

from __future__ import annotations

from dataclasses import asdict

from shared_core.config import SwiftConfig
from shared_core.errors import ConfigError
from shared_core.events import console
from shared_core.launcher.attempts import Attempts
from shared_core.launcher.job_reporter import JobReporter
from shared_core.launcher.leaving import PlannedLeaves
from shared_core.protocol import stragglers
from shared_core.protocol.agent_phase import AgentPhase
from shared_core.protocol.progress_file import read_steps
from shared_core.protocol.stragglers import Slow, Steps


class Stragglers:
    """Looks at the times of the last steps, of all machines."""

    def __init__(
        self, config: SwiftConfig, attempts: Attempts, leaves: PlannedLeaves, job_reporter: JobReporter
    ) -> None:
        self._answer, self._attempts = config.stragglers, attempts
        self._leaves, self._job_reporter = leaves, job_reporter
        #: Pid of each slow worker that was named, by rank; and ranks that were replaced for it.
        self._named: dict[int, int] = {}
        self._replaced: set[int] = set()

    def look(self) -> None:
        """Call at each tick."""
        attempts = self._attempts
        if self._answer == "off" or attempts.phase is not AgentPhase.RUNNING or not attempts.workers.complete:
            return
        mine: dict[int, Steps] = {rank: read_steps(attempts.progress_file(rank)) for rank in attempts.places.ranks}
        found = stragglers.slow(attempts.now.with_others(mine))
        pids = {one.rank: one.pid for one in attempts.workers.pool.live.values()}
        for one in [one for one in found if one.rank in mine and self._named.get(one.rank) != pids[one.rank]]:
            self._name(one, pids[one.rank])

    def _name(self, one: Slow, pid: int) -> None:
        self._named[one.rank] = pid
        fields = {name: value for name, value in asdict(one).items() if name != "rank"}
        self._job_reporter.emit("straggler", rank=one.rank, pid=pid, factor=one.factor, **fields)
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

"""What an agent does about the other machines while its job runs."""

from __future__ import annotations

from shared_core.events import console
from shared_core.launcher.attempts import Attempts
from shared_core.launcher.job_reporter import JobReporter
from shared_core.launcher.machine import MachineMembership
from shared_core.launcher.resizes import Resizes
from shared_core.protocol.agent_phase import AgentEvent
from shared_core.protocol.generation import EntryKind
from shared_core.protocol.resizing import Resizing


class OtherMachines:
    """Watches leases. ``nproc``: workers of each machine."""

    def __init__(
        self,
        membership: MachineMembership,
        nproc: int,
        attempts: Attempts,
        resizes: Resizes,
        job_reporter: JobReporter,
        resizing: Resizing,
    ) -> None:
        self._membership, self._nproc = membership, nproc
        self._attempts, self._resizes, self._job_reporter, self._resizing = attempts, resizes, job_reporter, resizing

    def check(self) -> None:
        """Raises Fenced if this machine's workers may not continue."""
        if self._attempts.phase.trains:
            self._membership.check(self._attempts.now.ledger)

    def look(self) -> None:
        """Give the places of failed machines away, or continue with another number of machines."""
        attempts = self._attempts
        entry = self._membership.replace_machines(attempts.now, self._nproc, self._resizing)
        if entry is None:
            return
        self._resizes.note(entry)
        self._job_reporter.failed_elsewhere(entry)
        if entry.kind is EntryKind.RESTART:
            self._job_reporter.emit("restart", reason=entry.reason, attempt=attempts.number + 1)
            attempts.restart(entry)
        else:
            self._job_reporter.generation(entry)

    def stand_down(self, error: Exception) -> None:
        """This machine may not continue: its workers end, and it is as if it had just been started."""
        reason = self._membership.why(error)
        console(f"the workers of this machine are stopped: {reason}")
        self._job_reporter.warn(f"workers stopped: {reason}")
        self._attempts.step(AgentEvent.FENCED)

    def send_no_more(self) -> None:
        self._membership.send_no_more()

    def part(self) -> None:
        """Leave, and tell the others. If the job cannot outlive this machine, it fails for them."""
        attempts = self._attempts
        over = attempts.begun and attempts.now.ledger.over is not None
        if attempts.begun and not over and self._membership.job_ends_here:
            attempts.write_failure(attempts.places.ranks[0], "the machine that hosts the store was told to end")
            over = True
        self._membership.leave(over=over)
        self._membership.close()

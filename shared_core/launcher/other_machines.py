"""What an agent does about the other machines while its job runs."""

from __future__ import annotations

from shared_core.events import console
from shared_core.launcher.attempts import Attempts
from shared_core.launcher.machine import Crew
from shared_core.launcher.resizes import Resizes
from shared_core.launcher.telling import Telling
from shared_core.protocol.agent_phase import Event
from shared_core.protocol.resizing import Resizing


class OtherMachines:
    """Watches leases.

    Args:
        nproc: workers of each machine.
        restart: all workers start again after a failure.
    """

    def __init__(
        self,
        crew: Crew,
        nproc: int,
        restart: bool,
        attempts: Attempts,
        resizes: Resizes,
        telling: Telling,
        resizing: Resizing,
    ) -> None:
        self._crew, self._nproc, self._restart = crew, nproc, restart
        self._attempts, self._resizes, self._telling, self._resizing = attempts, resizes, telling, resizing

    def check(self) -> None:
        """May this machine's workers continue?

        Raises:
            Fenced: if not.
        """
        if self._attempts.phase.trains:
            self._crew.check(self._attempts.now.ledger)

    def look(self) -> None:
        """Give the places of failed machines away, or continue with another number of machines."""
        attempts = self._attempts
        entry = self._crew.replace_machines(attempts.now, self._nproc, self._resizing, restart=self._restart)
        if entry is None:
            return
        self._resizes.note(entry)
        self._telling.failed_elsewhere(entry)
        if self._restart:
            self._telling.emit("restart", reason=entry.reason, attempt=attempts.number + 1)
            attempts.restart(entry)
        else:
            self._telling.generation(entry)

    def stand_down(self, error: Exception) -> None:
        """This machine may not continue: its workers end, and it is as if it had just been started."""
        reason = self._crew.why(error)
        console(f"the workers of this machine are stopped: {reason}")
        self._telling.warn(f"workers stopped: {reason}")
        self._attempts.step(Event.FENCED)

    def send_no_more(self) -> None:
        """The job ends on this machine: its snapshots are not copied any more."""
        self._crew.send_no_more()

    def part(self) -> None:
        """Go, and say so."""
        attempts = self._attempts
        over = attempts.begun and attempts.now.ledger.over is not None
        if attempts.begun and not over and self._crew.job_ends_here:
            attempts.write_failure(attempts.places.ranks[0], "the machine that hosts the store was told to end")
            over = True
        self._crew.leave(over=over)
        self._crew.close()

"""The end of an agent, however it comes."""

from __future__ import annotations

import signal
import time

from shared_core.launcher.attempts import Attempts
from shared_core.launcher.last_checkpoint import LastCheckpoint
from shared_core.launcher.options import Program
from shared_core.launcher.other_machines import OtherMachines
from shared_core.launcher.persisting import Persisting
from shared_core.launcher.starting import Starter
from shared_core.launcher.telling import Telling
from shared_core.launcher.wakeup import Wakeup
from shared_core.launcher.workers import Fleet
from shared_core.system.jobdir import JobDir


class Ending:
    """Ends the workers and gives everything back.

    Args:
        job: private folder of the job.
        starter: holds the log files.
        machines: the other machines, if there are any.
        last_checkpoint: that the end waits for.
        persisting: writes checkpoints to storage.
        telling: knows the job's id.
    """

    def __init__(
        self,
        program: Program,
        job: JobDir,
        wakeup: Wakeup,
        fleet: Fleet,
        starter: Starter,
        attempts: Attempts,
        machines: OtherMachines | None,
        last_checkpoint: LastCheckpoint,
        persisting: Persisting,
        telling: Telling,
    ) -> None:
        self._program, self._job, self._wakeup, self._fleet = program, job, wakeup, fleet
        self._starter, self._attempts, self._machines = starter, attempts, machines
        self._last_checkpoint, self._persisting, self._telling = last_checkpoint, persisting, telling

    def end(self, sig: signal.Signals) -> None:
        """End everything: ``sig`` to the workers, SIGKILL after the grace or at a second signal."""
        fleet, wakeup = self._fleet, self._wakeup
        if self._machines is not None:
            self._machines.send_no_more()
        try:
            fleet.cancel_starts()
            fleet.started()
            fleet.reap()
            fleet.signal_all(sig)
            before = len(wakeup.received)
            begun = time.monotonic()
            deadline, cut = begun + self._last_checkpoint.left_s, begun + self._last_checkpoint.writer_s
            while fleet.live and len(wakeup.received) <= before and time.monotonic() < deadline:
                wakeup.wait(deadline - time.monotonic())
                fleet.started()
                fleet.reap()
            self._finish_checkpoint(cut, before)
        finally:
            fleet.close()
            if self._machines is not None:
                self._machines.part()
            self._attempts.close()
            self._starter.close()
            self._job.remove()
            wakeup.close()

    def _finish_checkpoint(self, deadline: float, signals: int) -> None:
        """The last one is written to its end if the job has succeeded, else for the rest of the grace."""
        attempts, received = self._attempts, self._wakeup.received
        # A worker may have left its only snapshot just before it ended.
        self._persisting.look(min(attempts.places.ranks, default=0), self._telling.run_id)
        whole = attempts.released and not received
        whole = self._persisting.finish(None if whole else deadline, self._wakeup.wait, lambda: len(received) > signals)
        if received or not whole:
            self._last_checkpoint.say(self._starter.config, self._program.command, attempts.reached)

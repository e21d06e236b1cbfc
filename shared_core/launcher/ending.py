"""The end of an agent, however it comes."""

from __future__ import annotations

import signal
import time

from shared_core.launcher.attempts import Attempts
from shared_core.launcher.job_reporter import JobReporter
from shared_core.launcher.last_checkpoint import LastCheckpoint
from shared_core.launcher.options import Program
from shared_core.launcher.other_machines import OtherMachines
from shared_core.launcher.persisting import Persisting
from shared_core.launcher.wakeup import Wakeup
from shared_core.system.jobdir import JobDir


class JobEnding:
    """Ends the workers, lets the last checkpoint be written, and removes what the job has made on this machine."""

    def __init__(
        self,
        program: Program,
        job: JobDir,
        wakeup: Wakeup,
        attempts: Attempts,
        machines: OtherMachines | None,
        last_checkpoint: LastCheckpoint,
        persisting: Persisting,
        job_reporter: JobReporter,
    ) -> None:
        self._program, self._job, self._wakeup = program, job, wakeup
        self._attempts, self._machines = attempts, machines
        self._last_checkpoint, self._persisting, self._job_reporter = last_checkpoint, persisting, job_reporter

    def end(self, sig: signal.Signals) -> None:
        """Send ``sig`` to the workers, SIGKILL after the grace time or at a second signal, and clean up."""
        worker_pool, wakeup = self._attempts.workers.pool, self._wakeup
        if self._machines is not None:
            self._machines.send_no_more()
        try:
            worker_pool.cancel_starts()
            worker_pool.started()
            worker_pool.reap()
            worker_pool.signal_all(sig)
            before = len(wakeup.received)
            begun = time.monotonic()
            deadline, cut = begun + self._last_checkpoint.left_s, begun + self._last_checkpoint.writer_s
            while worker_pool.live and len(wakeup.received) <= before and time.monotonic() < deadline:
                wakeup.wait(deadline - time.monotonic())
                worker_pool.started()
                worker_pool.reap()
            self._finish_checkpoint(cut, before)
        finally:
            worker_pool.close()
            if self._machines is not None:
                self._machines.part()
            self._attempts.close()
            self._attempts.workers.starter.close()
            self._job.remove()
            wakeup.close()

    def _finish_checkpoint(self, deadline: float, signals: int) -> None:
        """Write the last checkpoint to its end if the job has succeeded, else until ``deadline`` (of
        :func:`time.monotonic`). ``signals``: how many there were; a further one ends the wait.
        """
        attempts, received = self._attempts, self._wakeup.received
        # A worker may have left its only snapshot just before it ended.
        self._persisting.look(min(attempts.places.ranks, default=0), self._job_reporter.run_id)
        whole = attempts.released and not received
        whole = self._persisting.finish(None if whole else deadline, self._wakeup.wait, lambda: len(received) > signals)
        if received or not whole:
            self._last_checkpoint.say(attempts.workers.starter.config, self._program.command, attempts.reached)

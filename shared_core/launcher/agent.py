"""The agent of one machine: it starts the workers, notices within milliseconds when one fails, and replaces that one.

It gives torchelastic's result and events; the loop is its own. It waits on
descriptors (pidfds, standbys, signals, messages of workers) and never sleeps; a tick of ``monitor_interval`` finds
workers that are stopped or make no progress. The store is hosted here, so any worker may die, rank 0 too.
"""

from __future__ import annotations

import errno
import math
import os
import signal
import time
import uuid
from collections.abc import Callable, Collection

from torch.distributed.elastic.agent.server.api import RunResult
from torch.distributed.elastic.multiprocessing import SignalException

from shared_core.errors import OutOfResources
from shared_core.events import console
from shared_core.launcher.attempt import LOOPBACK
from shared_core.launcher.attempts import Attempts, MachineWorkers
from shared_core.launcher.control_channel import ControlChannel
from shared_core.launcher.elastic import Records
from shared_core.launcher.failures import WorkerFailures
from shared_core.launcher.job_reporter import JobReporter
from shared_core.launcher.lease import Fenced
from shared_core.launcher.leaving import Notice, PlannedLeaves, Stragglers
from shared_core.launcher.logs import WorkerLogs
from shared_core.launcher.machine import MachineMembership
from shared_core.launcher.other_machines import OtherMachines, Resizes
from shared_core.launcher.persisting import LastCheckpoint, Persisting
from shared_core.launcher.rendezvous import JobOver, Rendezvous
from shared_core.launcher.spares import Spares
from shared_core.launcher.standby import Preload, Standby, clean_env
from shared_core.launcher.starting import AgentOptions, Program, Starter
from shared_core.launcher.wakeup import Wakeup
from shared_core.launcher.workers import WorkerPool
from shared_core.protocol import progress_file
from shared_core.protocol.agent_phase import AgentEvent, AgentPhase
from shared_core.protocol.failure_policy import FailureBook
from shared_core.protocol.resizing import Resizing
from shared_core.resources import free_bytes
from shared_core.system import process
from shared_core.system.jobdir import MEMORY, JobDir
from shared_core.system.secret import derive
from shared_core.transport.store import StoreError
from shared_core.waiting import Wait, ranks_text

#: Least free memory for publications, in bytes for each worker.
_LEAST_ROOM_BYTES = 256 << 10
#: A worker is killed after so many looks in a row that find it in state T.
STOPPED_LOOKS = 2
#: Bounds of a tick, in seconds: a stopped worker is noticed within one.
TICK_S = (0.05, 0.4)


class Agent:
    """Runs the workers of one machine. Call on the main thread: it takes over the signals.

    Args:
        rendezvous: with the other machines; None without any.
        make_logs: called with the ranks of this machine; makes the log files.
        early: a zygote that was started before torch was imported here.

    Attributes:
        folders: folders that the job makes on this machine, and removes at its end.

    Raises:
        OutOfResources: if there is no room for what the workers publish.
    """

    def __init__(
        self,
        program: Program,
        options: AgentOptions,
        rendezvous: Rendezvous | None,
        make_logs: Callable[[list[int]], WorkerLogs],
        early: Standby | None = None,
    ) -> None:
        self._program, self._options, self._rendezvous = program, options, rendezvous
        config, nproc = options.config, options.nproc
        self._tick_s = min(max(options.monitor_interval, TICK_S[0]), TICK_S[1])
        self._last_tick = 0.0
        process.become_subreaper()
        job = self._job = JobDir(config.log.dir)
        if (free := free_bytes(job.path)) < _LEAST_ROOM_BYTES * nproc:
            job.remove()
            raise OutOfResources(
                errno.ENOSPC,
                f"{job.path.parent} has room for {free >> 10} KiB only, and {MEMORY} has no more: {nproc} workers "
                f"publish at least {_LEAST_ROOM_BYTES * nproc >> 10} KiB. Make room in one of them, or set TMPDIR",
            )
        self.job_dir, self.folders = job.path, job.folders
        if job.note:
            console(job.note)
        backend = rendezvous.backend if rendezvous is not None else "static"
        self.records = Records(program, options, backend, lambda: self._attempts.places)
        wakeup = self._wakeup = Wakeup()
        book = FailureBook(options.max_restarts, options.loop_limit)
        job_reporter = self._job_reporter = JobReporter(program, options, job.path, book, uuid.uuid4().hex[:12])
        worker_pool = self._worker_pool = WorkerPool(
            wakeup.selector,
            options.standbys,
            clean_env(os.environ),
            Preload(program.preload, program.target),
            console,
            early,
            wait_timeout_s=config.detection.wait_timeout_s,
        )
        starter = self._starter = Starter(program, options, job.path, worker_pool, make_logs)
        membership: MachineMembership | None = None
        if rendezvous is not None:
            membership = MachineMembership(
                rendezvous,
                job.path,
                pause=self._pause,
                wake=wakeup.tell,
                stop_workers=self._stop_at_once,
                number=lambda: self._attempts.number,
                key=derive(options.secret, options.run_id),
            )
        spares = Spares(config, worker_pool, starter, job_reporter, job.path)
        attempts = self._attempts = Attempts(
            nproc,
            (options.local_addr or LOOPBACK, options.store_port),
            job,
            MachineWorkers(worker_pool, starter, spares, wakeup, self._tick_s),
            job_reporter,
            Resizing(config, nproc, least=options.machines[0], most=options.machines[1]),
            membership,
        )
        self._last_checkpoint = LastCheckpoint(
            config.checkpoint.dir is not None,
            options.grace_s,
            config.detection.wait_timeout_s,
            job.path,
            attempts.set_key,
        )
        alone = membership is None
        self._resizes = Resizes(config, nproc, alone, attempts)
        self._machines: OtherMachines | None = None
        if membership is not None:
            self._machines = OtherMachines(membership, nproc, attempts, self._resizes)
        self._failures = WorkerFailures(config, alone, attempts)
        notice = self._notice = Notice(config.notice, wakeup)
        leaves = self._leaves = PlannedLeaves(config, attempts, self._machines, notice)
        self._control_channel = ControlChannel(
            attempts, self._resizes, self._machines, self._last_checkpoint, leaves.hear
        )
        self._stragglers = Stragglers(config, attempts, leaves)
        self._shutdown_barrier = ShutdownBarrier(console)
        self._persisting = Persisting(job.path, options.events, options.grace_s, console)

    @property
    def logs_used(self) -> bool:
        return self._starter.logs_used

    def run(self) -> RunResult:
        """Run the job to its end on this machine.

        Raises:
            SignalException: the agent was told to end.
            JobOver: the job failed without this machine.
        """
        ends_with = signal.SIGTERM
        self._wakeup.handle(self._last_checkpoint.signals(self._options.signals))
        try:
            if self._program.mode != "exec":
                self._worker_pool.fill_standbys()  # they import during the rendezvous
            result = self._run()
            self.records.result(result, self._attempts.workers.pids)
            return result
        except BaseException as error:
            if isinstance(error, SignalException):
                ends_with = error.sigval
            self._job_reporter.ends(type(error).__name__)
            raise
        finally:
            try:
                self._end(ends_with)
            finally:
                self._notice.close()
                self._attempts.control.close()

    # -- the loop -----------------------------------------------------------------------------------------------------

    def _run(self) -> RunResult:
        attempts = self._attempts
        while True:
            try:
                attempts.step(AgentEvent.CAME)
                self._meet()
                return self._loop()
            except (Fenced, StoreError) as error:
                if self._machines is None:
                    raise
                self._machines.stand_down(error, self._leaves.machine)
                if self._leaves.machine:
                    return self._over()
            except JobOver as over:
                if over.failed:
                    raise
                console(str(over))
                return self._over()

    def _over(self) -> RunResult:
        """The job has ended without this machine, or continues so."""
        self._attempts.succeed(AgentEvent.ENDED_ELSEWHERE)
        assert self._attempts.result is not None
        return self._attempts.result

    def _meet(self) -> None:
        with self.records.duration("RENDEZVOUS"):
            place = self._rendezvous.meet() if self._rendezvous is not None else (0, 1)
        self._attempts.place(*place)

    def _loop(self) -> RunResult:
        attempts, worker_pool, wakeup = self._attempts, self._worker_pool, self._wakeup
        while attempts.result is None:
            wakeup.wait(self._timeout())
            self._check_signals()
            if self._machines is not None:
                self._machines.check()
            for replacement in worker_pool.started():
                attempts.announce(replacement)
            dead = worker_pool.reap()
            if dead and not self._leaves.takes(dead):
                self._failures.handle_worker_exits(dead)
            if attempts.result is None:
                self._look()
        return attempts.result

    def _look(self) -> None:
        attempts = self._attempts
        if (self._tick() or self._wakeup.told) and attempts.result is None:
            self._wakeup.take()
            self._control_channel.listen()
            self._leaves.look()
        if attempts.result is not None:
            return
        attempts.start_due()
        self._resizes.grow_if_due()
        if attempts.phase is AgentPhase.ENDING and not self._worker_pool.live and not self._worker_pool.starting:
            self._job_reporter.succeeds(attempts.places)
            attempts.succeed(AgentEvent.LEFT)

    def _check_signals(self) -> None:
        if not self._wakeup.received:
            return
        attempts = self._attempts
        trains = attempts.begun and attempts.phase is not AgentPhase.ENDING and not attempts.now.goodbyes()
        if trains and attempts.reached and self._last_checkpoint.waits(self._wakeup.received):
            return
        received = signal.Signals(self._wakeup.received[0])
        console(f"received {received.name}: ending all workers")
        raise SignalException(f"Process {os.getpid()} got signal: {received}", received)

    def _timeout(self) -> float:
        if self._wakeup.told:
            return 0.0
        times = [self._last_tick + self._tick_s, *(when for when, _ in self._attempts.workers.due)]
        if (grow_at := self._attempts.resizing.grow_at) is not None:
            times.append(grow_at)
        return min(times) - time.monotonic()

    def _pause(self, seconds: float) -> None:
        """Wait while this machine has no place; standbys and signals are handled meanwhile."""
        self._wakeup.wait(seconds)
        self._worker_pool.started()
        self._worker_pool.reap()
        self._check_signals()

    def _stop_at_once(self) -> None:
        """Kill the workers; the loop does the rest. Called on a thread of the lease."""
        for pid in list(self._worker_pool.live):
            process.kill_group(pid)

    # -- slow looks ---------------------------------------------------------------------------------------------------

    def _tick(self) -> bool:
        """At most once in ``_tick_s``: look for stopped workers and those without progress. False if too early."""
        now = time.monotonic()
        if now - self._last_tick < self._tick_s:
            return False
        self._last_tick = now
        self._look_at_workers()
        self._worker_pool.look_after_standbys()
        attempts, mine = self._attempts, self._attempts.places.ranks
        if attempts.phase.trains:
            self._shutdown_barrier.look(attempts.now.finished(mine), mine)
        self._resizes.shrink_late()
        self._stragglers.look()
        if self._program.mode != "exec":
            attempts.look_after_spares()
        self._persisting.look(min(mine, default=0), self._job_reporter.run_id)
        self._job_reporter.console_reporter.look()
        return True

    def _look_at_workers(self) -> None:
        limit = self._options.config.detection.progress_timeout_s
        for one in self._worker_pool.live.values():
            if one.cause:
                continue
            if one.look() >= STOPPED_LOOKS:
                one.kill("stopped (SIGSTOP), killed by the agent")
                continue
            if self._attempts.phase is AgentPhase.ENDING:
                continue
            progress = progress_file.read_progress(self._attempts.progress_file(one.rank))
            if progress is not None:
                boundaries, inside, changed = progress
                # an entry older than the worker is the failed worker's
                if boundaries and not inside and changed >= one.started and time.time() - changed > limit:
                    one.kill(f"no progress for {limit:g} s (detection.progress_timeout_s), killed by the agent")

    # -- the end ------------------------------------------------------------------------------------------------------

    def _end(self, sig: signal.Signals) -> None:
        """Send ``sig`` to the workers, SIGKILL after the grace time or at a second signal, let the last checkpoint be
        written, and remove what the job has made on this machine.
        """
        worker_pool, wakeup = self._worker_pool, self._wakeup
        if self._machines is not None:
            self._machines.membership.send_no_more()
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
            self._starter.close()
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
        whole = self._persisting.finish(
            None if whole else deadline, self._wakeup.wait, lambda: len(received) > signals, attempts.absent
        )
        if received or not whole:
            self._last_checkpoint.say(self._starter.config, self._program.command, attempts.reached)


class ShutdownBarrier:
    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._wait: Wait | None = None
        self._left: Collection[int] = ()

    def look(self, finished: Collection[int], ranks: Collection[int]) -> None:
        """Call at each tick: ranks that have said goodbye, and all."""
        self._left = set(ranks) - set(finished)
        if not finished or not self._left:
            self._wait = None
            return
        if self._wait is None:
            # They stay until all have finished: if another rank fails, they hold the newest state.
            who, whom = ranks_text(finished), lambda: f"{ranks_text(self._left)}, which {_still(self._left)}"
            ends = "they leave when all have finished"
            self._wait = Wait(f"{who} (finished)", whom, math.inf, ends=ends, say=self._say)
        self._wait.look()


def _still(ranks: Collection[int]) -> str:
    return "still runs" if len(ranks) == 1 else "still run"

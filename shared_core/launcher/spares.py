"""The hot standbys of one machine: made one at a time while the job trains, and given their ranks' places."""

from __future__ import annotations

import os
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from shared_core.config import SwiftConfig
from shared_core.events import console
from shared_core.launcher.job_reporter import JobReporter
from shared_core.launcher.starting import AttemptStart, Starter
from shared_core.launcher.workers import CANCELLED, LiveWorker, WorkerPool
from shared_core.protocol.generation import CauseKind
from shared_core.protocol.preparing import EXIT_UNFIT, LEAST_STARTUP_S, Measured, Prepared, decide, next_rank, retry_s
from shared_core.protocol.progress_file import path_of, read_progress
from shared_core.system import process
from shared_core.system.process import machine_bytes, private_bytes

#: Pauses before another standby is considered, in seconds: after one that cannot be started now, and after all that
#: were wanted.
_SOON_S, _LATER_S = 1.0, 60.0


class Spares:
    """Prepares standbys and gives them places. ``job_dir``: workers write their progress there."""

    def __init__(
        self, config: SwiftConfig, worker_pool: WorkerPool, starter: Starter, job_reporter: JobReporter, job_dir: Path
    ) -> None:
        self._config, self._worker_pool, self._starter, self._job_reporter = config, worker_pool, starter, job_reporter
        self._job_dir = job_dir
        self._startups: dict[int, float] = {}
        self._trains_since = 0.0
        self._told = False
        self._failed_ranks: Counter[int] = Counter()
        self._ready: dict[int, Prepared] = {}
        self._unfit: set[int] = set()
        self._leaving: set[int] = set()
        self._preparing: LiveWorker | None = None
        self._failures, self._next = 0, 0.0

    def look(self, start: AttemptStart) -> None:
        """Prepare the next standby, if it is time and no rank is being waited for. Call at each tick."""
        self._handle_exits()
        self._drop_useless()
        if self._preparing is not None:
            self._look_at_preparing()
            return
        if (
            time.monotonic() < self._next
            or not self._job_reporter.console_reporter.quiet
            or not self._all_train(start.places.ranks)
        ):
            return
        measured, ranks, chosen = self._measure(), start.places.ranks, self._config.standby.prepared
        start_up_s = measured.startup_s if chosen == "auto" else 0.0
        if not self._leaving and time.time() - self._trains_since < start_up_s:
            self._next = time.monotonic() + _SOON_S
            return
        forked = {rank for rank, said in self._ready.items() if said.forked}
        made, others = self._ready.keys() - forked, set(ranks) - forked
        decision = decide(self._config, sorted(others), measured, len(made), forked=len(forked))
        if not self._told:
            self._told = True
            fields = asdict(measured)
            self._job_reporter.emit("preparing", number=decision.number, reason=decision.text, **fields)
            if chosen not in ("auto", 0) or (chosen == "auto" and measured.startup_s >= LEAST_STARTUP_S):
                console(decision.text)
        self._leaving -= self._unfit if measured.fits else others
        rank = min(self._leaving & others, default=None)
        if rank is None:
            rank = next_rank(decision.number, others - self._unfit, self._failed_ranks, made)
        if rank is None or not self._worker_pool.can_start:
            self._next = time.monotonic() + (_LATER_S if rank is None else _SOON_S)
            return
        self._preparing = self._starter.prepare(start.places.local_rank(rank), start)

    def want(self, rank: int) -> None:
        """The rank's worker is to leave: prepare a standby for it before any other, where that may be."""
        chosen = self._config.standby.prepared
        # What a second rank 0 does before its loop, the first one sees: that is done only where it is asked for.
        may = rank != 0 if chosen == "auto" else chosen != 0
        if may and self._config.replaces and rank not in self._ready and self._worker_pool.keeps_standbys:
            self._leaving.add(rank)
            self._next = 0.0

    def settled(self, rank: int) -> bool:
        """Whether the standby that was wanted is there, or will not be."""
        return rank not in self._leaving

    def ready(self, said: Prepared) -> None:
        """A standby has reached its first step boundary, and waits for its rank's place."""
        if said.forked:
            self._adopt(said)
            return
        spare = self._preparing
        if spare is None or spare.pid != said.pid:
            return
        self._preparing = None
        self._wait_with(said, spare)

    def _adopt(self, said: Prepared) -> None:
        """A worker has made a copy of itself. If the worker has failed meanwhile, another replacement is under way."""
        of = next((one for one in self._worker_pool.live.values() if one.rank == said.rank), None)
        if said.pid not in process.children():
            return  # it has ended
        if of is None or of.incarnation + 1 != said.incarnation or said.pid in self._worker_pool.live:
            process.kill_group(said.pid)
            return
        spare = LiveWorker(of.local_rank, of.rank, said.incarnation, of.request, said.pid, how="forked", spare=True)
        for other in self._of(of.rank):
            self._drop(other)  # one that runs the script
        self._worker_pool.arrive(spare)
        self._wait_with(said, spare)
        if of.leaves:  # this copy was made where it leaves
            of.kill(f"drained: {of.leaves}", CauseKind.PLANNED)

    def _wait_with(self, said: Prepared, spare: LiveWorker) -> None:
        self._ready[said.rank] = said
        self._leaving.discard(said.rank)
        took_s, held = time.time() - spare.born, private_bytes(spare.pid)
        self._job_reporter.emit(
            "prepared", rank=said.rank, pid=spare.pid, took_s=took_s, bytes=held, forked=said.forked
        )

    def start(self, local_rank: int, start: AttemptStart) -> bool:
        """Start a worker: a hot standby if there is one, else a process is asked for. True if its process exists."""
        rank = start.places.ranks[local_rank]
        if start.attempt.incarnations[rank] and self._take(rank, start):
            return True
        self._starter.start(local_rank, start)
        return False

    def _take(self, rank: int, start: AttemptStart) -> bool:
        self._failed_ranks[rank] += 1
        self._leaving.discard(rank)
        self._handle_exits()
        incarnation = start.attempt.incarnations[rank]
        said = self._ready.pop(rank, None)
        for spare in [one for one in self._of(rank) if not one.cause]:
            if said is None or spare.incarnation != incarnation or _useless(said):
                self._drop(spare)
                continue
            start.attempt.give_place(rank, incarnation)
            self._worker_pool.promote(spare)
            self._failures, self._next = 0, 0.0
            return True
        return False

    def clear(self) -> None:
        for spare in list(self._worker_pool.spares.values()):
            self._drop(spare)
        self._preparing = None
        self._ready.clear()
        self._unfit.clear()
        self._leaving.clear()
        self._startups.clear()
        self._trains_since, self._failures, self._next = 0.0, 0, 0.0

    # -- what there is ------------------------------------------------------------------------------------------------

    def _of(self, rank: int) -> list[LiveWorker]:
        here = list(self._worker_pool.spares.values())
        if self._preparing is not None and self._preparing not in here:  # it is being forked
            here.append(self._preparing)
        return [one for one in here if one.rank == rank]

    def _all_train(self, ranks: list[int]) -> bool:
        """Whether all workers here have come to a batch; notes how long that took them."""
        live = self._worker_pool.live.values()
        for one in live:
            progress = read_progress(path_of(self._job_dir, one.rank))
            if progress is None or not progress[0] or progress[2] < one.started:
                return False
            if one.pid not in self._startups and one.how not in ("prepared", "forked"):
                self._startups[one.pid] = progress[2] - one.born
        self._trains_since = self._trains_since or time.time()
        return {one.rank for one in live} == set(ranks)

    def _measure(self) -> Measured:
        largest = max(private_bytes(pid) for pid in self._worker_pool.live)
        return Measured(max(self._startups.values(), default=0.0), largest, *machine_bytes())

    # -- ends ---------------------------------------------------------------------------------------------------------

    def _drop(self, spare: LiveWorker) -> None:
        spare.cause = CANCELLED
        if spare.pid:
            spare.kill(CANCELLED)
        if spare is self._preparing:
            self._preparing = None

    def _drop_useless(self) -> None:
        """The entry call that a standby is in has ended: its rank gets another one."""
        for rank in [rank for rank, said in self._ready.items() if _useless(said)]:
            del self._ready[rank]
            self._next = 0.0
            for spare in self._of(rank):
                self._drop(spare)

    def _look_at_preparing(self) -> None:
        spare, limit_s = self._preparing, self._config.detection.wait_timeout_s
        if spare is not None and spare.born and time.time() - spare.born > limit_s and not spare.cause:
            spare.kill(f"did not come to its first batch in {limit_s:g} s (detection.wait_timeout_s)")

    def _handle_exits(self) -> None:
        for spare, code in self._worker_pool.fallen():
            if spare is self._preparing:
                self._preparing = None
            if spare.cause == CANCELLED:
                continue
            self._leaving.discard(spare.rank)  # who leaves does not wait for another one
            if code == EXIT_UNFIT:
                self._unfit.add(spare.rank)
                console(f"no standby is prepared for rank {spare.rank}: its stage has no replica to begin from")
                continue
            self._ready.pop(spare.rank, None)
            if spare.how == "forked":
                line = f"the hot standby of rank {spare.rank} (pid {spare.pid}) failed; it is not forked again"
                self._job_reporter.warn(line)
                console(line)
                self._next = 0.0
                continue
            self._failures += 1
            error = spare.raised(code)
            cause = error.summary[:200] if error is not None else spare.cause or process.describe_exit(code)
            wait_s = retry_s(self._failures)
            self._next = time.monotonic() + (wait_s if wait_s is not None else float("inf"))
            then = "no further one is prepared" if wait_s is None else f"another is prepared in {wait_s:g} s"
            line = f"the hot standby of rank {spare.rank} (pid {spare.pid}) failed ({cause}); {then}"
            self._job_reporter.warn(line)
            console(line)


def _useless(said: Prepared) -> bool:
    return bool(said.until) and os.path.lexists(said.until)

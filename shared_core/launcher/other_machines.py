"""What an agent does about the other machines while its job runs, and when the number of workers changes."""

from __future__ import annotations

import time

from shared_core.config import SwiftConfig
from shared_core.events import console
from shared_core.launcher.attempts import Attempts
from shared_core.launcher.console import ranks
from shared_core.launcher.machine import MachineMembership
from shared_core.protocol import progress_file
from shared_core.protocol.agent_phase import AgentEvent, AgentPhase
from shared_core.protocol.generation import Entry, EntryKind
from shared_core.protocol.worker_env import Resized


class Resizes:
    """Begins changes, ends them, and gives them up. ``nproc``: workers of this machine, at most."""

    def __init__(self, config: SwiftConfig, nproc: int, alone: bool, attempts: Attempts) -> None:
        self._config, self._nproc, self._alone, self._attempts = config, nproc, alone, attempts
        self._job_reporter, self._resizing = attempts.job_reporter, attempts.resizing

    def grow_if_due(self) -> None:
        resizing, attempts, now = self._resizing, self._attempts, time.monotonic()
        if not attempts.phase.trains or not resizing.grows(now):
            return
        here = attempts.places.ranks
        if attempts.phase is AgentPhase.RESIZING or not attempts.workers.complete or attempts.now.goodbyes():
            resizing.schedule(now, len(here))  # try again later
            return
        self._begin(here, resizing.full)

    def shrink_late(self) -> None:
        """Continue without ranks whose replacements have not joined in time. Only on a single machine."""
        attempts, resizing = self._attempts, self._resizing
        if not self._alone:
            return
        resizing.joined([rank for rank in resizing.due if self._has_joined(rank)])
        late = resizing.late(time.monotonic())
        stay = sorted(set(attempts.places.ranks) - set(late) - attempts.workers.failed)
        if not late or not stay or attempts.phase is not AgentPhase.RUNNING:
            return
        limit_s = self._config.resize.replace_timeout_s
        why = f"nobody has taken the place of {ranks(late)} within {limit_s:g} s (resize.replace_timeout_s)"
        console(f"{why}: the others continue without {'it' if len(late) == 1 else 'them'}")
        if self._begin(stay, len(stay)):
            attempts.workers.lose(late)
            attempts.workers.kill_ranks(late, why)

    def _begin(self, stay: list[int], target: int) -> bool:
        """Have these ranks give their state to the next attempt; False if the attempt is over."""
        entry = self._attempts.now.next_generation((), time.time(), stay)
        if entry is None:
            return False
        self._job_reporter.generation(entry)
        self._resizing.begin(stay, target)
        self._attempts.step(AgentEvent.CHANGE)
        return True

    def _has_joined(self, rank: int) -> bool:
        progress = progress_file.read_progress(self._attempts.progress_file(rank))
        live = self._attempts.workers.pool.live.values()
        started = max((one.started for one in live if one.rank == rank), default=None)
        return started is not None and progress is not None and bool(progress[0]) and progress[2] >= started

    def handed_on(self, generation: int, boundary: int) -> None:
        """The ranks have written their state: end this attempt and continue with another number of workers."""
        resizing, attempts, attempt = self._resizing, self._attempts, self._attempts.now
        if attempts.phase is not AgentPhase.RESIZING or generation != attempt.generation:
            return
        before = attempts.places.world_size
        line = Resized(attempt.number, before, resizing.stay, boundary) if boundary else resizing.line
        machines = () if self._alone else resizing.after
        entry = Entry(kind=EntryKind.RESIZE, workers=resizing.target, line=line, machines=machines)
        written = attempt.append(lambda: entry if attempt.generation == generation else None)
        if written is not None:  # else another agent was first, or has seen another failure
            self._job_reporter.emit(
                "resize", workers=resizing.target, before=before, boundary=boundary, stay=list(resizing.stay)
            )
            attempts.resize(written)

    def declined(self, generation: int, reason: str) -> None:
        """The number of workers cannot change here: failed ones are replaced after all."""
        attempts = self._attempts
        if attempts.phase is not AgentPhase.RESIZING or generation != attempts.now.generation:
            return
        console(f"the number of workers cannot change now ({reason}): failed workers are replaced instead")
        self._job_reporter.warn(f"the number of workers cannot change: {reason}")
        self._resizing.decline(time.monotonic(), len(attempts.places.ranks))
        if (entry := attempts.now.next_generation((), time.time(), ends=True)) is not None:
            self._job_reporter.generation(entry)
            self.note(entry)

    def note(self, entry: Entry) -> None:
        """A generation was written that may begin or end a change."""
        self._resizing.follow(entry, self._nproc)
        self._attempts.step(AgentEvent.CHANGE if self._resizing.stay else AgentEvent.NO_CHANGE)


class OtherMachines:
    """Watches leases. ``nproc``: workers of each machine."""

    def __init__(self, membership: MachineMembership, nproc: int, attempts: Attempts, resizes: Resizes) -> None:
        self.membership, self._nproc, self._attempts, self._resizes = membership, nproc, attempts, resizes
        self._job_reporter = attempts.job_reporter

    def check(self) -> None:
        """Raises Fenced if this machine's workers may not continue."""
        if self._attempts.phase.trains:
            self.membership.check(self._attempts.now.ledger)

    def look(self, leaves: str = "") -> None:
        """Give the places of failed machines away, or continue with another number of machines. ``leaves``: why all
        workers of this machine have left; its place is given away too.
        """
        attempts = self._attempts
        entry = self.membership.replace_machines(attempts.now, self._nproc, attempts.resizing, leaves=leaves)
        if entry is None:
            return
        self._resizes.note(entry)
        self._job_reporter.failed_elsewhere(entry)
        if entry.kind is EntryKind.RESTART:
            self._job_reporter.emit("restart", reason=entry.reason, attempt=attempts.number + 1)
            attempts.restart(entry)
        else:
            self._job_reporter.generation(entry)

    def stand_down(self, error: Exception, leaves: str) -> None:
        """This machine may not continue: its workers end, and it is as if it had just been started. ``leaves``: why it
        has given its place away itself; empty if it has not.
        """
        if leaves:
            console(f"this machine has left the job: {leaves}")
        else:
            reason = self.membership.why(error)
            console(f"the workers of this machine are stopped: {reason}")
            self._job_reporter.warn(f"workers stopped: {reason}")
        self._attempts.step(AgentEvent.FENCED)

    def part(self) -> None:
        """Leave, and tell the others. If the job cannot outlive this machine, it fails for them."""
        attempts = self._attempts
        over = attempts.begun and attempts.now.ledger.over is not None
        if attempts.begun and not over and self.membership.rendezvous.store_dies_here:
            attempts.write_failure(attempts.places.ranks[0], "the machine that hosts the store was told to end")
            over = True
        self.membership.rendezvous.leave(over=over)
        self.membership.close()

"""The attempts at a job, one after the other: the phase of the agent, and what is done when it changes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.elastic.agent.server.api import RunResult, WorkerState

from shared_core.launcher.attempt import Attempt, WorkerPlaces
from shared_core.launcher.console import ranks
from shared_core.launcher.control_socket import ControlSocket
from shared_core.launcher.elastic import failure_of
from shared_core.launcher.job_reporter import JobReporter
from shared_core.launcher.machine import MachineMembership
from shared_core.launcher.spares import Spares
from shared_core.launcher.starting import AttemptStart, Starter
from shared_core.launcher.wakeup import Wakeup
from shared_core.launcher.workers import CANCELLED, LiveWorker, WorkerPool
from shared_core.protocol import progress_file
from shared_core.protocol.agent_phase import AgentAction, AgentEvent, AgentPhase, transition
from shared_core.protocol.generation import Entry, EntryKind
from shared_core.protocol.resizing import Resizing
from shared_core.protocol.worker_env import Resized
from shared_core.system.jobdir import JobDir
from shared_core.waiting import Wait, ranks_text


class MachineWorkers:
    """The workers that hold the ranks of one machine in one attempt: starts and kills them.

    Attributes:
        failed: ranks that no worker holds now.
        missing: ranks whose first worker does not run yet.
        pids: pid of the newest worker, by local rank.
        due: (``time.monotonic()``, local rank) of the replacements that are to be started.

    ``tick_s``: how often they are looked at while they are being killed.
    """

    def __init__(self, pool: WorkerPool, starter: Starter, spares: Spares, wakeup: Wakeup, tick_s: float) -> None:
        self.pool, self.starter, self.spares, self.wakeup, self._tick_s = pool, starter, spares, wakeup, tick_s
        self.failed: set[int] = set()
        self.missing: set[int] = set()
        self.pids: dict[int, int] = {}
        self.due: list[tuple[float, int]] = []

    def begin(self, ranks: Iterable[int]) -> None:
        self.failed, self.missing = set(), set(ranks)
        self.due.clear()

    def lose(self, failed: Iterable[int]) -> None:
        self.failed.update(failed)

    def arrived(self, one: LiveWorker) -> None:
        self.missing.discard(one.rank)
        self.failed.discard(one.rank)
        self.pids[one.local_rank] = one.pid

    @property
    def complete(self) -> bool:
        return not self.failed and not self.missing

    def replace_in(self, delay_s: float, local_rank: int) -> None:
        self.due.append((time.monotonic() + delay_s, local_rank))

    def replace_all(self, places: Mapping[int, int]) -> None:
        """Start replacements of all failed ranks now, unless due already. ``places``: local rank of each rank."""
        waiting = {place for _, place in self.due}
        for rank in sorted(self.failed & places.keys()):
            if places[rank] not in waiting:
                self.replace_in(0.0, places[rank])

    def start(self, local_rank: int, start: AttemptStart) -> None:
        if self.spares.start(local_rank, start):
            self.wakeup.tell()  # its process is there

    def start_due(self, start: AttemptStart) -> None:
        now = time.monotonic()
        taken = [entry for entry in self.due if entry[0] <= now]
        self.due = [entry for entry in self.due if entry not in taken]
        for _, local_rank in taken:
            self.start(local_rank, start)

    def kill_ranks(self, killed: Collection[int], cause: str) -> None:
        for one in list(self.pool.live.values()):
            if one.rank in killed:
                one.kill(cause)

    def let_go(self, absent: Collection[int]) -> None:
        """These ranks are not needed any more, nor are replacements on their way."""
        self.due.clear()
        self.pool.cancel_starts()
        self.kill_ranks(absent, CANCELLED)

    def kill_all(self) -> None:
        """SIGKILL to every worker, also those being forked; returns when all are reaped."""
        pool = self.pool
        self.due.clear()
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
            self.wakeup.wait(self._tick_s)
            pool.reap()
            pool.look_after_standbys()


@dataclass(frozen=True)
class Happened:
    """What actions need to know of the event. ``reached``: step boundaries that workers here have passed."""

    entry: Entry = Entry()
    delay_s: float = 0.0
    reached: int = 0


class Attempts:
    """Begins and ends attempts on this machine. Its methods are for the agent's loop.

    Args:
        nproc: workers of this machine, at most.
        store_place: address and port of the first attempt's store for the script's process groups; 0 for a free port.
        membership: the other machines, if there are any.

    Attributes:
        number: of the attempt, from 0.
        absent: ranks without which the job ends.
        control: where workers of this machine reach it; to be closed by who made this object.
    """

    def __init__(
        self,
        nproc: int,
        store_place: tuple[str, int],
        job: JobDir,
        workers: MachineWorkers,
        job_reporter: JobReporter,
        resizing: Resizing,
        membership: MachineMembership | None,
    ) -> None:
        self._nproc, self._store_place = nproc, store_place
        self._job, self.workers, self.wakeup = job, workers, workers.wakeup
        self.job_reporter, self.book, self.resizing = job_reporter, job_reporter.book, resizing
        self.control = ControlSocket(job.path, self.wakeup.tell)
        self._membership = membership
        self.phase = AgentPhase.RENDEZVOUS
        self.places = WorkerPlaces()
        self.number, self.absent = 0, frozenset[int]()
        self.result: RunResult | None = None
        self._attempt: Attempt | None = None
        self._actions: dict[AgentAction, Callable[[Happened], None]] = {
            AgentAction.START: self._start_all,
            AgentAction.REPLACE: self._replace,
            AgentAction.TELL: self._tell,
            AgentAction.KILL: lambda _: workers.kill_all(),
            AgentAction.CLEAR: self._clear,
            AgentAction.DELAY: self._delay,
            AgentAction.REGROUP: self._regroup,
            AgentAction.FORGET: self._forget,
            AgentAction.LET_GO: self._let_go,
        }

    # -- what there is ------------------------------------------------------------------------------------------------

    @property
    def begun(self) -> bool:
        return self._attempt is not None

    @property
    def now(self) -> Attempt:
        assert self._attempt is not None
        return self._attempt

    @property
    def reached(self) -> int:
        """Step boundaries that workers of this machine have passed in this attempt."""
        found = (progress_file.read_progress(self.progress_file(rank)) for rank in self.places.ranks)
        return max((progress[0] for progress in found if progress is not None), default=0)

    @property
    def released(self) -> bool:
        """Whether all workers have said goodbye."""
        return self.phase is AgentPhase.ENDING or bool(self.result is not None and self.result.return_values)

    def progress_file(self, rank: int) -> Path:
        return progress_file.path_of(self._job.path, rank)

    def set_key(self, name: str) -> None:
        """Set a key that workers look at; does nothing before there is an attempt."""
        if self._attempt is not None:
            self._attempt.set(name)

    # -- events -------------------------------------------------------------------------------------------------------

    def step(self, event: AgentEvent, happened: Happened | None = None) -> None:
        self.phase, actions = transition(self.phase, event)
        for action in actions:
            self._actions[action](happened or Happened())

    def place(self, machine: int, machines: int) -> None:
        self.places = WorkerPlaces(machine, machines, self._nproc)
        self.step(AgentEvent.PLACED)

    def restart_all(self, reason: str, delay_s: float, *, line: Resized | None) -> None:
        """End this attempt for all agents, unless another agent did, and begin the next."""
        entry = self.now.append(lambda: Entry(kind=EntryKind.RESTART, reason=reason, line=line))
        if entry is None:
            self.wakeup.tell()
        else:
            self.job_reporter.emit("restart", reason=reason, attempt=self.number + 1)
            self.restart(entry, delay_s)

    def restart(self, entry: Entry, delay_s: float = 0.0) -> None:
        """The ledger says that all workers start again, as generation 0 of the next attempt."""
        self.step(AgentEvent.RESTART, Happened(entry, delay_s, self.reached))
        self.number += 1
        self.step(AgentEvent.PLACED)

    def resize(self, entry: Entry) -> None:
        self.step(AgentEvent.RESIZED, Happened(entry, reached=self.reached))
        self.step(AgentEvent.PLACED)

    def fail(self, rank: int, pid: int, code: int, error_file: str, message: str) -> None:
        self.write_failure(rank, message)
        failure = failure_of(self.places.local_rank(rank), pid, code, error_file, message)
        self.result = RunResult(WorkerState.FAILED, failures={rank: failure})
        self.step(AgentEvent.FAILED)

    def write_failure(self, rank: int, message: str) -> None:
        """Tell other agents, and the workers, that the job has failed."""
        self.now.append(lambda: Entry(kind=EntryKind.FAIL, rank=rank, reason=message or f"rank {rank} failed"))
        self.now.stop()

    def succeed(self, event: AgentEvent) -> None:
        if event is AgentEvent.ENDED_ELSEWHERE:
            self.places = WorkerPlaces()  # so that none of its workers is recorded
        self.result = RunResult(WorkerState.SUCCEEDED, return_values=dict.fromkeys(self.places.ranks))
        self.step(event)

    # -- workers ------------------------------------------------------------------------------------------------------

    def announce(self, one: LiveWorker) -> None:
        self.workers.arrived(one)
        self.job_reporter.console_reporter.replacement(one.rank, one.pid)
        if one.incarnation:
            self.job_reporter.replacement(one)
        elif not self.workers.missing:
            self.tell_start()
        if self.phase is AgentPhase.ENDING and one.cause == CANCELLED:
            one.kill(CANCELLED)

    def tell_start(self) -> None:
        """Once an attempt: when all first workers run, or before the first failure."""
        self.job_reporter.start(self.workers.pool.live.values(), self.workers.starter.config)

    def start_due(self) -> None:
        if self.workers.due:
            self.workers.start_due(self._in_what())

    def close(self) -> None:
        if self._attempt is not None:
            self._attempt.close()

    def look_after_spares(self) -> None:
        """Prepare hot standbys while no rank is without a worker."""
        if self.phase is AgentPhase.RUNNING and self.workers.complete:
            self.workers.spares.look(self._in_what())

    def _in_what(self) -> AttemptStart:
        address = self._membership.rendezvous.address if self._membership is not None else ""
        store = self._membership.rendezvous.keeper if self._membership is not None else str(self.control.path)
        return AttemptStart(self.places, self.now, store, address, self.resizing.line, self.job_reporter.run_id)

    # -- actions ------------------------------------------------------------------------------------------------------

    def _start_all(self, _: Happened) -> None:
        membership, mine = self._membership, self.places.ranks
        self.workers.starter.open_logs(mine)
        self._attempt = attempt = self._alone() if membership is None else self._in_team(membership)
        self.job_reporter.begins(attempt, self.places)
        self.workers.begin(mine)
        if membership is not None:
            membership.fetch(attempt.ledger, mine, self.number)
            for rank in mine:
                if attempt.incarnations[rank]:
                    when = attempt.ledger.detected or time.time()
                    self.job_reporter.console_reporter.failed(rank, "its machine failed", when)
        for local_rank in range(len(mine)):
            self.workers.start(local_rank, self._in_what())

    def _alone(self) -> Attempt:
        """The attempt that begins on this machine, the only one; the one before is closed."""
        self.close()
        store, places = self.control.new_store(), self.places
        host, port = self._store_place
        place = host, 0 if self.number else port
        return Attempt(self.number, place, lambda: store, places.ranks, places.world_size, self.wakeup.tell)

    def _in_team(self, membership: MachineMembership) -> Attempt:
        """As :meth:`_alone`, on several machines; takes the number and the state that the others have."""
        team, places = membership.team(self._attempt, self.number), self.places
        assert team is not None  # it has a place
        self.job_reporter.call(membership.rendezvous.run_id)
        self.close()
        if self._attempt is None and membership.rendezvous.line:  # given a place in the middle of the job
            line = Resized.from_json(membership.rendezvous.line, "first")
            self.resizing.start_over(line)
            membership.gather(team.machines, line)
        self.number, place, keeper = team.number, (team.host, team.port), team.keeper
        connect, wake = lambda: membership.connect(keeper), self.wakeup.tell  # noqa: E731
        attempt = Attempt(self.number, place, connect, places.ranks, places.world_size, wake, team)
        continued = self.resizing.line
        attempt.begin(team.machines, continued.to_json() if continued is not None else "")
        return attempt

    def _replace(self, _: Happened) -> None:
        self.workers.replace_all({rank: local_rank for local_rank, rank in enumerate(self.places.ranks)})
        self.start_due()

    def _tell(self, happened: Happened) -> None:
        self.job_reporter.restarts(happened.entry, self.places, self.workers.starter.config, happened.reached)

    def _clear(self, happened: Happened) -> None:
        line = happened.entry.line
        self._job.clear(keep=line.attempt if line is not None else None)

    def _delay(self, happened: Happened) -> None:
        self.resizing.done(time.monotonic(), len(self.places.ranks), happened.entry.line)
        deadline = time.monotonic() + happened.delay_s
        while not self.wakeup.received and time.monotonic() < deadline:
            self.wakeup.wait(deadline - time.monotonic())
            self.workers.pool.reap()

    def _regroup(self, happened: Happened) -> None:
        entry, before, membership = happened.entry, self.places.world_size, self._membership
        self.number += 1
        if membership is None:
            places = WorkerPlaces(0, 1, entry.workers)
        else:
            slot = membership.regroup(entry.machines, self.number)
            places = WorkerPlaces(slot, len(entry.machines), self._nproc)
            if entry.line is not None:
                membership.gather(entry.machines, entry.line)
        self.places = places
        self.job_reporter.resizes(before, places, entry.line, happened.reached)
        self.resizing.done(time.monotonic(), entry.workers, entry.line)
        self.book.forget_ranks()  # their ranks mean other workers now

    def _forget(self, _: Happened) -> None:
        self.close()
        self._attempt = None
        self.job_reporter.begins(None, None)
        self._job.clear()
        self.resizing.start_over(None)

    def _let_go(self, _: Happened) -> None:
        """Replacements still on their way have nothing left to do: the job ends without these ranks."""
        self.absent = frozenset(range(len(self.now.incarnations))).difference(self.now.ledger.present())
        if self.absent:
            self.job_reporter.ends_without(self.absent, ranks(sorted(self.absent)))
            self.workers.let_go(self.absent)

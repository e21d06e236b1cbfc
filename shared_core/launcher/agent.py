"""The agent of one machine: it starts the workers, notices within milliseconds when one is lost, and replaces that one.

Built on torchelastic's ``SimpleElasticAgent`` (worker specification, rendezvous, rank assignment, events); the run loop
is its own. It waits on descriptors (pidfds, standbys, signals, workers' words) and never sleeps; a tick of
``monitor_interval`` looks for workers that are stopped or make no progress. The store is hosted here, so any worker may
die, rank 0 too.
"""

from __future__ import annotations

import math
import os
import signal
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch.distributed import DistError
from torch.distributed.elastic.agent.server.api import (
    DEFAULT_ROLE,
    RunResult,
    SimpleElasticAgent,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.utils.api import macros

from shared_core.checkpoint.command import Command
from shared_core.config import SwiftConfig
from shared_core.errors import ConfigError
from shared_core.events import EventLog, console
from shared_core.launcher.attempt import LOOPBACK, Attempt
from shared_core.launcher.console import Change, Story, count, host_of, ranks
from shared_core.launcher.environment import environment_of
from shared_core.launcher.fencing import Fenced
from shared_core.launcher.goodbyes import Parting
from shared_core.launcher.last_checkpoint import LastCheckpoint
from shared_core.launcher.logs import ERROR_FILE, WorkerLogs
from shared_core.launcher.machine import Crew
from shared_core.launcher.persisting import Persisting
from shared_core.launcher.rendezvous import JobOver, Meeting
from shared_core.launcher.standby import Preload, Standby, clean_env
from shared_core.launcher.wakeup import Wakeup
from shared_core.launcher.workers import CANCELLED, Fleet, LiveWorker
from shared_core.plain_json import parse
from shared_core.protocol import keys, progress_file, worker_env
from shared_core.protocol.generation import CauseKind, Entry, Kind
from shared_core.protocol.keys import CHECKPOINTS, SAVED
from shared_core.protocol.loss_policy import LOOP_LIMIT, Death, LossBook, RaisedError, Verdict
from shared_core.protocol.request import Mode, StartRequest
from shared_core.protocol.resizing import Resizing
from shared_core.system import process
from shared_core.system.jobdir import JobDir
from shared_core.system.secret import Secret
from shared_core.waiting import Wait, ranks_text

#: Looks in a row that must find a worker in state T before it is killed.
STOPPED_LOOKS = 2
#: Bounds of a tick, in seconds: a stopped worker is noticed within one.
TICK_S = (0.05, 0.4)


@dataclass(frozen=True)
class Program:
    """The user's program.

    Attributes:
        mode: script, module or any executable.
        target: its path or name.
        args: its arguments; ``${local_rank}`` is substituted as torchrun does.
        preload: modules that standbys import.
        first: modules that workers import before the program.
    """

    mode: Mode
    target: str
    args: tuple[str, ...] = ()
    preload: tuple[str, ...] = ()
    first: tuple[str, ...] = ()

    @property
    def command(self) -> Command:
        """What checkpoints name as theirs."""
        return Command.of(self.target if self.mode == "module" else os.path.abspath(self.target), self.args, self.mode)


@dataclass(frozen=True)
class AgentOptions:
    """How the agent treats its workers.

    Attributes:
        config: the job's options, handed to the workers.
        standbys: zygotes to keep.
        events: path of ``events.jsonl``; None writes none.
        grace_s: seconds between SIGTERM and SIGKILL when the job is ended.
        threads: intra-op threads that a fresh interpreter would use when ``OMP_NUM_THREADS`` is not set.
        loop_limit: see :class:`~shared_core.protocol.loss_policy.LossBook`.
        signals: names of the signals that end the job.
        store_port: port of the store; 0 takes a free one.
        machines: how many there are at least, and at most.
        note: something else for the line at the start.
        secret: of a job on several machines.
    """

    config: SwiftConfig
    standbys: int = 1
    events: str | None = None
    grace_s: float = 5.0
    threads: int = 0
    loop_limit: int = LOOP_LIMIT
    signals: tuple[str, ...] = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
    store_port: int = 0
    machines: tuple[int, int] = (1, 1)
    note: str = ""
    secret: Secret = Secret()


class SwiftAgent(SimpleElasticAgent):
    """Runs the workers of one machine.

    Args:
        spec: torchelastic's specification; ``max_restarts`` is the number of workers that may be replaced in all.
        program: what the workers run.
        options: see :class:`AgentOptions`.
        make_logs: called with the ranks of this machine; makes the log files.
        early: a zygote that was started before torch was imported here.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        program: Program,
        options: AgentOptions,
        make_logs: Callable[[list[int]], WorkerLogs],
        early: Standby | None = None,
    ) -> None:
        super().__init__(spec, shutdown_timeout=int(options.grace_s))
        self._program = program
        self._options = options
        self._make_logs = make_logs
        self._logs: WorkerLogs | None = None
        self._run_id = uuid.uuid4().hex[:12]
        self._story = Story(console)
        self._book = LossBook(spec.max_restarts, options.loop_limit)
        self._wakeup = Wakeup()
        self._parting = Parting(console)
        self._told = False
        process.become_subreaper()
        self._job = JobDir(options.config.log.dir)
        self._job_dir = self._job.path
        if self._job.note:
            console(self._job.note)
        self._events = EventLog(options.events, self._run_id, self._job_dir)
        self._persisting = Persisting(self._job_dir, options.events, options.grace_s, console)
        what = Preload(program.preload, str(self._job_dir), program.target)
        self._fleet = Fleet(
            self._wakeup.selector,
            options.standbys,
            clean_env(os.environ),
            what,
            console,
            early,
            wait_timeout_s=options.config.detection.wait_timeout_s,
        )
        self._attempt: Attempt | None = None
        self._number = 0
        self._starts: dict[int, int] = {}
        self._due: list[tuple[float, int]] = []
        self._tokens = 0
        self._missing: set[int] = set()
        self._lost: set[int] = set()
        self._start_reported = False
        self._released = False
        self._last_tick = 0.0
        config = options.config
        self._last_checkpoint = LastCheckpoint(
            config.checkpoint.dir is not None,
            options.grace_s,
            config.detection.wait_timeout_s,
            self._job_dir,
            self._set_key,
        )
        self._resizing = Resizing(
            options.config, spec.local_world_size, least=options.machines[0], most=options.machines[1]
        )
        self._crew: Crew | None = None
        if isinstance(spec.rdzv_handler, Meeting):
            self._crew = Crew(
                spec.rdzv_handler,
                self._job_dir,
                pause=self._pause,
                wake=self._wake,
                stop_workers=self._stop_at_once,
                number=lambda: self._number,
                secret=options.secret,
            )

    # -- torchelastic's face ------------------------------------------------------------------------------------------

    def _invoke_run(self, role: str = DEFAULT_ROLE) -> RunResult:
        self._wakeup.handle(self._last_checkpoint.signals(self._options.signals))
        try:
            if self._program.mode != "exec":
                self._fleet.fill_standbys()  # they import while the rendezvous goes on
            result = self._run()
        except BaseException as error:
            self._emit("end", result=type(error).__name__, replaced=self._replaced)
            raise
        self._worker_group.state = result.state
        return result

    def _assign_worker_ranks(
        self, store: Any, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        # torchelastic's way needs every machine's answer; here all machines are alike, and one may be missing.
        nproc, first = spec.local_world_size, group_rank * spec.local_world_size
        world = group_world_size * nproc
        return [Worker(local, first + local, first + local, world, world) for local in range(nproc)]

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        mine = self._ranks()
        if self._logs is None:
            self._logs = self._make_logs(mine)
            self._logs.start()
        team = self._crew.team(self._attempt, self._number) if self._crew is not None else None
        if self._crew is not None:
            self._run_id = self._crew.run_id
            self._events = EventLog(self._options.events, self._run_id, self._job_dir)
        if self._attempt is not None:
            self._attempt.close()
        place = (worker_group.spec.local_addr or LOOPBACK, 0 if self._number else self._options.store_port)
        if team is not None and self._crew is not None:
            if self._attempt is None and self._crew.line:  # given a place in the middle of the job
                self._resizing.line = worker_env.Resized.from_json(self._crew.line, "first")
                self._crew.gather(team.machines, self._resizing.line)
            self._number, place = team.number, (team.host, team.port)
        world_size = worker_group.workers[0].world_size
        self._attempt = Attempt(self._number, place, mine, world_size, self._wake, team)
        if team is not None:
            line = self._resizing.line
            self._attempt.begin(team.machines, line.to_json() if line is not None else "")
        self._start_reported = False
        self._due.clear()
        self._missing = set(mine)
        self._lost.clear()
        if self._crew is not None:
            self._crew.fetch(self._now.ledger, mine, self._number)
            ledger = self._now.ledger
            for rank in mine:
                if ledger.incarnations[rank]:
                    self._story.lost(rank, "its machine was lost", ledger.detected or time.time())
        for local_rank in range(len(mine)):
            self._start(local_rank)
        return {}  # the pids come with the standbys' answers

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._kill_all()

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        raise NotImplementedError("this agent waits for events instead of asking")

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        """End everything: ``death_sig`` to the workers, SIGKILL after the grace or at a second signal."""
        if self._crew is not None:
            self._crew.send_no_more()
        try:
            self._fleet.cancel_starts()
            self._fleet.started()
            self._fleet.reap()
            self._fleet.signal_all(death_sig)
            before = len(self._wakeup.received)
            begun = time.monotonic()
            deadline, cut = begun + self._last_checkpoint.left_s, begun + self._last_checkpoint.writer_s
            while self._fleet.live and len(self._wakeup.received) <= before and time.monotonic() < deadline:
                self._wakeup.wait(deadline - time.monotonic())
                self._fleet.started()
                self._fleet.reap()
            self._finish_checkpoint(cut, before)
        finally:
            self._fleet.close()
            self._say_farewell()
            if self._attempt is not None:
                self._attempt.close()
            if self._logs is not None:
                self._logs.stop()
            self._job.remove()
            self._wakeup.close()

    def _finish_checkpoint(self, deadline: float, signals: int) -> None:
        """The last one is written to its end if the job has succeeded, else for the rest of the grace."""
        # A worker may have left its only snapshot just before it ended.
        self._persisting.look(self._first_rank, self._run_id)
        whole = self._released and not self._wakeup.received
        whole = self._persisting.finish(
            None if whole else deadline, self._wakeup.wait, lambda: len(self._wakeup.received) > signals
        )
        if self._wakeup.received or not whole:
            self._last_checkpoint.say(self._options.config, self._program.command, self._reached)

    @property
    def _first_rank(self) -> int:
        return min(self._ranks(), default=0)

    @property
    def _reached(self) -> int:
        """Batch tops that workers of this machine have passed in this attempt."""
        found = (progress_file.read_progress(self._progress_file(rank)) for rank in self._ranks())
        return max((progress[0] for progress in found if progress is not None), default=0)

    @property
    def logs_used(self) -> bool:
        """Whether workers wrote log files, not only error files."""
        return self._logs is not None and self._logs.used

    # -- the loop -----------------------------------------------------------------------------------------------------

    def _run(self) -> RunResult:
        while True:
            try:
                self._initialize_workers(self._worker_group)
                return self._loop()
            except (Fenced, DistError) as error:
                if self._crew is None:
                    raise
                self._stand_down(self._crew.why(error))
            except JobOver as over:
                if over.failed:
                    raise
                console(str(over))
                self._worker_group.workers = []  # torchelastic reports each
                return RunResult(WorkerState.SUCCEEDED)

    def _loop(self) -> RunResult:
        while True:
            self._wakeup.wait(self._timeout())
            self._check_signals()
            self._check_lease()
            for newcomer in self._fleet.started():
                self._announce(newcomer)
                if self._released and newcomer.cause == CANCELLED:
                    self._kill(newcomer, CANCELLED)
            dead = self._fleet.reap()
            if dead and (result := self._bury(dead)) is not None:
                return result
            ticked = self._tick()
            if (ticked or self._told) and (result := self._listen()) is not None:
                return result
            self._start_due()
            self._grow_if_due()
            if self._released and not self._fleet.live and not self._fleet.starting:
                self._emit("end", result="succeeded", replaced=self._replaced)
                if self._speaks:
                    self._story.succeeds(self._worker_group.workers[0].world_size)
                return RunResult(WorkerState.SUCCEEDED, return_values=dict.fromkeys(self._ranks()))

    def _check_signals(self) -> None:
        if self._wakeup.received:
            trains = self._attempt is not None and not self._released and not self._now.goodbyes()
            if trains and self._reached and self._last_checkpoint.waits(self._wakeup.received):
                return
            received = signal.Signals(self._wakeup.received[0])
            console(f"received {received.name}: ending all workers")
            raise SignalException(f"Process {os.getpid()} got signal: {received}", received)

    def _timeout(self) -> float:
        if self._told:
            return 0.0
        times = [self._last_tick + self._tick_s, *(when for when, _ in self._due)]
        if self._resizing.grow_at is not None:
            times.append(self._resizing.grow_at)
        return min(times) - time.monotonic()

    @property
    def _speaks(self) -> bool:
        """Whether this agent is the one of several that says what concerns all."""
        return int(self._worker_group.group_rank or 0) == 0

    @property
    def _tick_s(self) -> float:
        return min(max(float(self._worker_group.spec.monitor_interval), TICK_S[0]), TICK_S[1])

    @property
    def _replaced(self) -> int:
        return int(self._worker_group.spec.max_restarts) - self._book.budget

    @property
    def _now(self) -> Attempt:
        assert self._attempt is not None
        return self._attempt

    def _ranks(self) -> list[int]:
        return [one.global_rank for one in self._worker_group.workers]

    def _set_key(self, name: str) -> None:
        if self._attempt is not None:
            self._attempt.set(name)

    def _wake(self) -> None:
        self._told = True
        self._wakeup.poke()

    # -- losses -------------------------------------------------------------------------------------------------------

    def _bury(self, dead: list[tuple[LiveWorker, int]]) -> RunResult | None:
        """Workers died: write the next generation, then see to newcomers. Returns the result if the job is over."""
        detected = time.time()
        if self._released:
            for one, code in dead:
                if code != 0 and one.cause != CANCELLED:
                    console(f"rank {one.rank} {process.describe_exit(code)} after its goodbye; its work was finished")
            return None
        lost = [(one, self._death(one, code, detected)) for one, code in dead]
        if self._resizing.stay:  # a newcomer that was too late has no part in what follows
            lost = [(one, death) for one, death in lost if death.rank in self._resizing.stay]
            if not lost:
                return None
        deaths = [death for _, death in lost]
        self._lost |= {death.rank for death in deaths}
        verdicts = [self._book.judge(death) for death in deaths]
        ending = next((verdict for verdict in verdicts if verdict.action == "end"), None)
        everyone = self._crew is None and self._lost >= set(self._ranks())
        delay = 0.0
        restart = everyone or self._options.config.on_failure == "restart"
        entry: Entry | None = None
        # Among several machines a lost worker is replaced by its own; during a change the others hand over without it.
        resizing, alone = self._resizing, self._crew is None
        shrinks = alone and resizing.shrinks(self._now.goodbyes())
        stay = sorted(set(self._ranks()) - self._lost) if shrinks else []
        if ending is None and not restart:
            # First of all what the survivors wait for; the telling comes last.
            entry = self._now.next_generation(deaths, detected, stay)
            if entry is None:
                return self._listen()  # another machine ended this attempt first
            if entry.stay:
                resizing.begin(entry.stay, len(stay) if alone else resizing.target)
            elif entry.kind is Kind.HAND_ON or len(entry.absent or ()) == len(entry.incarnations):
                restart = True  # nobody is left who could hand over, or let a newcomer in
            else:
                resizing.expect([death.rank for death in deaths], time.monotonic())
            if entry.absent is not None:
                delay = self._options.config.reroute.rejoin_after_s
            replaces = entry.kind is not Kind.HAND_ON and not restart
            for (one, _), verdict in zip(lost, verdicts, strict=True) if replaces else ():
                self._due.append((time.monotonic() + max(verdict.delay_s, delay), one.local_rank))
            self._start_due()
        self._report_start()
        goes_on = entry is not None and entry.absent is not None and not restart
        for one, death in lost:
            self._report_loss(one, death, goes_on=goes_on)
        if ending is not None:
            return self._fail(ending)
        if restart:
            self._book.budget += len(deaths) - 1  # a restart of all counts once
            why = "on_failure is restart" if self._options.config.on_failure == "restart" else "all workers are lost"
            self._restart_all(why, max(verdict.delay_s for verdict in verdicts), line=resizing.line)
            return None
        assert entry is not None
        self._emit_generation(entry)
        return None

    def _death(self, one: LiveWorker, code: int, detected: float) -> Death:
        path = one.request.env.get(ERROR_FILE, "")
        error: RaisedError | None = None
        if code > 0 and path:
            with suppress(OSError, ValueError):
                error = RaisedError.from_error_file(parse(Path(path).read_bytes()))
        cause = one.cause or process.describe_exit(code)
        if error is not None:
            cause = f"{error.summary[:200]} (at {error.place})"
        elif code == 0:
            cause = "exited with code 0 without saying goodbye"
        progress = progress_file.read_progress(self._progress_file(one.rank))
        tops = progress[0] if progress else 0
        return Death(one.rank, one.pid, code, cause, tops, error, path if error else "", detected, one.kind)

    def _progress_file(self, rank: int) -> Path:
        return self._job_dir / f"rank{rank}" / "progress"

    def _report_loss(self, one: LiveWorker, death: Death, *, goes_on: bool) -> None:
        self._emit(
            "lost",
            rank=death.rank,
            cause=death.cause,
            detected=death.detected,
            pid=death.pid,
            incarnation=one.incarnation,
            exit_code=death.exit_code,
            tops=death.tops,
        )
        self._story.lost(death.rank, death.cause, death.detected, death.pid, goes_on=goes_on)

    def _fail(self, verdict: Verdict) -> RunResult:
        assert verdict.first is not None
        first = verdict.first
        self._story.fails(verdict.reason)
        self._emit("end", rank=first.rank, result="failed", reason=verdict.reason, replaced=self._replaced)
        # torchelastic has its own words for signals and for what is in an error file
        words = first.cause if first.exit_code >= 0 and not first.error_file else ""
        return self._failed(first.rank, first.pid, first.exit_code, first.error_file, words)

    def _failed(self, rank: int, pid: int, code: int, error_file: str, message: str) -> RunResult:
        self._now.append(lambda: Entry(kind=Kind.FAIL, rank=rank, reason=message or f"rank {rank} failed"))
        self._now.stop()
        local_rank = self._ranks().index(rank) if rank in self._ranks() else 0
        failure = ProcessFailure(local_rank=local_rank, pid=pid, exitcode=code, error_file=error_file)
        if message:
            failure.message = message
        return RunResult(WorkerState.FAILED, failures={rank: failure})

    # -- what workers say ---------------------------------------------------------------------------------------------

    def _listen(self) -> RunResult | None:
        self._told = False
        attempt = self._attempt
        for entry in self._now.ledger.follow():
            if (result := self._follow(entry)) is not None or self._attempt is not attempt:
                return result
        for name, value in self._now.look():
            if (result := self._hear(name, value)) is not None or self._attempt is not attempt:
                return result
        if not self._released and self._now.release():
            self._let_go()
        if not self._released:
            self._look_at_machines()
        return None

    def _follow(self, entry: Entry) -> RunResult | None:
        """Another agent's entry in the ledger."""
        if entry.kind is Kind.RELEASE:
            self._let_go()
        elif entry.kind is Kind.FAIL:
            self._story.fails(entry.reason)
            return self._failed(entry.rank, 0, 1, "", entry.reason)
        elif entry.kind is Kind.RESTART:
            self._start_again(entry, 0.0)
        elif entry.kind is Kind.RESIZE:
            self._go_on_resized(entry)
        else:
            self._note(entry)
            self._story.counts(len(entry.lost))
            self._check_lease()  # it may have given our place away
        return None

    def _let_go(self) -> None:
        """All workers have said goodbye that are there; what is still on its way has nothing left to do."""
        self._released = True
        absent = set(range(len(self._now.incarnations))).difference(self._now.ledger.present())
        if not absent:
            return
        console(f"the job ends without {ranks(sorted(absent))}: the others have done the work")
        self._story.forget(absent)
        self._due.clear()
        self._fleet.cancel_starts()
        for one in list(self._fleet.live.values()):
            if one.rank in absent:
                self._kill(one, CANCELLED)

    def _hear(self, name: str, value: Any) -> RunResult | None:
        if name == "divergent":
            for one in list(self._fleet.live.values()):
                if one.rank in value:
                    self._kill(one, "its state differs from its replicas'", CauseKind.DIVERGENT)
        elif name == "fail":
            rank, message = value.rank, value.message
            self._story.fails(f"rank {rank}: {message}")
            self._emit("end", rank=rank, result="failed", reason=message, replaced=self._replaced)
            pid = next((one.pid for one in self._fleet.live.values() if one.rank == rank), 0)
            return self._failed(rank, pid, 1, "", message)
        elif name == SAVED:
            self._last_checkpoint.saved(asdict(value))
            self._told = True  # look at the signals again
        elif name == CHECKPOINTS:
            try:
                config = self._options.config.merged(value)
            except ConfigError as error:
                console(f"what a worker has said of its checkpoints is passed over: {error}")
                return None
            self._last_checkpoint.want()
            if config.checkpoint.dir != self._options.config.checkpoint.dir:
                self._story.checkpoints(config.checkpoint.dir)
            self._options = replace(self._options, config=config)
        elif name == keys.REPORTS:
            fields = {key: each for key, each in asdict(value).items() if each is not None}
            if (done := self._story.report(fields)) is not None:
                stall_s, lost, top = done
                self._events.emit("resumed", rank=0, stall_s=stall_s, recomputed_steps=lost, top=top)
        elif name in ("handed", "declined"):
            if self._resizing.stay and value.generation == self._now.generation:
                if name == "handed":
                    self._resize(value.top)
                else:
                    self._stay_as_many(value.reason)
        elif name == "restart":
            reason = value.reason
            if self._book.budget <= 0:
                reason += "; no replacements are left (--max-restarts)"
                self._story.fails(reason)
                self._emit("end", result="failed", reason=reason, replaced=self._replaced)
                return self._failed(self._ranks()[0], 0, 1, "", reason)
            self._book.budget -= 1
            self._restart_all(reason, 0.0, line=None)  # a worker that says so could not go on from the present one
        return None

    # -- another number of workers ------------------------------------------------------------------------------------

    def _grow_if_due(self) -> None:
        resizing, now = self._resizing, time.monotonic()
        if resizing.grow_at is None or now < resizing.grow_at or self._released:
            return
        resizing.grow_at = None
        if resizing.stay or self._lost or self._missing or self._now.goodbyes():
            resizing.schedule(now, len(self._ranks()))  # later
            return
        entry = self._now.next_generation((), time.time(), self._ranks())
        if entry is not None:
            resizing.begin(self._ranks(), resizing.full)
            self._emit_generation(entry)

    def _shrink_late(self) -> None:
        """Newcomers that have not joined in time are not waited for any more."""
        resizing = self._resizing
        if self._crew is not None:
            return
        for rank in list(resizing.due):
            progress = progress_file.read_progress(self._progress_file(rank))
            started = max((one.started for one in self._fleet.live.values() if one.rank == rank), default=None)
            if started is not None and progress is not None and progress[0] and progress[2] >= started:
                del resizing.due[rank]
        late = resizing.late(time.monotonic())
        if not late or resizing.stay:
            return
        stay = sorted(set(self._ranks()) - set(late) - self._lost)
        limit = self._options.config.resize.replace_timeout_s
        why = f"nobody has taken the place of {ranks(late)} in {limit:g} s"
        if not stay:
            return
        console(f"{why} (replace_timeout_s): the others go on without")
        if (entry := self._now.next_generation((), time.time(), stay)) is not None:
            self._emit_generation(entry)
            resizing.begin(stay, len(stay))
            self._lost |= set(late)
            for one in list(self._fleet.live.values()):
                if one.rank in late:
                    self._kill(one, why)

    def _resize(self, top: int) -> None:
        """The state is handed on: end this attempt and go on with another number of workers."""
        resizing, attempt = self._resizing, self._now
        before = self._worker_group.workers[0].world_size
        line = worker_env.Resized(attempt.number, before, resizing.stay, top) if top else resizing.line
        machines = resizing.after if self._crew is not None else ()
        entry = Entry(kind=Kind.RESIZE, workers=resizing.target, line=line, machines=machines)
        generation = attempt.generation
        written = attempt.append(lambda: entry if attempt.generation == generation else None)
        if written is None:
            return  # another agent was first, or has seen another loss
        self._emit("resize", workers=resizing.target, before=before, top=top, stay=list(resizing.stay))
        self._go_on_resized(written)

    def _go_on_resized(self, entry: Entry) -> None:
        """Kill every worker and start the next attempt with the number of workers that the ledger's entry says."""
        line, group, workers = entry.line, self._worker_group, entry.workers
        before, reached = group.workers[0].world_size, self._reached
        self._kill_all()
        self._job.clear(keep=line.attempt if line is not None else None)
        self._number += 1
        here, first = range(workers), 0
        if self._crew is not None:
            nproc = group.spec.local_world_size
            place = self._crew.regroup(entry.machines, self._number)
            here, first = range(nproc), place * nproc
            group.group_rank, group.group_world_size = place, len(entry.machines)  # type: ignore[assignment]
            if line is not None:
                self._crew.gather(entry.machines, line)
        group.workers = [Worker(i, first + i, first + i, workers, workers) for i in here]
        self._tell_of_resize(before, reached, line)
        self._resizing.done(time.monotonic(), workers, line)
        self._book.forget_ranks()  # they are others now
        self._start_workers(self._worker_group)

    def _tell_of_resize(self, before: int, reached: int, line: worker_env.Resized | None) -> None:
        workers = self._worker_group.workers[0].world_size
        go_on = "goes on" if workers == 1 else "go on"
        what = f"{count(workers, 'worker')} {go_on}"
        whence = "" if line is None else f"from batch top {line.top}"
        top = None if line is None else line.top
        self._story.changes(Change(time.time(), what, "", whence, reached, top, before), tell=self._speaks)

    def _stay_as_many(self, reason: str) -> None:
        """The number of workers cannot change here: lost ones are replaced after all."""
        resizing = self._resizing
        console(f"the number of workers cannot change now ({reason}): lost ones are replaced")
        self._emit("warning", message=f"the number of workers cannot change: {reason}")
        resizing.declined = True
        resizing.schedule(time.monotonic(), len(self._ranks()))
        if (entry := self._now.next_generation((), time.time(), ends=True)) is not None:
            self._emit_generation(entry)
            self._note(entry)

    def _note(self, entry: Entry) -> None:
        """A generation was written that may begin or end a change of the number of workers."""
        changing = bool(self._resizing.stay)
        self._resizing.follow(entry, self._worker_group.spec.local_world_size)
        if changing and not self._resizing.stay:
            local = {one.global_rank: one.local_rank for one in self._worker_group.workers}
            waiting = {place for _, place in self._due}
            lost = [local[rank] for rank in sorted(self._lost) if rank in local and local[rank] not in waiting]
            self._due += [(time.monotonic(), place) for place in lost]
            self._start_due()

    # -- other machines -----------------------------------------------------------------------------------------------

    def _pause(self, seconds: float) -> None:
        """Wait while this machine has no place; standbys and signals are seen to."""
        self._wakeup.wait(seconds)
        self._fleet.started()
        self._fleet.reap()
        self._check_signals()

    def _check_lease(self) -> None:
        if self._crew is not None and not self._released:
            self._crew.check(self._now.ledger)

    def _stop_at_once(self) -> None:
        """From a thread; the loop sees to the rest."""
        for pid in list(self._fleet.live):
            process.kill_group(pid)

    def _stand_down(self, reason: str) -> None:
        """This machine may not go on: its workers end, and it is as if it had just been started."""
        console(f"the workers of this machine are stopped: {reason}")
        self._emit("warning", message=f"workers stopped: {reason}")
        self._kill_all()
        if self._attempt is not None:
            self._attempt.close()
            self._attempt = None
        self._job.clear()
        self._resizing.end()
        self._resizing.line = None
        self._released = False

    def _look_at_machines(self) -> None:
        if self._crew is None:
            return
        restart = self._options.config.on_failure == "restart"
        nproc = self._worker_group.spec.local_world_size
        entry = self._crew.replace_machines(self._now, nproc, self._resizing, restart=restart)
        if entry is None:
            return
        self._note(entry)
        self._story.counts(len(entry.lost))
        for cause in entry.causes:
            self._emit("lost", rank=cause.who, cause=cause.text, detected=entry.detected)
        if restart:
            self._emit("restart", reason=entry.reason, attempt=self._number + 1)
            self._start_again(entry, 0.0)
        else:
            self._emit_generation(entry)

    def _say_farewell(self) -> None:
        if self._crew is None:
            return
        over = self._attempt is not None and self._now.ledger.over is not None
        if self._attempt is not None and not over and self._crew.job_ends_here:
            self._failed(self._ranks()[0], 0, 1, "", "the machine that hosts the store was told to end")
            over = True
        self._crew.leave(over=over)
        self._crew.close()

    # -- slow looks ---------------------------------------------------------------------------------------------------

    def _tick(self) -> bool:
        """Look for workers that live but do not run: stopped, or without progress. False if it is not yet time."""
        now = time.monotonic()
        if now - self._last_tick < self._tick_s:
            return False
        self._last_tick = now
        limit = self._options.config.detection.progress_timeout_s
        for one in self._fleet.live.values():
            if one.cause:
                continue
            one.stopped_looks = one.stopped_looks + 1 if process.state_of(one.pid) == "T" else 0
            if one.stopped_looks >= STOPPED_LOOKS:
                self._kill(one, "stopped (SIGSTOP), killed by the agent")
                continue
            progress = None if self._released else progress_file.read_progress(self._progress_file(one.rank))
            if progress is not None:
                tops, inside, changed = progress
                # an entry older than the worker is its predecessor's
                if tops and not inside and changed >= one.started and time.time() - changed > limit:
                    self._kill(one, f"no progress for {limit:g} s (progress_timeout_s), killed by the agent")
        self._fleet.look_after_standbys()
        if self._attempt is not None and not self._released:
            self._parting.look(self._now.finished(self._ranks()), self._ranks())
        self._shrink_late()
        self._persisting.look(self._first_rank, self._run_id)
        self._story.look()
        return True

    def _kill(self, one: LiveWorker, cause: str, kind: CauseKind = CauseKind.DIED) -> None:
        one.cause, one.kind = cause, kind
        process.kill_group(one.pid)

    # -- starting -----------------------------------------------------------------------------------------------------

    def _start(self, local_rank: int) -> None:
        assert self._logs is not None
        options, config = self._options, self._options.config.to_json()
        rank = self._worker_group.workers[local_rank].global_rank
        nth = self._starts.get(rank, 0)
        self._starts[rank] = nth + 1
        address = self._crew.address if self._crew is not None else ""
        line = self._resizing.line
        env = environment_of(
            self._worker_group,
            local_rank,
            self._now,
            self._job_dir,
            options.events,
            config,
            address,
            line,
            self._program.command,
            self._run_id,
        )
        env[ERROR_FILE] = self._logs.error_file(local_rank, nth)
        threads = env.get("OMP_NUM_THREADS", "")
        self._tokens += 1
        request = StartRequest(
            token=self._tokens,
            mode=self._program.mode,
            target=self._program.target,
            args=tuple(macros.substitute(list(self._program.args), str(local_rank))),
            env=env,
            agent=os.getpid(),
            stdout=self._logs.stdout(local_rank),
            stderr=self._logs.stderr(local_rank),
            threads=int(threads) if threads.isdigit() else options.threads,
            first=self._program.first,
        )
        self._fleet.start(LiveWorker(local_rank, rank, self._now.incarnations[rank], request))

    def _start_due(self) -> None:
        now = time.monotonic()
        due = [entry for entry in self._due if entry[0] <= now]
        for entry in due:
            self._due.remove(entry)
            self._start(entry[1])

    def _announce(self, one: LiveWorker) -> None:
        self._worker_group.workers[one.local_rank].id = one.pid
        self._missing.discard(one.rank)
        self._lost.discard(one.rank)
        self._story.newcomer(one.rank, one.pid)
        if one.incarnation == 0:
            if not self._missing:
                self._report_start()
            return
        spawn_s = time.time() - one.started
        self._emit(
            "newcomer_start", rank=one.rank, pid=one.pid, incarnation=one.incarnation, spawn_s=spawn_s, how=one.how
        )

    def _report_start(self) -> None:
        """The ``start`` event, once an attempt: when all first workers run, or before the first loss."""
        if not self._start_reported:
            self._start_reported = True
            pids = {one.rank: one.pid for one in self._fleet.live.values()}
            if not any(self._now.incarnations[rank] for rank in pids):
                self._story.starts(
                    self._program.target,
                    self._worker_group.workers[0].world_size,
                    pids,
                    self._options.config,
                    self._options.events,
                    [host_of(name) for name in self._now.ledger.machines if name],
                    self._options.note,
                )
            self._emit(
                "start",
                world_size=self._worker_group.workers[0].world_size,
                restart=self._now.number,
                standbys=self._options.standbys,
                job_dir=str(self._job_dir),
                agent=os.getpid(),
                run_id=self._worker_group.spec.rdzv_handler.get_run_id(),
                pids={str(rank): pid for rank, pid in pids.items()},
            )

    def _restart_all(self, reason: str, delay_s: float, *, line: worker_env.Resized | None) -> None:
        """End this attempt for all agents, unless another did, and begin the next."""
        over = Entry(kind=Kind.RESTART, reason=reason, line=line)
        if (entry := self._now.append(lambda: over)) is None:
            self._told = True
            return
        self._emit("restart", reason=reason, attempt=self._number + 1)
        self._start_again(entry, delay_s)

    def _start_again(self, entry: Entry, delay_s: float) -> None:
        """Kill every worker and start all again as generation 0 of the next attempt."""
        folder, line = self._options.config.checkpoint.dir, entry.line
        whence = "from the start" if folder else "from the start, as no checkpoint.dir is set"
        if line is not None:
            whence = f"from batch top {line.top}, where their number had changed"
        many = self._worker_group.workers[0].world_size
        what = "the worker is back" if many == 1 else f"all {many} workers are back"
        top = line.top if line is not None else None
        why = "" if self._options.config.on_failure == "restart" else entry.reason
        change = Change(time.time(), what, why, whence, self._reached, top)
        self._story.changes(change, tell=self._speaks)
        self._kill_all()
        self._resizing.done(time.monotonic(), len(self._ranks()), line)
        self._job.clear(keep=line.attempt if line is not None else None)  # of what the attempt before published
        deadline = time.monotonic() + delay_s
        while not self._wakeup.received and time.monotonic() < deadline:
            self._wakeup.wait(deadline - time.monotonic())
            self._fleet.reap()
        self._number += 1
        self._start_workers(self._worker_group)

    def _kill_all(self) -> None:
        """SIGKILL to every worker, those that are just being forked included; returns when all are reaped."""
        self._due.clear()
        self._fleet.cancel_starts()
        # One that hangs in a file system cannot be killed, and its place must not be taken twice.
        wait = Wait("the launcher", self._killed, math.inf, ends="it goes on when they have ended")
        while self._fleet.live or self._fleet.starting:
            wait.look()
            self._fleet.started()
            for one in self._fleet.live.values():
                self._kill(one, CANCELLED)
            self._wakeup.wait(self._tick_s)
            self._fleet.reap()
            self._fleet.look_after_standbys()

    def _killed(self) -> str:
        return f"{ranks_text(one.rank for one in self._fleet.live.values())} to end, killed with SIGKILL"

    def _emit_generation(self, entry: Entry) -> None:
        self._emit("generation", **entry.event_fields())

    def _emit(self, kind: str, *, rank: int = -1, **fields: Any) -> None:
        generation = self._attempt.generation if self._attempt is not None else 0
        self._events.emit(kind, rank=rank, generation=generation, **fields)

"""The agent of one machine: it starts the workers, notices within milliseconds when one is lost, and replaces that one alone.

Built on torchelastic's ``SimpleElasticAgent`` (worker specification, rendezvous, rank assignment, events); the run loop is
its own. It waits on descriptors (pidfds, standbys, signals, the key watcher's wake-up) and never sleeps; a tick of
``monitor_interval`` looks for workers that are stopped or make no progress. The store is hosted here, so every worker may die.
"""

from __future__ import annotations

import json
import os
import selectors
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore
from torch.distributed.elastic.agent.server.api import (
    DEFAULT_ROLE,
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.utils import macros

from shared_core.cluster import process, worker
from shared_core.cluster.fleet import Fleet, LiveWorker
from shared_core.cluster.logs import ERROR_FILE, WorkerLogs
from shared_core.cluster.losses import LOOP_LIMIT, Death, LossBook, RaisedError, Verdict
from shared_core.cluster.request import Mode, StartRequest
from shared_core.cluster.standby import Standby, clean_env
from shared_core.cluster.watch import KeyWatcher
from shared_core.config import SwiftConfig
from shared_core.events import EventLog, console

#: Looks in a row that must find a worker in state T before it is killed.
STOPPED_LOOKS = 2
#: Longest tick, in seconds: a stopped worker is noticed within a second.
LONGEST_TICK_S = 0.4


@dataclass(frozen=True)
class Program:
    """The user's program.

    Attributes:
        mode: script, module or any executable.
        target: its path or name.
        args: its arguments; ``${local_rank}`` is substituted as torchrun does.
        preload: modules that standbys import.
    """

    mode: Mode
    target: str
    args: tuple[str, ...] = ()
    preload: tuple[str, ...] = ()


@dataclass(frozen=True)
class AgentOptions:
    """How the agent treats its workers.

    Attributes:
        config: the job's options, handed to the workers.
        standbys: zygotes to keep.
        events: path of ``events.jsonl``; None writes none.
        grace_s: seconds between SIGTERM and SIGKILL when the job is ended from outside.
        threads: intra-op threads that a fresh interpreter would use when ``OMP_NUM_THREADS`` is not set.
        loop_limit: see :class:`~shared_core.cluster.losses.LossBook`.
        signals: names of the signals that end the job.
        store_port: port of the store; 0 takes a free one.
    """

    config: SwiftConfig
    standbys: int = 1
    events: str | None = None
    grace_s: float = 5.0
    threads: int = 0
    loop_limit: int = LOOP_LIMIT
    signals: tuple[str, ...] = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
    store_port: int = 0


class SwiftAgent(SimpleElasticAgent):  # type: ignore[misc]  # torch has no types here
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
        self._events = EventLog(options.events)
        self._book = LossBook(spec.max_restarts, options.loop_limit)
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = socket.socketpair()
        for end in (self._wake_read, self._wake_write):
            end.setblocking(False)
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        self._told = False
        self._signals: list[int] = []
        self._old_handlers: dict[int, Any] = {}
        self._old_wakeup = -1
        process.become_subreaper()
        self._job_dir = _make_job_dir()
        self._fleet = Fleet(
            self._selector, options.standbys, clean_env(os.environ), list(program.preload), console, early
        )
        self._server: TCPStore | None = None
        self._client: TCPStore | None = None
        self._watcher: KeyWatcher | None = None
        self._restart = 0
        self._generation = 0
        self._incarnations: list[int] = []
        self._starts: dict[int, int] = {}
        self._pending: list[tuple[float, int, int]] = []
        self._tokens = 0
        self._released = False
        self._announced = False
        self._missing: set[int] = set()
        self._last_tick = 0.0

    # -- torchelastic's face ----------------------------------------------------------------------------------------------

    def _invoke_run(self, role: str = DEFAULT_ROLE) -> RunResult:
        self._install_signals()
        try:
            # The zygotes import while the rendezvous goes on.
            if self._program.mode != "exec":
                self._fleet.fill_standbys()
            self._initialize_workers(self._worker_group)
            self._worker_group.state = WorkerState.HEALTHY
            result = self._loop()
            self._worker_group.state = result.state
            return result
        except BaseException as error:
            self._emit("end", result=type(error).__name__, replaced=self._replaced)
            raise

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        ranks = [one.global_rank for one in worker_group.workers]
        if self._logs is None:
            self._logs = self._make_logs(ranks)
            self._logs.start()
        self._open_store()
        self._generation = 0
        self._released = False
        self._announced = False
        self._pending.clear()
        self._missing = set(ranks)
        self._incarnations = [0] * worker_group.workers[0].world_size
        for local_rank in range(len(ranks)):
            self._start(local_rank)
        return {}  # the pids come with the standbys' answers

    def _report_start(self) -> None:
        """The ``start`` event, once: when all first workers run, or before the first loss."""
        if not self._announced:
            self._announced = True
            self._emit(
                "start",
                world_size=self._worker_group.workers[0].world_size,
                restart=self._restart,
                standbys=self._options.standbys,
                job_dir=str(self._job_dir),
                agent=os.getpid(),
                run_id=self._worker_group.spec.rdzv_handler.get_run_id(),
                pids={str(one.rank): one.pid for one in self._fleet.live.values()},
            )

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._kill_all()

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        raise NotImplementedError("the loop of this agent waits for events instead")

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        """End everything: ``death_sig`` to the workers, SIGKILL after the grace or at a second signal, no process left."""
        try:
            self._fleet.cancel_starts()
            self._fleet.started()
            self._fleet.reap()
            if self._fleet.live:
                self._fleet.signal_all(death_sig)
                before = len(self._signals)
                deadline = time.monotonic() + self._options.grace_s
                while self._fleet.live and len(self._signals) <= before and (left := deadline - time.monotonic()) > 0:
                    self._wait(left)
                    self._fleet.started()
                    self._fleet.reap()
        finally:
            if self._watcher is not None:
                self._watcher.close()
                self._watcher = None
            self._fleet.close()
            if self._logs is not None:
                self._logs.stop()
            shutil.rmtree(self._job_dir, ignore_errors=True)
            self._restore_signals()
            self._selector.close()
            self._wake_read.close()
            self._wake_write.close()

    @property
    def logs_used(self) -> bool:
        """Whether workers wrote log files, not only error files."""
        return self._logs is not None and self._logs.used

    # -- the loop ---------------------------------------------------------------------------------------------------------

    def _loop(self) -> RunResult:
        while True:
            self._wait(self._next_timeout())
            if self._signals:
                number = self._signals[0]
                console(f"received {signal.Signals(number).name}: ending all workers")
                raise SignalException(f"Process {os.getpid()} got signal: {number}", signal.Signals(number))
            for newcomer in self._fleet.started():
                self._announce(newcomer)
            dead = self._fleet.reap()
            if dead and (result := self._bury(dead)) is not None:
                return result
            ticked = self._tick()
            if (ticked or self._told) and (result := self._listen()) is not None:
                return result
            self._start_due()
            if self._released and not self._fleet.live:
                self._emit("end", result="succeeded", replaced=self._replaced)
                if self._replaced:
                    console(f"done; {self._replaced} lost worker(s) replaced")
                return RunResult(WorkerState.SUCCEEDED, return_values={rank: None for rank in self._ranks()})

    def _wait(self, timeout: float) -> None:
        self._selector.select(max(0.0, timeout))
        with suppress(BlockingIOError):
            while self._wake_read.recv(4096):
                pass

    def _next_timeout(self) -> float:
        now = time.monotonic()
        due = [self._last_tick + self._tick_s - now, *(when - now for when, _, _ in self._pending)]
        return min(due) if not self._told and not self._signals else 0.0

    @property
    def _tick_s(self) -> float:
        return min(max(float(self._worker_group.spec.monitor_interval), 0.05), LONGEST_TICK_S)

    @property
    def _replaced(self) -> int:
        return int(self._worker_group.spec.max_restarts) - self._book.budget

    def _ranks(self) -> list[int]:
        return [one.global_rank for one in self._worker_group.workers]

    # -- losses -----------------------------------------------------------------------------------------------------------

    def _bury(self, dead: list[tuple[LiveWorker, int]]) -> RunResult | None:
        """Workers died: write the next generation, then see to newcomers. Returns the result if the job is over."""
        detected = time.time()
        deaths: list[tuple[LiveWorker, Death]] = []
        for one, code in dead:
            if self._released:
                if code != 0:
                    console(f"rank {one.rank} {process.describe_exit(code)} after its goodbye; its work was finished")
                continue
            if one.cause == "cancelled":
                continue
            deaths.append((one, self._death(one, code, detected)))
        if not deaths:
            return None
        self._report_start()
        self._missing |= {death.rank for _, death in deaths}
        verdicts = [self._book.judge(death) for _, death in deaths]
        ending = next((verdict for verdict in verdicts if verdict.action == "end"), None)
        if ending is not None:
            for one, death in deaths:
                self._report_loss(one, death)
            return self._fail(ending)
        everyone = self._missing >= set(self._ranks())
        if everyone or self._options.config.on_failure == "restart":
            self._book.budget += len(deaths) - 1  # a restart of all counts once
            for one, death in deaths:
                self._report_loss(one, death)
            why = "all workers are lost" if everyone else "on_failure is restart"
            self._restart_all(why, max(verdict.delay_s for verdict in verdicts))
            return None
        self._next_generation(deaths, detected)
        now = time.monotonic()
        for (one, _), verdict in zip(deaths, verdicts, strict=True):
            if verdict.delay_s:
                self._pending.append((now + verdict.delay_s, one.local_rank, self._restart))
            else:
                self._start(one.local_rank)
        for one, death in deaths:
            self._report_loss(one, death)
        self._emit(
            "generation",
            generation=self._generation,
            lost=[death.rank for _, death in deaths],
            incarnations=self._incarnations,
            cause={str(death.rank): death.cause for _, death in deaths},
            detected=detected,
        )
        return None

    def _death(self, one: LiveWorker, code: int, detected: float) -> Death:
        error_file = one.request.env.get(ERROR_FILE, "")
        error: RaisedError | None = None
        if code > 0 and error_file:
            with suppress(OSError, ValueError):
                error = RaisedError.from_error_file(json.loads(Path(error_file).read_bytes()))
        cause = one.cause or process.describe_exit(code)
        if error is not None:
            cause = f"{error.summary[:200]} (at {error.place})"
        elif code == 0:
            cause = "exited with code 0 without saying goodbye"
        progress = worker.read_progress(self._job_dir / f"rank{one.rank}" / "progress")
        return Death(
            one.rank, one.pid, code, cause, progress[0] if progress else 0, error, error_file if error else "", detected
        )

    def _next_generation(self, deaths: list[tuple[LiveWorker, Death]], detected: float) -> None:
        assert self._client is not None
        self._generation += 1
        for _, death in deaths:
            self._incarnations[death.rank] += 1
        entry = {
            "generation": self._generation,
            "lost": [death.rank for _, death in deaths],
            "incarnations": self._incarnations,
            "cause": {str(death.rank): death.cause for _, death in deaths},
            "detected": detected,
        }
        self._client.set(self._key(f"gen/{self._generation}"), json.dumps(entry))
        for _, death in deaths:  # one that had said goodbye comes back, and says it again
            if self._client.delete_key(self._key(f"done/{death.rank}")) and self._watcher is not None:
                self._watcher.forget_done()

    def _report_loss(self, one: LiveWorker, death: Death) -> None:
        self._emit(
            "lost",
            rank=death.rank,
            generation=self._generation,
            cause=death.cause,
            detected=death.detected,
            pid=death.pid,
            incarnation=one.incarnation,
            exit_code=death.exit_code,
            tops=death.tops,
        )
        console(f"rank {death.rank} lost (pid {death.pid}): {death.cause}; generation {self._generation}")

    def _fail(self, verdict: Verdict) -> RunResult:
        assert verdict.first is not None
        first = verdict.first
        console(f"ending the job: {verdict.reason}")
        self._emit("end", rank=first.rank, result="failed", reason=verdict.reason, replaced=self._replaced)
        # torchelastic has words for signals and error files
        return self._failed(
            first.rank,
            first.pid,
            first.exit_code,
            first.error_file,
            first.cause if first.exit_code >= 0 and not first.error_file else "",
        )

    def _failed(self, rank: int, pid: int, code: int, error_file: str, message: str) -> RunResult:
        if self._client is not None:
            self._client.set(self._key("stop"), "1")
            self._client.set(self._key("release"), "1")  # wakes those that said goodbye; they look for stop
        local_rank = self._ranks().index(rank) if rank in self._ranks() else 0
        failure = ProcessFailure(local_rank=local_rank, pid=pid, exitcode=code, error_file=error_file)
        if message:
            failure.message = message
        return RunResult(WorkerState.FAILED, failures={rank: failure})

    # -- what workers say -------------------------------------------------------------------------------------------------

    def _listen(self) -> RunResult | None:
        assert self._watcher is not None
        self._told = False
        attempt = self._restart
        for name, value in self._watcher.look():
            if self._restart == attempt and (result := self._hear(name, value)) is not None:
                return result
        return None

    def _hear(self, name: str, value: Any) -> RunResult | None:
        assert self._client is not None
        if name == "done":
            if not self._missing and not self._released:
                self._released = True
                self._client.set(self._key("release"), "1")
        elif name == "fail":
            fields = value if isinstance(value, dict) else {"message": str(value)}
            rank = int(fields.get("rank", 0))
            message = str(fields.get("message", "a worker ended the job"))
            console(f"rank {rank} ends the job: {message}")
            self._emit("end", rank=rank, result="failed", reason=message, replaced=self._replaced)
            pid = next((one.pid for one in self._fleet.live.values() if one.rank == rank), 0)
            return self._failed(rank, pid, 1, "", message)
        elif name == "divergent":
            for one in list(self._fleet.live.values()):
                if one.rank in (value or ()):
                    self._kill(one, "its state differs from its replicas'")
        elif name == "restart":
            reason = value.get("reason", value) if isinstance(value, dict) else value
            if self._book.budget <= 0:
                message = f"{reason}; no replacements are left (--max-restarts)"
                self._emit("end", result="failed", reason=message, replaced=self._replaced)
                return self._failed(self._ranks()[0], 0, 1, "", message)
            self._book.budget -= 1
            self._restart_all(str(reason), 0.0)
        return None

    # -- slow looks -------------------------------------------------------------------------------------------------------

    def _tick(self) -> bool:
        """Look for workers that live but do not run: stopped, or without progress. False if it is not time for a look."""
        now = time.monotonic()
        if now - self._last_tick < self._tick_s:
            return False
        self._last_tick = now
        limit = self._options.config.progress_timeout_s
        for one in self._fleet.live.values():
            if one.cause:
                continue
            one.stopped_looks = one.stopped_looks + 1 if process.state_of(one.pid) == "T" else 0
            if one.stopped_looks >= STOPPED_LOOKS:
                self._kill(one, "stopped (SIGSTOP), killed by the agent")
                continue
            progress = worker.read_progress(self._job_dir / f"rank{one.rank}" / "progress")
            if progress is None or self._released:
                continue
            tops, inside, changed = progress
            if tops and not inside and changed >= one.started and time.time() - changed > limit:
                self._kill(
                    one, f"no progress for {limit:g} s outside collectives (progress_timeout_s), killed by the agent"
                )
        self._fleet.look_after_standbys()
        return True

    def _kill(self, one: LiveWorker, cause: str) -> None:
        one.cause = cause
        process.kill_group(one.pid)

    # -- starting ---------------------------------------------------------------------------------------------------------

    def _start(self, local_rank: int) -> None:
        member = self._worker_group.workers[local_rank]
        rank = member.global_rank
        start = self._starts.get(rank, 0)
        self._starts[rank] = start + 1
        assert self._logs is not None
        env = self._worker_env(local_rank)
        env[ERROR_FILE] = self._logs.error_file(local_rank, start)
        if env[ERROR_FILE]:
            with suppress(OSError):
                os.unlink(env[ERROR_FILE])
        threads = int(env["OMP_NUM_THREADS"]) if env.get("OMP_NUM_THREADS", "").isdigit() else self._options.threads
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
            threads=threads,
        )
        self._fleet.start(LiveWorker(local_rank, rank, self._incarnations[rank], request))

    def _start_due(self) -> None:
        now = time.monotonic()
        due = [entry for entry in self._pending if entry[0] <= now]
        for entry in due:
            self._pending.remove(entry)
            if entry[2] == self._restart:
                self._start(entry[1])

    def _announce(self, one: LiveWorker) -> None:
        if one.cause == "cancelled":
            process.kill_group(one.pid)
            return
        self._worker_group.workers[one.local_rank].id = one.pid
        self._missing.discard(one.rank)
        if one.incarnation == 0:
            if not self._missing:
                self._report_start()
            return
        spawn_s = time.time() - one.started
        self._emit(
            "newcomer_start",
            rank=one.rank,
            generation=int(one.request.env[worker.GENERATION]),
            pid=one.pid,
            incarnation=one.incarnation,
            spawn_s=spawn_s,
            how=one.how,
        )
        console(f"rank {one.rank}: newcomer started (pid {one.pid}, {one.how}, {1e3 * spawn_s:.0f} ms)")

    def _worker_env(self, local_rank: int) -> dict[str, str]:
        group, spec = self._worker_group, self._worker_group.spec
        member = group.workers[local_rank]
        env = clean_env(os.environ)
        env |= {
            "RANK": str(member.global_rank),
            "LOCAL_RANK": str(local_rank),
            "GROUP_RANK": str(group.group_rank),
            "ROLE_RANK": str(member.role_rank),
            "ROLE_NAME": spec.role,
            "LOCAL_WORLD_SIZE": str(spec.local_world_size),
            "WORLD_SIZE": str(member.world_size),
            "GROUP_WORLD_SIZE": str(group.group_world_size),
            "ROLE_WORLD_SIZE": str(member.role_world_size),
            "MASTER_ADDR": group.master_addr,
            "MASTER_PORT": str(group.master_port),
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts),
            "TORCHELASTIC_RUN_ID": spec.rdzv_handler.get_run_id(),
            "TORCHELASTIC_USE_AGENT_STORE": str(True),
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.getenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
            worker.JOB_DIR: str(self._job_dir),
            worker.STORE: f"{group.master_addr}:{group.master_port}",
            worker.GENERATION: str(self._generation),
            worker.INCARNATION: str(self._incarnations[member.global_rank]),
            worker.EVENTS: self._options.events or "",
            worker.CONFIG: self._options.config.to_json(),
            worker.RESTART: str(self._restart),
        }
        if spec.virtual_local_rank:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
            env["LOCAL_RANK"] = "0"
            env["CUDA_VISIBLE_DEVICES"] = (
                visible[local_rank].strip() if local_rank < len(visible) and visible[0] else str(local_rank)
            )
        return env

    # -- restarting all ---------------------------------------------------------------------------------------------------

    def _restart_all(self, reason: str, delay_s: float) -> None:
        """Kill every worker and start all again as generation 0 of the next attempt."""
        directory = self._options.config.checkpoint_dir
        console(
            f"restarting all workers: {reason}; "
            + (
                f"they go on from the newest checkpoint in {directory}"
                if directory
                else "no checkpoint_dir is set: they start anew"
            )
        )
        self._emit("restart", generation=self._generation, reason=reason, attempt=self._restart + 1)
        self._kill_all()
        self._restart += 1
        for stale in self._job_dir.iterdir():
            shutil.rmtree(stale, ignore_errors=True) if stale.is_dir() else stale.unlink(missing_ok=True)
        if delay_s:
            self._wait_until(time.monotonic() + delay_s)
        self._start_workers(self._worker_group)

    def _wait_until(self, deadline: float) -> None:
        while not self._signals and (left := deadline - time.monotonic()) > 0:
            self._wait(left)
            self._fleet.started()
            self._fleet.reap()

    def _kill_all(self) -> None:
        """SIGKILL to every worker, those that are just being forked included; returns when all are reaped."""
        self._fleet.cancel_starts()
        while self._fleet.live or self._fleet.starting:
            for one in self._fleet.started():
                one.cause = "cancelled"
            for one in self._fleet.live.values():
                self._kill(one, "cancelled")
            self._wait(self._tick_s)
            self._fleet.reap()
            self._fleet.look_after_standbys()

    # -- store ------------------------------------------------------------------------------------------------------------

    def _open_store(self) -> None:
        """A fresh store for each attempt: nothing of the one before can be read by mistake (gloo's addresses, for instance)."""
        if self._watcher is not None:
            self._watcher.close()
        group = self._worker_group
        host = group.spec.local_addr or "localhost"
        port = self._options.store_port if self._restart == 0 else 0
        self._client = None
        self._server = TCPStore(host, port, is_master=True, wait_for_workers=False, multi_tenant=True)
        group.master_addr, group.master_port = host, self._server.port
        self._client = self._connect()

        def wake() -> None:
            self._told = True
            with suppress(OSError):
                self._wake_write.send(b"k")

        self._watcher = KeyWatcher(self._connect, self._key(""), group.workers[0].world_size, wake)

    def _connect(self) -> TCPStore:
        group = self._worker_group
        return TCPStore(
            group.master_addr, group.master_port, is_master=False, timeout=timedelta(seconds=30), wait_for_workers=False
        )

    def _key(self, name: str) -> str:
        return f"swift/{self._restart}/{name}"

    # -- signals, events --------------------------------------------------------------------------------------------------

    def _install_signals(self) -> None:
        self._old_wakeup = signal.set_wakeup_fd(self._wake_write.fileno(), warn_on_full_buffer=False)
        for name in self._options.signals:
            number = getattr(signal, name)
            self._old_handlers[number] = signal.signal(number, self._on_signal)
        self._old_handlers[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)

    def _on_signal(self, number: int, _frame: object) -> None:
        self._signals.append(number)

    def _restore_signals(self) -> None:
        signal.set_wakeup_fd(self._old_wakeup)
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)
        self._old_handlers.clear()

    def _emit(self, kind: str, *, rank: int = -1, generation: int | None = None, **fields: Any) -> None:
        self._events.emit(kind, rank=rank, generation=self._generation if generation is None else generation, **fields)


def _make_job_dir() -> Path:
    """A private folder, in memory where there is such a file system."""
    for parent in ("/dev/shm", None):
        with suppress(OSError):
            return Path(tempfile.mkdtemp(prefix="swift_", dir=parent))
    raise OSError("no folder for temporary files can be written to: set TMPDIR")

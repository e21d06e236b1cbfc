"""Starts the workers of one machine: their environment, their log files, and the request to a standby."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.elastic.utils.api import macros

from shared_core.checkpoint.command import Command
from shared_core.config import SwiftConfig
from shared_core.events import RUN
from shared_core.launcher.attempt import Attempt, WorkerPlaces
from shared_core.launcher.logs import ERROR_FILE, WorkerLogs
from shared_core.launcher.standby import clean_env
from shared_core.launcher.workers import LiveWorker, WorkerPool
from shared_core.protocol import worker_env
from shared_core.protocol.failure_policy import LOOP_LIMIT
from shared_core.protocol.request import Mode, StartRequest
from shared_core.protocol.worker_env import Resized


@dataclass(frozen=True)
class Program:
    """The user's program.

    Attributes:
        target: path or name.
        args: ``${local_rank}`` is substituted as torchrun does.
        first: modules that workers import before the program.
    """

    mode: Mode
    target: str
    args: tuple[str, ...] = ()
    preload: tuple[str, ...] = ()
    first: tuple[str, ...] = ()

    @property
    def command(self) -> Command:
        """By which checkpoints are found again."""
        return Command.of(self.target if self.mode == "module" else os.path.abspath(self.target), self.args, self.mode)


@dataclass(frozen=True)
class AgentOptions:
    """How the agent treats its workers.

    Attributes:
        run_id: name of the job (``--rdzv-id``).
        nproc: workers of this machine, at most.
        max_restarts: how many workers may be replaced in all.
        monitor_interval: between two looks for workers that are stopped, in seconds.
        local_addr: of this machine, if the user has named it.
        events: path of ``events.jsonl``; None writes none.
        grace_s: seconds between SIGTERM and SIGKILL when the job is ended.
        threads: intra-op threads that a fresh interpreter would use when ``OMP_NUM_THREADS`` is not set.
        loop_limit: see :class:`~shared_core.protocol.failure_policy.FailureBook`.
        store_port: of the first attempt's store for the script's process groups; 0 takes a free one.
        machines: how many there are at least, and at most.
        note: more text for the line at the start.
    """

    config: SwiftConfig
    run_id: str
    nproc: int
    max_restarts: int
    monitor_interval: float
    role: str = "default"
    local_addr: str | None = None
    event_log_handler: str = "null"
    virtual_local_rank: bool = False
    standbys: int = 1
    events: str | None = None
    grace_s: float = 5.0
    threads: int = 0
    loop_limit: int = LOOP_LIMIT
    signals: tuple[str, ...] = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
    store_port: int = 0
    machines: tuple[int, int] = (1, 1)
    note: str = ""
    secret: bytes = b""


@dataclass(frozen=True)
class AttemptStart:
    """What the workers of an attempt are started with.

    Attributes:
        store: where workers find the job's store, see :class:`~shared_core.protocol.worker_env.WorkerEnv`.
        address: of this machine, where there are several.
        line: what the attempt continues from, if the number of workers has changed.
    """

    places: WorkerPlaces
    attempt: Attempt
    store: str
    address: str
    line: Resized | None
    run_id: str


class Starter:
    """Starts workers. ``make_logs`` gets the ranks of this machine. ``config`` has the script's options of
    checkpoints, too.
    """

    def __init__(
        self,
        program: Program,
        options: AgentOptions,
        job_dir: Path,
        worker_pool: WorkerPool,
        make_logs: Callable[[list[int]], WorkerLogs],
    ) -> None:
        self._program, self._options, self._job_dir, self._worker_pool = program, options, job_dir, worker_pool
        self._make_logs = make_logs
        self._logs: WorkerLogs | None = None
        self._starts: dict[int, int] = {}
        self._tokens = 0
        self.config = options.config

    def use(self, config: SwiftConfig) -> None:
        self.config = config

    def open_logs(self, ranks: list[int]) -> WorkerLogs:
        """The log files; the first call makes them."""
        if self._logs is None:
            self._logs = self._make_logs(ranks)
            self._logs.start()
        return self._logs

    def start(self, local_rank: int, start: AttemptStart) -> None:
        """Ask for a worker; the worker pool tells when its process exists."""
        rank = start.places.ranks[local_rank]
        self._worker_pool.start(self._worker(local_rank, start, start.attempt.incarnations[rank]))

    def prepare(self, local_rank: int, start: AttemptStart) -> LiveWorker:
        """Ask for a hot standby: it becomes the next incarnation of its rank."""
        rank = start.places.ranks[local_rank]
        spare = self._worker(local_rank, start, start.attempt.incarnations[rank] + 1)
        spare.request.env[worker_env.SPARE] = "1"
        spare.spare = True
        self._worker_pool.start(spare)
        return spare

    def _worker(self, local_rank: int, start: AttemptStart, incarnation: int) -> LiveWorker:
        logs = self.open_logs(start.places.ranks)
        rank = start.places.ranks[local_rank]
        nth = self._starts.get(rank, 0)
        self._starts[rank] = nth + 1
        env = self._environment(local_rank, start)
        env[worker_env.INCARNATION] = str(incarnation)
        env[ERROR_FILE] = logs.error_file(local_rank, nth)
        threads = env.get("OMP_NUM_THREADS", "")
        self._tokens += 1
        request = StartRequest(
            token=self._tokens,
            mode=self._program.mode,
            target=self._program.target,
            args=tuple(macros.substitute(list(self._program.args), str(local_rank))),
            env=env,
            agent=os.getpid(),
            stdout=logs.stdout(local_rank),
            stderr=logs.stderr(local_rank),
            threads=int(threads) if threads.isdigit() else self._options.threads,
            first=self._program.first,
        )
        return LiveWorker(local_rank, rank, incarnation, request)

    def _environment(self, local_rank: int, start: AttemptStart) -> dict[str, str]:
        """What a worker finds in its environment, torchrun's variables and ours, except its incarnation and the error
        file.
        """
        places, attempt = start.places, start.attempt
        options, rank, world_size = self._options, places.ranks[local_rank], str(places.world_size)
        env = worker_env.left_environment(self._job_dir, rank) | clean_env(os.environ)
        env |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(local_rank),
            "GROUP_RANK": str(places.machine),
            "ROLE_RANK": str(rank),
            "ROLE_NAME": options.role,
            "LOCAL_WORLD_SIZE": str(places.local),
            "WORLD_SIZE": world_size,
            "GROUP_WORLD_SIZE": str(places.machines),
            "ROLE_WORLD_SIZE": world_size,
            "MASTER_ADDR": attempt.host,
            "MASTER_PORT": str(attempt.port),
            # A replacement must see what the failed worker saw, so replacements are not counted here.
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": str(options.max_restarts),
            "TORCHELASTIC_RUN_ID": options.run_id,
            "TORCHELASTIC_USE_AGENT_STORE": str(True),
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
            worker_env.JOB_DIR: str(self._job_dir),
            worker_env.STORE: start.store,
            worker_env.GENERATION: str(attempt.generation),
            worker_env.EVENTS: options.events or "",
            worker_env.CONFIG: self.config.to_json(),
            worker_env.RESTART: str(attempt.number),
            worker_env.COMMAND: self._program.command.to_json(),
            RUN: start.run_id,
        }
        if worker_env.HANDED_OVER in os.environ:
            env[worker_env.HANDED_OVER] = "1"
        if start.line is not None:
            env[worker_env.RESIZED] = start.line.to_json()
        if start.address:
            env[worker_env.ADDRESS] = start.address
            env[worker_env.JOB] = options.run_id
            env[worker_env.MACHINES] = json.dumps(attempt.ledger.machines)
        else:
            # For plain gloo groups, which would otherwise listen at the address of the machine's name.
            env.setdefault("GLOO_SOCKET_IFNAME", "lo")
        if options.virtual_local_rank:
            env["LOCAL_RANK"] = "0"
            env["CUDA_VISIBLE_DEVICES"] = _device(os.environ, local_rank)
        return env

    @property
    def logs_used(self) -> bool:
        return self._logs is not None and self._logs.used

    def close(self) -> None:
        if self._logs is not None:
            self._logs.stop()


def _device(environ: Mapping[str, str], local_rank: int) -> str:
    """The one device that a worker sees with ``--virtual-local-rank``, as in torchelastic. May raise ValueError."""
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return str(local_rank)
    devices = listed.split(",")
    if local_rank >= len(devices):
        raise ValueError(f"local_rank {local_rank} exceeds available GPUs in CUDA_VISIBLE_DEVICES={listed}")
    return devices[local_rank].strip()

"""Starts the workers of one machine: their environment, their log files, and the request to a standby."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.elastic.utils.api import macros

from shared_core.config import SwiftConfig
from shared_core.launcher.attempt import Attempt
from shared_core.launcher.environment import environment_of
from shared_core.launcher.logs import ERROR_FILE, WorkerLogs
from shared_core.launcher.options import AgentOptions, Program
from shared_core.launcher.places import WorkerPlaces
from shared_core.launcher.workers import LiveWorker, WorkerPool
from shared_core.protocol import worker_env
from shared_core.protocol.request import StartRequest
from shared_core.protocol.worker_env import Resized


@dataclass(frozen=True)
class AttemptStart:
    """What the workers of an attempt are started with.

    Attributes:
        store: where workers find the job's store, see :class:`~shared_core.protocol.worker_env.WorkerEnv`.
        address: of this machine, where there are several.
        line: what the attempt continues from, if the number of workers has changed.
        run_id: of this start of the job.
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
        rank = start.places.workers[local_rank].global_rank
        self._worker_pool.start(self._worker(local_rank, start, start.attempt.incarnations[rank]))

    def prepare(self, local_rank: int, start: AttemptStart) -> LiveWorker:
        """Ask for a hot standby: it becomes the next incarnation of its rank."""
        rank = start.places.workers[local_rank].global_rank
        spare = self._worker(local_rank, start, start.attempt.incarnations[rank] + 1)
        spare.request.env[worker_env.SPARE] = "1"
        spare.spare = True
        self._worker_pool.start(spare)
        return spare

    def _worker(self, local_rank: int, start: AttemptStart, incarnation: int) -> LiveWorker:
        logs = self.open_logs(start.places.ranks)
        rank = start.places.workers[local_rank].global_rank
        nth = self._starts.get(rank, 0)
        self._starts[rank] = nth + 1
        env = environment_of(
            start.places,
            local_rank,
            start.attempt,
            start.store,
            self._job_dir,
            self._options.events,
            self.config.to_json(),
            start.address,
            start.line,
            self._program.command,
            start.run_id,
        )
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

    @property
    def logs_used(self) -> bool:
        return self._logs is not None and self._logs.used

    def close(self) -> None:
        if self._logs is not None:
            self._logs.stop()

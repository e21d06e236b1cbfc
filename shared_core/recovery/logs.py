"""The log on disk of one rank, for peers that are rebuilt from a checkpoint (Swift, TPDS 2024, section 3).

Where a rank's parameters have no replica, its newcomer starts from the newest checkpoint and runs on from there with
the messages and results that the others have logged since. Logs are dropped in two phases: a checkpoint is committed,
every rank is told so by a collective that each batch has anyway, and what lies before the checkpoint *before* it goes.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from shared_core.cluster.jobdir import log_folder
from shared_core.cluster.worker import WorkerEnv
from shared_core.comm import Runtime
from shared_core.comm.archive import Archive
from shared_core.errors import RecoveryFailed, SwiftError


class Logs:
    """Opens the log on disk and cuts it back.

    Args:
        env: what the launcher told this worker.
        runtime: the groups.
        newest_top: batch top of the newest checkpoint that this rank knows to be committed; 0 for none.
        fall_back: goes back to a checkpoint with all ranks.
    """

    def __init__(
        self, env: WorkerEnv, runtime: Runtime, newest_top: Callable[[], int], fall_back: Callable[[str], Any]
    ) -> None:
        self._env, self._runtime, self._newest_top, self._fall_back = env, runtime, newest_top, fall_back
        self._mark: tuple[Any, torch.Tensor] | None = None
        self._commits = [0, 0]

    def open(self) -> None:
        """Log to disk from now on. A newcomer goes on with what its predecessor has left on this machine."""
        if self._runtime.archive is not None:
            return
        env = self._env
        mine = log_folder(env.config.log_dir, env.job_dir) / f"rank{env.rank}"
        folder = mine / f"attempt{env.restart}"
        for old in mine.glob("attempt*"):
            if old != folder:
                shutil.rmtree(old, ignore_errors=True)  # operations were counted anew
        owner = f"{env.job} rank {env.rank} attempt {env.restart}"
        make = Archive.reopen if folder.is_dir() else Archive
        self._runtime.unreadable = self._unreadable
        config = env.config
        archive = make(folder, ring_bytes=config.log_ring_bytes, segment_bytes=config.log_segment_bytes, owner=owner)
        self._runtime.open_archive(archive)

    def mark(self) -> None:
        """Tell all ranks that this one has published a batch top, and which checkpoint it knows to be committed; call
        right after the top. Nobody waits for it before the next one.

        What the ranks have all left behind is dropped from the logs.
        """
        if self._mark is not None:
            work, newest = self._mark
            work.wait()
            self._committed(int(newest))
        newest = torch.tensor(self._newest_top())
        checksums, self._runtime.checksums = self._runtime.checksums, False  # a newcomer may know of a newer one
        try:
            self._mark = dist.all_reduce(newest, op=dist.ReduceOp.MAX, async_op=True), newest
        finally:
            self._runtime.checksums = checksums

    def _committed(self, top: int) -> None:
        if top <= self._commits[1]:
            return
        self._commits = [self._commits[1], top]
        archive = self._runtime.archive
        if archive is None:
            return
        archive.drop_before(self._commits[0])
        if archive.stats.failed is not None:
            archive.restart()

    def _unreadable(self, error: SwiftError) -> None:
        self._fall_back(str(RecoveryFailed(f"rank {self._env.rank}: the log on disk cannot be read: {error}")))

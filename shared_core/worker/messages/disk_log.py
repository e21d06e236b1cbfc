"""The log on disk of one rank, for peers that are rebuilt from a checkpoint (Swift, TPDS 2024, section 3).

Where a rank's parameters have no replica, its newcomer starts from the newest checkpoint and runs on from there with
the messages and results that the others have logged since. Logs are dropped in two phases: a checkpoint is committed,
every rank is told so by a collective that each batch has anyway, and what lies before the checkpoint *before* it goes.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shared_core.config import ranges_of
from shared_core.errors import ConfigError, RecoveryFailed, SwiftError
from shared_core.protocol.worker_env import WorkerEnv
from shared_core.system.jobdir import log_folder, own
from shared_core.worker.comm import Runtime
from shared_core.worker.messages.archive import Archive

#: Who waits for a peer waits for its replay too, which may take longer than a program expects of an operation.
_PATIENCE = timedelta(days=1)


def together(groups: str, rank: int, world_size: int, local_world_size: int) -> tuple[int, ...]:
    """Ranks that start again together with ``rank``, itself among them: messages between them are not logged.

    Args:
        groups: ``worker``: each rank alone; ``machine``: the ranks of a machine; ``auto``: the second where there are
            several machines, else the first, and so is ``plan`` before anything is measured; else ranges of ranks, as
            ``0-3,4,5-7``. A rank that is not named is alone.
        rank: logical rank.
        world_size: number of ranks.
        local_world_size: number of ranks of each machine.

    Raises:
        ConfigError: if the ranges cannot be read, overlap, or name ranks that are not there.
    """
    if groups in ("auto", "plan"):
        groups = "machine" if world_size > local_world_size else "worker"
    if groups == "machine":
        first = rank - rank % local_world_size
        return tuple(range(first, first + local_world_size))
    for ranks in ranges_of(groups):
        if ranks.stop > world_size:
            raise ConfigError(
                f"log.groups={groups!r} names rank {ranks.stop - 1}; there are ranks 0 to {world_size - 1}"
            )
        if rank in ranks:
            return tuple(ranks)
    return (rank,)


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
        self._groups: list[tuple[int, frozenset[int]]] = []  # from a batch top on: who starts again together

    def open(self) -> None:
        """Log to disk from now on. A newcomer goes on with what its predecessor has left on this machine."""
        if self._runtime.archive is not None:
            return
        env = self._env
        nproc = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self.regroup(together(env.config.log.groups, env.rank, env.world_size, nproc))
        mine = log_folder(env.config.log.dir, env.job_dir) / f"rank{env.rank}"
        with suppress(OSError):  # a folder that cannot be made: the archive says so
            own(mine.parent)
        folder = mine / f"attempt{env.restart}"
        for old in mine.glob("attempt*"):
            if old != folder:
                shutil.rmtree(old, ignore_errors=True)  # operations were counted anew
        owner = f"{env.job} rank {env.rank} attempt {env.restart}"
        again = folder.is_dir()
        make = Archive.reopen if again else Archive
        self._runtime.unreadable = self._unreadable
        self._runtime.archived = lambda destination: destination not in self._groups[-1][1]
        for group in self._runtime.groups.values():
            group.timeout = max(group.timeout, _PATIENCE)
        config = env.config
        archive = make(folder, ring_bytes=config.log.ring_bytes, segment_bytes=config.log.segment_bytes, owner=owner)
        if again:
            archive.verify()  # what is damaged is written again by the replay, what is whole is not
        self._runtime.open_archive(archive)

    @property
    def together(self) -> tuple[int, ...]:
        """Ranks that have been in one group with this one since the checkpoint from which a newcomer may start: of
        what was sent to them not everything is logged. Without a log none.
        """
        return tuple(sorted(frozenset[int]().union(*(ranks for _, ranks in self._groups))))

    def regroup(self, ranks: Iterable[int]) -> None:
        """From now on these ranks, this one among them, start again together: messages between them are not logged."""
        self._groups.append((self._runtime.top, frozenset(ranks)))

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
        while len(self._groups) > 1 and self._groups[1][0] <= self._commits[0]:
            del self._groups[0]
        if archive.stats.failed is not None:
            archive.restart()

    def _unreadable(self, error: SwiftError) -> None:
        self._fall_back(str(RecoveryFailed(f"rank {self._env.rank}: the log on disk cannot be read: {error}")))

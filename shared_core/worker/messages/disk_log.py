"""The log on disk of one rank, for peers that are rebuilt from a checkpoint (Swift, TPDS 2024, section 3).

Where a rank's parameters have no replica, its replacement starts from the newest checkpoint and runs on from there with
the messages and results that the others have logged since. Logs are dropped in two phases: a checkpoint is committed,
every rank is told so by a collective that each batch has anyway, and what lies before the checkpoint *before* it goes.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch

from shared_core.config import ranges_of
from shared_core.errors import ConfigError
from shared_core.kinds import whole_of_environment
from shared_core.protocol.worker_env import WorkerEnv
from shared_core.system.jobdir import log_folder, own
from shared_core.worker.messages import log_budget
from shared_core.worker.messages.archive import Archive, Key
from shared_core.worker.messages.group_log import LogEntry, Logged, read_signature


def together(groups: str, rank: int, world_size: int, local_world_size: int) -> tuple[int, ...]:
    """Ranks that start again together with ``rank``, itself among them: messages between them are not logged (Swift's
    groups). ``groups``: ``worker``: each rank alone; ``machine``: the ranks of a machine; ``auto``: the second where
    there are several machines, else the first, and so is ``plan`` before anything is measured; else ranges of ranks, as
    ``0-3,4,5-7``. A rank that is not named is alone.

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


class DiskLog:
    """The log on disk of this rank. Nothing is logged before :meth:`open`, and ``archive`` is None."""

    def __init__(self, env: WorkerEnv) -> None:
        self._env = env
        self.archive: Archive | None = None
        self._note: dict[str, Any] = {}
        self._commits = [0, 0]
        self._put_before = 0
        self._groups: list[tuple[int, frozenset[int]]] = []  # from a step boundary on: who starts again together

    def open(self, boundary: int) -> bool:
        """Log to disk from step boundary ``boundary`` on. A replacement continues with what the failed worker has left
        on this machine, and reads all of it. Returns False if the log was open already.
        """
        if self.archive is not None:
            return False
        env = self._env
        nproc = whole_of_environment("LOCAL_WORLD_SIZE", 1)
        self.regroup(together(env.config.log.groups, env.rank, env.world_size, nproc), boundary)
        mine = log_folder(env.config.log.dir, env.job_dir) / f"rank{env.rank}"
        with suppress(OSError):  # a folder that cannot be made: the archive says so
            own(mine.parent)
        folder = mine / f"attempt{env.restart}"
        for old in mine.glob("attempt*"):
            if old != folder:
                shutil.rmtree(old, ignore_errors=True)  # operations were counted again
        owner = f"{env.job} rank {env.rank} attempt {env.restart}"
        again = folder.is_dir()
        config = env.config
        budget = config.log.budget_bytes
        size = log_budget.segment_bytes(config.log.segment_bytes, budget, env.world_size)
        archive = Archive(folder, ring_bytes=config.log.ring_bytes, segment_bytes=size, owner=owner, again=again)
        if budget:
            # Files of earlier attempts may still be there, and who failed may have had less than an equal part.
            first = not env.restart and not env.incarnation
            archive.lease(budget // env.world_size if first else archive.stats.bytes_on_disk)
        if again:
            archive.verify()  # what is damaged is written again by the replay, what is whole is not
        self.archive = archive
        return True

    @property
    def together(self) -> tuple[int, ...]:
        """Ranks that have been in one group with this one since the checkpoint from which a replacement may start: of
        what was sent to them not everything is logged. Empty without a log.
        """
        return tuple(sorted(frozenset[int]().union(*(ranks for _, ranks in self._groups))))

    def regroup(self, ranks: Iterable[int], boundary: int) -> None:
        """From ``boundary`` on these ranks start again together: what they send each other is not logged."""
        self._groups.append((boundary, frozenset(ranks)))

    def keep(self) -> tuple[int, int]:
        """Bytes that this log keeps of its lease, and those put since the last :meth:`checkpoint_due`."""
        if self.archive is None:
            return 0, 0
        return self.archive.keep(), self.archive.stats.bytes_put - self._put_before

    def lease(self, limit: int) -> None:
        if self.archive is not None:
            self.archive.lease(limit)

    def checkpoint_due(self) -> None:
        """What is put from now on is logged for a checkpoint that is made now."""
        if self.archive is not None:
            self._put_before = self.archive.stats.bytes_put

    def describe(self, note: dict[str, Any]) -> None:
        self._note = note

    def put_message(self, destination: int, channel: str, index: int, boundary: int, tensor: torch.Tensor) -> None:
        """Log a message as number ``index`` of ``channel``, unless its receiver, a global rank, starts again together
        with this rank. ``tensor`` is not copied: it must not change any more. May block for the disk.
        """
        if self.archive is not None and destination not in self._groups[-1][1]:
            self.archive.put(Key(channel, index, boundary, self._note), [tensor])

    def put_result(self, group: str, seq: int, entry: LogEntry, results: Sequence[torch.Tensor]) -> None:
        """Log copies of what a collective gave. May block for the disk."""
        if self.archive is not None:
            note = {"signature": entry.signature}
            self.archive.put(Key(group, seq, entry.boundary, note), [t.detach().clone() for t in results])

    def result(self, group: str, seq: int) -> Logged:
        """What was called as operation ``seq`` of a group, and copies of its results. May raise CorruptFile."""
        assert self.archive is not None
        key, results = self.archive.read(group, seq)
        return read_signature(key.note["signature"]), results

    def committed(self, boundary: int) -> None:
        """This checkpoint is committed: drop what is before the one before it; log again if stopped."""
        if boundary <= self._commits[1]:
            return
        self._commits = [self._commits[1], boundary]
        if self.archive is None:
            return
        self.archive.drop_before(self._commits[0])
        while len(self._groups) > 1 and self._groups[1][0] <= self._commits[0]:
            del self._groups[0]
        if self.archive.stats.failed is not None:
            self.archive.restart()

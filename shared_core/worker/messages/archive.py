"""A rank's append-only log on disk: the messages it sent and the results of its collectives.

A worker whose state nobody else holds is rebuilt from the newest checkpoint and from what its peers logged since
(Swift, TPDS 2024, section 3). ``put`` returns at once; one thread writes the records in order to segment files
(:mod:`shared_core.worker.messages.segments`), which go as whole files once a checkpoint makes them useless.

Nothing is synced to the device. What reached the page cache outlives the process; after a power cut the job goes back
to its newest checkpoint, as it does where the log is damaged.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from shared_core.errors import CorruptFile, WaitTimeout
from shared_core.events import console
from shared_core.resources import FULL
from shared_core.waiting import Wait
from shared_core.worker.messages import segments
from shared_core.worker.messages.archive_index import ArchiveRecord, Index, files
from shared_core.worker.messages.archive_writer import ArchiveWriter, Stats, Write, make_folder
from shared_core.worker.messages.segments import Key, SegmentPlace

__all__ = ["Archive", "Key", "Stats"]


class BudgetUsed(Exception):
    """There is room neither on disk, by ``log.budget_bytes``, nor in memory."""

    strerror = "log.budget_bytes and log.ring_bytes are used up"
    errno = -1


class Archive:
    """The log of one rank.

    A disk that fails does not fail training: logging stops, the user is told (once for each kind of error), and the
    segments are deleted: nothing can be replayed across a gap, and the next checkpoint may need the room.
    :meth:`restart` begins again.

    A job that goes back to a checkpoint with *all* its ranks removes its archives and makes new ones: its numbering
    starts again. A single replacement continues with the failed worker's: new records go to a new segment, and what is
    already there is not written again. Closed segments are taken by their index, their contents checked when they are
    read; the one that was open is read through. Damaged records are left out, missing segments are gaps, and a record
    the file ends in counts as never put.

    Thread-safe. ``put`` may block for ``stall_s``: do not hold a lock that others need.

    Args:
        folder: of the segments, this archive's alone; made if absent, private to the user.
        ring_bytes: so many bytes may wait for the disk; a single larger record is accepted when nothing else waits.
        segment_bytes: a segment takes no more records beyond this size.
        owner: name of the job and rank. Records of another owner are not read.
        stall_s: logging stops when ``put`` has waited for the disk for so long, in seconds.
        again: the folder may hold the log of another process, now dead.
        write: appends to a segment; None for the usual way.

    Raises:
        ValueError: the folder holds segments, and ``again`` is not said.
    """

    def __init__(
        self,
        folder: Path,
        *,
        ring_bytes: int = 256 << 20,
        segment_bytes: int = 64 << 20,
        owner: str = "",
        stall_s: float = 120.0,
        again: bool = False,
        write: Write | None = None,
    ) -> None:
        self.folder, self.owner = folder, owner
        self._ring_bytes, self._stall_s = ring_bytes, stall_s
        self._seed = segments.owner_seed(owner)
        self._changed = threading.Condition()  # guards the rest
        self._index, self._stats = Index(), Stats()
        self._told: set[int | None] = set()
        append = write or segments.write_all
        self._writer = ArchiveWriter(
            folder, self._seed, segment_bytes, append, self._changed, self._index, self._stats, self._stop
        )
        next_number = 0
        try:
            make_folder(folder)
            folder.chmod(0o700)
            if not again and next(files(folder), None) is not None:
                raise ValueError(f"{folder} holds a log: reopen it, or delete the folder")
            next_number, self._stats.bytes_on_disk = self._index.load(folder, self._seed)
        except OSError as error:
            with self._changed:
                self._stop(error)
        self._writer.start(next_number)

    # -- writing -----------------------------------------------------------------------------------

    def put(self, key: Key, tensors: Sequence[torch.Tensor]) -> None:
        """Log ``tensors`` without a copy: they must not change any more. A record that is already there is not written
        again; nothing is logged after :meth:`close`, or while logging is stopped.

        Tensors on another device are copied to the CPU before this returns.

        Raises:
            TypeError: the note of ``key`` is not plain data.
            ValueError: a tensor is sparse or quantized, or the note is too long.
        """
        name = (key.channel, key.index)
        with self._changed:
            self._index.note(*name)
            if self._closed_or_failed() or self._index.holds(*name):
                return
        held = [segments.plain(tensor) for tensor in tensors]
        header = segments.encode(key, held)
        record = ArchiveRecord(key, header, held, len(header) + sum(t.nbytes for t in held))
        with self._changed:
            self._wait_for_room(record.size)
            if self._closed_or_failed() or self._index.holds(*name):
                return
            self._writer.add(record)

    def drop_before(self, boundary: int) -> None:
        """Remove what waits from before step boundary ``boundary``, and the segments in which every record is older.
        The files are deleted in the background.
        """
        with self._changed:
            self._writer.drop_before(boundary)
            for segment in [one for one in self._index.segments if one.boundary < boundary]:
                self._index.drop(segment)
            self._changed.notify_all()

    def lease(self, limit: int) -> None:
        """Take at most so many bytes on disk from now on; what needs more waits in memory. What is
        already taken stays.
        """
        with self._changed:
            self._writer.lease(limit)

    def keep(self) -> int:
        """Give back half of what is free of the lease. Returns how many bytes may still be taken in all."""
        with self._changed:
            return self._writer.keep()

    def restart(self) -> None:
        """Log again, after logging stopped: to a new segment, from the next ``put`` on."""
        with self._changed:
            self._stats.failed = None

    def close(self, timeout_s: float = 60.0) -> None:
        """Write what waits and end the thread; the files stay. What is put later is not logged.

        Raises:
            WaitTimeout: the disk did not take it in ``timeout_s`` seconds.
        """
        with self._changed:
            self._writer.close()
        if not self._writer.join(timeout_s):
            raise WaitTimeout(f"the log in {self.folder} could not be closed in {timeout_s:g} s: its disk is stuck")

    # -- reading -----------------------------------------------------------------------------------

    @property
    def stats(self) -> Stats:
        """A copy of the numbers as they are now."""
        with self._changed:
            return replace(self._stats)

    def indices(self, channel: str) -> list[int]:
        """Numbers of the records of ``channel`` that are there, ascending."""
        with self._changed:
            return self._index.indices(channel)

    def first(self, channel: str, before: int | None = None) -> int | None:
        """The record from which on all are there, without a gap; None if the last of them is not there. ``before``: the
        last is the one before this; None for the newest that was put.
        """
        with self._changed:
            return self._index.first(channel, before)

    def read(self, channel: str, index: int) -> tuple[Key, list[torch.Tensor]]:
        """A record, bit for bit as it was put, in CPU tensors of its own.

        Raises:
            CorruptFile: it is damaged, and then no longer in the index, or was never there.
        """
        with self._changed:
            waiting, place = self._index.waiting.get((channel, index)), self._index.place(channel, index)
        if waiting is not None:
            key, tensors = segments.decode(waiting.header, waiting.size - len(waiting.header))
            for mine, theirs in zip(tensors, waiting.tensors, strict=True):
                if mine.numel():
                    segments.view_bytes(mine)[:] = segments.view_bytes(theirs)
            return key, tensors
        if place is None:
            raise CorruptFile(f"there is no message {index} of {channel} in {self.folder}")
        try:
            return segments.read_record(self._seed, place, channel, index)
        except CorruptFile:
            self._forget(channel, index, place)
            raise

    def verify(self) -> list[tuple[str, int]]:
        """Read every record in the files. Returns the (channel, index) of damaged ones, which leave the index."""
        with self._changed:
            places = self._index.in_files()
        damaged = []
        for channel, index, place in places:
            try:
                segments.read_record(self._seed, place, channel, index)
            except CorruptFile:
                if self._forget(channel, index, place):
                    damaged.append((channel, index))
        return damaged

    def _forget(self, channel: str, index: int, place: SegmentPlace) -> bool:
        with self._changed:
            return self._index.forget(channel, index, place)

    # -- inner: callers hold the condition ---------------------------------------------------------

    def _closed_or_failed(self) -> bool:
        return self._writer.closing or self._stats.failed is not None

    def _wait_for_room(self, size: int) -> None:
        def room() -> bool:
            used = self._stats.bytes_waiting
            return not used or used + size <= self._ring_bytes or self._closed_or_failed()

        if room():
            return
        self._stats.blocked_times += 1
        begin = time.monotonic()
        whom, ends = "its disk to take logged messages", "nothing more is logged to disk"
        try:
            Wait(f"the log in {self.folder}", whom, self._stall_s, bound="a fixed limit", ends=ends).until(
                self._changed, lambda: room() or self._writer.out_of_room
            )
            if not room():  # and none before this batch ends, which waits for this
                self._stop(BudgetUsed())
        except WaitTimeout:
            self._stop(TimeoutError(errno.ETIMEDOUT, f"the disk is too slow: waited {self._stall_s:g} s for it"))
        finally:
            self._stats.blocked_s += time.monotonic() - begin

    def _stop(self, error: Exception) -> None:
        """Drop all segments and log no more until :meth:`restart`."""
        why = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        number = getattr(error, "errno", None)
        self._stats.failed = why
        self._stats.stopped_times += 1
        for segment in list(self._index.segments):
            self._index.drop(segment)
        self._writer.discard()
        if number in self._told:
            return
        self._told.add(number)
        if isinstance(error, BudgetUsed):
            what_to_do = "it begins again after the next checkpoint. Give it more, or make checkpoints more often"
        else:
            see = "make room there" if number in FULL else "see to this disk"
            what_to_do = f"to have the log again, {see} or choose another folder"
        console(
            f"{self._who()}messages are no longer logged in {self.folder} ({why}). Training continues, but if a worker "
            f"fails whose state no other one holds, all workers start again. {what_to_do[0].upper()}{what_to_do[1:]}"
        )

    def _who(self) -> str:
        return f"{self.owner}: " if self.owner else ""

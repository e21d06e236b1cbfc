"""A rank's append-only log on disk: the messages it sent and the results of its collectives.

A worker whose state nobody else holds is rebuilt from the newest checkpoint and from what its peers logged since
(Swift, TPDS 2024, section 3). ``put`` returns at once; one thread writes the records in order to segment files
(:mod:`shared_core.worker.messages.segments`), which go as whole files once a checkpoint makes them useless.

Nothing is synced to the device. What reached the page cache outlives the process; after a power cut the job goes back
to its newest checkpoint, as it does where the log is damaged.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

from shared_core.errors import CorruptFile, WaitTimeout
from shared_core.events import console
from shared_core.resources import FULL
from shared_core.system import threads
from shared_core.waiting import Wait
from shared_core.worker.messages import log_budget, segments
from shared_core.worker.messages.segments import Key, Segment, SegmentPlace


class ArchiveRecord(NamedTuple):
    """One that waits for the disk. ``size`` is in bytes, of the header and the tensors."""

    key: Key
    header: bytes
    tensors: list[torch.Tensor]
    size: int


class Index:
    """Records by channel and index; ``segments``, the files that count, oldest first, and ``doomed`` ones, which are to
    be deleted. Callers hold the archive's condition.
    """

    def __init__(self) -> None:
        self.waiting: dict[tuple[str, int], ArchiveRecord] = {}
        self.segments: list[Segment] = []
        self.doomed: deque[Segment] = deque()
        self._places: dict[str, dict[int, SegmentPlace]] = {}
        self._newest: dict[str, int] = {}  # put, whether or not it can be read

    def load(self, folder: Path, seed: int) -> tuple[int, int]:
        """Take in the files there are. Returns the number of the next segment, and the bytes of those that are
        there. A file that cannot be used is passed over, with a line on the console. Raises OSError if the folder
        cannot be read.
        """
        next_number, damaged, loaded = 0, [], []
        for number, path in sorted(files(folder)):
            next_number = max(next_number, number + 1)
            try:
                segment, bad = segments.load_segment(path, seed, number)
            except (CorruptFile, OSError, ValueError) as error:
                console(f"a file of the log is passed over: {path}: {error}")
                continue
            next_number = max(next_number, segment.number + 1)
            loaded.append(segment)
            if segment.size > segments.START and not segment.entries and not bad:
                console(f"nothing in {path} can be used: it is truncated, damaged, or the log of another rank")
            for key in bad:
                damaged.append((key.channel, key.index))
                self.note(key.channel, key.index)
        # In the order they were written: a record that was put again after damage counts.
        for segment in sorted(loaded, key=lambda one: one.number):
            self.segments.append(segment)
            for channel, index, _, offset, header, payload in segment.entries:
                self.note(channel, index)
                self.add(channel, index, SegmentPlace(segment, offset, header, payload))
        if damaged:
            named = ", ".join(f"{index} of {channel}" for channel, index in damaged[:5])
            console(f"the log in {folder} has {len(damaged)} damaged message(s), left out: {named}")
        return next_number, sum(segment.size for segment in loaded)

    def note(self, channel: str, index: int) -> None:
        """A record was put, whether or not it can be read."""
        self._newest[channel] = max(index, self._newest.get(channel, index))

    def add(self, channel: str, index: int, place: SegmentPlace) -> None:
        self._places.setdefault(channel, {})[index] = place

    def forget(self, channel: str, index: int, place: SegmentPlace) -> bool:
        """Leave a damaged record out. False if another has taken its place, or it was dropped."""
        held = self._places.get(channel, {})
        if held.get(index) is not place:
            return False
        del held[index]
        return True

    def drop(self, segment: Segment) -> None:
        segment.gone = True
        self.segments.remove(segment)
        self.doomed.append(segment)
        for channel, index, *_ in segment.entries:
            held = self._places.get(channel, {})
            if index in held and held[index].segment is segment:
                del held[index]

    def holds(self, channel: str, index: int) -> bool:
        return index in self._places.get(channel, ()) or (channel, index) in self.waiting

    def place(self, channel: str, index: int) -> SegmentPlace | None:
        """Where a record is in the files; None if it is not there."""
        return self._places.get(channel, {}).get(index)

    def in_files(self) -> list[tuple[str, int, SegmentPlace]]:
        return [(channel, index, place) for channel, held in self._places.items() for index, place in held.items()]

    def indices(self, channel: str) -> list[int]:
        return sorted({*self._places.get(channel, ()), *(i for c, i in self.waiting if c == channel)})

    def first(self, channel: str, before: int | None) -> int | None:
        index = self._newest.get(channel) if before is None else before - 1
        if index is None or not self.holds(channel, index):
            return None
        while self.holds(channel, index - 1):
            index -= 1
        return index


def files(folder: Path) -> Iterator[tuple[int, Path]]:
    """(number, path) of the segments in a folder, in no order."""
    if not folder.is_dir():
        return
    for path in folder.iterdir():
        if path.suffix == segments.SUFFIX and path.stem.isdecimal():
            yield int(path.stem), path


@dataclass
class Stats:
    """Numbers of an archive; ``records`` and bytes written or put are those of this process.

    Attributes:
        bytes_on_disk: of the segments that are there now, with what is being written.
        bytes_put: written or not.
        bytes_waiting: put and not yet written.
        blocked_times: how often ``put`` had to wait for the disk.
        failed: why nothing is logged now; None while it is.
    """

    records: int = 0
    bytes_written: int = 0
    bytes_on_disk: int = 0
    bytes_put: int = 0
    bytes_waiting: int = 0
    blocked_times: int = 0
    blocked_s: float = 0.0
    stopped_times: int = 0
    failed: str | None = None


def _most(record: ArchiveRecord) -> int:
    return segments.START + segments.FIXED + record.size


def make_folder(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)


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
    ) -> None:
        self.folder, self.owner = folder, owner
        self._ring_bytes, self._segment_bytes, self._stall_s = ring_bytes, segment_bytes, stall_s
        self._seed = segments.owner_seed(owner)
        self._changed = threading.Condition()  # guards the index, the numbers and what waits
        self._index, self._stats = Index(), Stats()
        self._told: set[int | None] = set()
        self._ring: deque[ArchiveRecord] = deque()
        self._lease: int | None = None
        self._reserved = 0  # for the record that is written now
        self._closing = False
        # The thread's alone.
        self._open: Segment | None = None
        self._next_number = 0
        try:
            make_folder(folder)
            folder.chmod(0o700)
            if not again and next(files(folder), None) is not None:
                raise ValueError(f"{folder} holds a log: reopen it, or delete the folder")
            self._next_number, self._stats.bytes_on_disk = self._index.load(folder, self._seed)
        except OSError as error:
            with self._changed:
                self._stop(error)
        self._thread = threads.start(self._run, name="swift-archive")

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
            self._ring.append(record)
            self._index.waiting[name] = record
            self._stats.bytes_waiting += record.size
            self._stats.bytes_put += record.size
            self._changed.notify_all()

    def drop_before(self, boundary: int) -> None:
        """Drop what is older than a step boundary, segments as a whole; they are deleted in the background."""
        with self._changed:
            while self._ring and self._ring[0].key.boundary < boundary:
                record = self._ring.popleft()
                del self._index.waiting[(record.key.channel, record.key.index)]
                self._stats.bytes_waiting -= record.size
            for segment in [one for one in self._index.segments if one.boundary < boundary]:
                self._index.drop(segment)
            self._changed.notify_all()

    def lease(self, limit: int) -> None:
        """Take at most so many bytes on disk, beside what is taken; what needs more waits in memory."""
        with self._changed:
            self._lease = limit
            self._changed.notify_all()

    def keep(self) -> int:
        """Give back half of what is free of the lease. Returns how many bytes may still be taken in all; see
        :mod:`shared_core.worker.messages.log_budget`.
        """
        with self._changed:
            assert self._lease is not None
            self._lease = log_budget.kept(self._lease, self._stats.bytes_on_disk + self._reserved)
            return self._lease

    def restart(self) -> None:
        """Log again, after logging stopped: to a new segment, from the next ``put`` on."""
        with self._changed:
            self._stats.failed = None

    def close(self, timeout_s: float = 60.0) -> None:
        """Write what waits, as far as there is room on disk, and end the thread; the files stay. What is put later is
        not logged. Raises WaitTimeout.
        """
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
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
        """A record, bit for bit as it was put, in CPU tensors of its own. Raises CorruptFile if it is damaged, and then
        no longer in the index, or was never there.
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
        return self._closing or self._stats.failed is not None

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
                self._changed, lambda: room() or self._out_of_room()
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
        self._ring.clear()
        self._index.waiting.clear()
        self._stats.bytes_waiting = 0
        self._changed.notify_all()
        if number in self._told:
            return
        self._told.add(number)
        if isinstance(error, BudgetUsed):
            what_to_do = "it begins again after the next checkpoint. Give it more, or make checkpoints more often"
        else:
            see = "make room there" if number in FULL else "see to this disk"
            what_to_do = f"to have the log again, {see} or choose another folder"
        owner = f"{self.owner}: " if self.owner else ""
        console(
            f"{owner}messages are no longer logged in {self.folder} ({why}). Training continues, but if a worker "
            f"fails whose state no other one holds, all workers start again. {what_to_do[0].upper()}{what_to_do[1:]}"
        )

    def _out_of_room(self) -> bool:
        """Whether what waits cannot be written within the lease, and nothing is being deleted."""
        return bool(self._ring) and not self._fits(self._ring[0]) and not self._index.doomed

    def _fits(self, record: ArchiveRecord) -> bool:
        return self._room_for(_most(record))

    def _room_for(self, more: int) -> bool:
        return self._lease is None or self._stats.bytes_on_disk + self._reserved + more <= self._lease

    def _count(self, segment: Segment, more: int) -> None:
        """Count what is going to be written, before it is."""
        segment.taken += more
        self._stats.bytes_on_disk += more

    def _is_next(self, record: ArchiveRecord) -> bool:
        """Whether the record is still wanted: it is not when logging was stopped meanwhile."""
        return bool(self._ring) and self._ring[0] is record

    # -- the thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        while self._step():
            pass
        if self._open is not None and not self._open.gone:
            with suppress(OSError):
                self._seal(self._open)

    def _step(self) -> bool:
        """Delete a dropped segment, write a record; False at the end. A call, so that its references end."""
        with self._changed:
            self._reserved = 0
            self._changed.wait_for(
                lambda: (self._ring and self._fits(self._ring[0])) or self._index.doomed or self._closing
            )
            doomed = self._index.doomed[0] if self._index.doomed else None
            record = self._ring[0] if self._ring and self._fits(self._ring[0]) else None
            self._reserved = _most(record) if record is not None else 0
        if doomed is not None:
            self._delete(doomed)
        if record is not None:
            try:
                self._store(record)
            except Exception as error:  # whatever it is, training continues
                with self._changed:
                    if self._is_next(record):
                        self._stop(error)
        return doomed is not None or record is not None

    def _store(self, record: ArchiveRecord) -> None:
        parts = [segments.view_bytes(tensor) for tensor in record.tensors]
        segment, key, stats = self._room(record), record.key, self._stats
        head = segments.frame(self._seed, segment, record.header, parts)
        payload = sum(part.nbytes for part in parts)
        with self._changed:
            self._reserved = 0
            self._count(segment, len(head) + payload)
        self._append(segment.fd, [head, *parts])
        if not os.fstat(segment.fd).st_nlink:
            raise FileNotFoundError(errno.ENOENT, "the file was deleted by someone else")
        with self._changed:
            offset, segment.size = segment.size, segment.size + len(head) + payload
            if not self._is_next(record):
                return
            if not segment.gone:
                segment.add(key, offset, len(record.header), payload)
                self._index.add(key.channel, key.index, SegmentPlace(segment, offset, len(record.header), payload))
            stats.records += 1
            stats.bytes_written += len(head) + payload
            stats.bytes_waiting -= record.size
            self._ring.popleft()
            del self._index.waiting[(key.channel, key.index)]
            self._changed.notify_all()

    def _room(self, record: ArchiveRecord) -> Segment:
        segment = self._open
        if segment is not None and not segment.gone and segment.entries:
            if segment.size + record.size > self._segment_bytes:
                self._seal(segment)
                segment = None
        with self._changed:
            if segment is not None and not segment.gone:
                # From here on it is not dropped for being older.
                segment.boundary = max(segment.boundary, record.key.boundary)
                return segment
        make_folder(self.folder)
        number, self._next_number = self._next_number, self._next_number + 1
        segment = Segment(self.folder / f"{number:08d}{segments.SUFFIX}", number, boundary=record.key.boundary)
        segment.fd = os.open(segment.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with self._changed:
            self._open = segment
            self._index.segments.append(segment)
            self._count(segment, segment.size)
            self._reserved -= segment.size
            if not self._is_next(record):  # stopped meanwhile
                self._index.drop(segment)
        self._append(segment.fd, [segments.segment_header(self._seed, number)])
        return segment

    def _seal(self, segment: Segment) -> None:
        """Close a segment with its index, where there is room: without one it is read through when it is reopened."""
        with suppress(OSError):
            text = segments.index_bytes(self._seed, segment)
            with self._changed:
                room = self._room_for(len(text))
                if room:
                    self._count(segment, len(text))
            if room:
                self._append(segment.fd, [text])
                segment.size += len(text)
        self._open = None
        segment.close()

    def _delete(self, segment: Segment) -> None:
        if segment is self._open:
            self._open = None
        with suppress(OSError):
            segment.close()
        with suppress(OSError):
            segment.path.unlink()
        with self._changed:
            self._index.doomed.popleft()
            self._stats.bytes_on_disk -= segment.taken
            self._changed.notify_all()

    def _append(self, fd: int, parts: Sequence[bytes | memoryview]) -> None:
        segments.write_all(fd, parts)

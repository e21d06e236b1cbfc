"""The thread that writes an archive's records to segment files, in order."""

from __future__ import annotations

import errno
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared_core.system import threads
from shared_core.worker.messages import log_budget, segments
from shared_core.worker.messages.archive_index import ArchiveRecord, Index
from shared_core.worker.messages.segments import Segment, SegmentPlace

#: Appends to a file.
Write = Callable[[int, Sequence[bytes | memoryview]], Any]


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


class ArchiveWriter:
    """Writes what is put, and deletes what is dropped.

    Args:
        seed: of the owner; see :func:`segments.owner_seed`.
        segment_bytes: a segment takes no more records beyond this size.
        changed: guards the index, the numbers and what waits.
        failed: told of an error, with the condition held: logging is to stop.
    """

    def __init__(
        self,
        folder: Path,
        seed: int,
        segment_bytes: int,
        write: Write,
        changed: threading.Condition,
        index: Index,
        stats: Stats,
        failed: Callable[[Exception], None],
    ) -> None:
        self._folder, self._seed, self._segment_bytes, self._write = folder, seed, segment_bytes, write
        self._changed, self._index, self._stats, self._failed = changed, index, stats, failed
        self._ring: deque[ArchiveRecord] = deque()
        self._lease: int | None = None
        self._reserved = 0  # for the record that is written now
        self._closing = False
        # The thread's alone.
        self._open: Segment | None = None
        self._next_number = 0
        self._thread: threading.Thread | None = None

    def start(self, next_number: int) -> None:
        self._next_number = next_number
        self._thread = threads.start(self._run, name="swift-archive")

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread's end, after :meth:`close`. False if it has not come in time."""
        if self._thread is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # -- callers hold the condition ----------------------------------------------------------------

    @property
    def closing(self) -> bool:
        return self._closing

    def add(self, record: ArchiveRecord) -> None:
        self._ring.append(record)
        self._index.waiting[(record.key.channel, record.key.index)] = record
        self._stats.bytes_waiting += record.size
        self._stats.bytes_put += record.size
        self._changed.notify_all()

    def discard(self) -> None:
        self._ring.clear()
        self._index.waiting.clear()
        self._stats.bytes_waiting = 0
        self._changed.notify_all()

    def drop_before(self, boundary: int) -> None:
        while self._ring and self._ring[0].key.boundary < boundary:
            record = self._ring.popleft()
            del self._index.waiting[(record.key.channel, record.key.index)]
            self._stats.bytes_waiting -= record.size

    def lease(self, limit: int) -> None:
        self._lease = limit
        self._changed.notify_all()

    def keep(self) -> int:
        """Give back a part of the lease. Returns how much is left, in bytes; see
        :mod:`shared_core.worker.messages.log_budget`.
        """
        assert self._lease is not None
        self._lease = log_budget.kept(self._lease, self._stats.bytes_on_disk + self._reserved)
        return self._lease

    @property
    def out_of_room(self) -> bool:
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

    def close(self) -> None:
        """Write what waits, then end. What has no room on disk is given up."""
        self._closing = True
        self._changed.notify_all()

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
        """Delete one dropped segment and write one record. Returns False at the end. A call of its own, so that
        references to the record's tensors end with it.
        """
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
                        self._failed(error)
        return doomed is not None or record is not None

    def _store(self, record: ArchiveRecord) -> None:
        parts = [segments.view_bytes(tensor) for tensor in record.tensors]
        segment, key, stats = self._room(record), record.key, self._stats
        head = segments.frame(self._seed, segment, record.header, parts)
        payload = sum(part.nbytes for part in parts)
        with self._changed:
            self._reserved = 0
            self._count(segment, len(head) + payload)
        self._write(segment.fd, [head, *parts])
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
        make_folder(self._folder)
        number, self._next_number = self._next_number, self._next_number + 1
        segment = Segment(self._folder / f"{number:08d}{segments.SUFFIX}", number, boundary=record.key.boundary)
        segment.fd = os.open(segment.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with self._changed:
            self._open = segment
            self._index.segments.append(segment)
            self._count(segment, segment.size)
            self._reserved -= segment.size
            if not self._is_next(record):  # stopped meanwhile
                self._index.drop(segment)
        self._write(segment.fd, [segments.segment_header(self._seed, number)])
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
                self._write(segment.fd, [text])
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


def _most(record: ArchiveRecord) -> int:
    """Bytes on disk of a file that holds this record alone."""
    return segments.START + segments.FIXED + record.size


def make_folder(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)

"""A rank's append-only log on disk: the messages it sent and the results of its collectives.

A worker whose state nobody else holds is rebuilt from the newest checkpoint and from what its peers logged since
(Swift, TPDS 2024, section 3). ``put`` returns at once; one thread writes the records in order to segment files
(:mod:`shared_core.worker.messages.segments`), which go as whole files once a checkpoint makes them useless.

Nothing is synced to the device. What reached the page cache outlives the process; after a power cut the job goes back
to its newest checkpoint, as it does where the log is damaged.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from shared_core.errors import CorruptFile, WaitTimeout
from shared_core.events import console
from shared_core.system import threads
from shared_core.waiting import Wait
from shared_core.worker.messages import segments
from shared_core.worker.messages.segments import Key, Place, Segment

__all__ = ["Archive", "Key", "Stats"]

#: What the system says when a file cannot grow: full device, quota, limit of the process.
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


@dataclass
class Stats:
    """Numbers of an archive.

    Attributes:
        records: written by this process.
        bytes_written: by this process.
        bytes_on_disk: of the segments that are there now.
        bytes_waiting: put and not yet written.
        blocked_times: how often ``put`` had to wait for the disk.
        blocked_s: how long in all, in seconds.
        stopped_times: how often logging stopped.
        failed: why nothing is logged now; None while it is.
    """

    records: int = 0
    bytes_written: int = 0
    bytes_on_disk: int = 0
    bytes_waiting: int = 0
    blocked_times: int = 0
    blocked_s: float = 0.0
    stopped_times: int = 0
    failed: str | None = None


class _Record(NamedTuple):
    key: Key
    header: bytes
    tensors: list[torch.Tensor]
    size: int


class Archive:
    """The log of one rank.

    A disk that fails does not fail training: logging stops, the user is told (once for each kind of error), and the
    segments are deleted: nothing can be replayed across a gap, and the next checkpoint may need the room.
    :meth:`restart` begins again.

    A job that goes back to a checkpoint with *all* its ranks removes its archives and makes new ones: its numbering
    starts again. A single newcomer reopens its predecessor's; what is already there is not written again.

    Thread-safe. ``put`` may block for as long as ``stall_s``: do not hold a lock that others need.

    Args:
        folder: of the segments, this archive's alone; made if absent, private to the user.
        ring_bytes: so many bytes may wait for the disk; a single larger record is let through when nothing else waits.
        segment_bytes: a segment takes no more records beyond this size.
        owner: name of the job and rank. Records of another owner are not read.
        stall_s: logging stops when ``put`` has waited for the disk for so long, in seconds.
        keep: what :meth:`reopen` is for.

    Raises:
        ValueError: the folder holds segments, which :meth:`reopen` would read.
    """

    def __init__(
        self,
        folder: Path,
        *,
        ring_bytes: int = 256 << 20,
        segment_bytes: int = 64 << 20,
        owner: str = "",
        stall_s: float = 120.0,
        keep: bool = False,
    ) -> None:
        self.folder, self.owner = folder, owner
        self._ring_bytes, self._segment_bytes, self._stall_s = ring_bytes, segment_bytes, stall_s
        self._seed = segments.owner_seed(owner)
        self._changed = threading.Condition()
        # Guarded by the condition.
        self._ring: deque[_Record] = deque()
        self._waiting: dict[tuple[str, int], _Record] = {}  # the ring by key
        self._places: dict[str, dict[int, Place]] = {}
        self._newest: dict[str, int] = {}  # put, whether or not it can be read
        self._segments: list[Segment] = []
        self._doomed: deque[Segment] = deque()  # to be deleted by the writer
        self._put = self._done = 0  # records
        self._stats = Stats()
        self._told: set[int | None] = set()
        self._closing = False
        # The writer's alone.
        self._open: Segment | None = None
        self._next_number = 0
        try:
            self._make_folder()
            self.folder.chmod(0o700)
            if not keep and next(_files(folder), None) is not None:
                raise ValueError(f"{folder} holds a log: reopen it, or delete the folder")
            self._load()
        except OSError as error:
            with self._changed:
                self._stop(error)
        self._thread = threads.start(self._run, name="swift-archive")

    @classmethod
    def reopen(
        cls,
        folder: Path,
        *,
        ring_bytes: int = 256 << 20,
        segment_bytes: int = 64 << 20,
        owner: str = "",
        stall_s: float = 120.0,
    ) -> Archive:
        """The archive another process, now dead, left in ``folder``; new records go to a new segment.

        Closed segments are taken by their index, their contents checked when they are read; the one that was open is
        read through. Damaged records are left out, missing segments are gaps, and a record the file ends in counts
        as never put.
        """
        return cls(folder, ring_bytes=ring_bytes, segment_bytes=segment_bytes, owner=owner, stall_s=stall_s, keep=True)

    # -- writing -----------------------------------------------------------------------------------

    def put(self, key: Key, tensors: Sequence[torch.Tensor]) -> None:
        """Log ``tensors``, which must not change any more. A record that is already there is not written again.

        Tensors on another device are copied to the CPU before this returns.

        Raises:
            TypeError: the note of ``key`` is not plain data.
            ValueError: a tensor is sparse or quantized.
        """
        name = (key.channel, key.index)
        with self._changed:
            self._newest[key.channel] = max(key.index, self._newest.get(key.channel, key.index))
            if self._closed_or_failed() or self._holds(*name):
                return
        held = [segments.plain(tensor) for tensor in tensors]
        header = segments.encode(key, held)
        record = _Record(key, header, held, len(header) + sum(t.numel() * t.element_size() for t in held))
        with self._changed:
            self._wait_for_room(record.size)
            if self._closed_or_failed() or self._holds(*name):
                return
            self._ring.append(record)
            self._waiting[name] = record
            self._stats.bytes_waiting += record.size
            self._put += 1
            self._changed.notify_all()

    def flush(self, timeout_s: float) -> None:
        """Return when what was put before is in the files, and what was dropped is deleted. A killed process does
        not lose it then. Returns at once while logging is stopped; see ``stats.failed``.

        Raises:
            WaitTimeout: the disk did not take it in ``timeout_s`` seconds.
        """
        with self._changed:
            target = self._put

            def reached() -> bool:
                return self._stats.failed is not None or (self._done >= target and not self._doomed)

            if not self._changed.wait_for(reached, timeout_s):
                raise WaitTimeout(
                    f"{target - self._done} message(s) were not written to {self.folder} in {timeout_s:g} s: "
                    "the disk is slow or does not answer; try again, or put the log on another disk"
                )

    def drop_before(self, top: int) -> None:
        """Remove the segments in which every record is older than batch top ``top``. The files are deleted in the
        background.
        """
        with self._changed:
            for segment in [one for one in self._segments if one.top < top]:
                self._drop(segment)
            self._changed.notify_all()

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
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise WaitTimeout(f"the log in {self.folder} could not be closed in {timeout_s:g} s: its disk is stuck")

    def remove(self, timeout_s: float = 60.0) -> None:
        """Close without writing what waits, and delete the folder.

        Raises:
            WaitTimeout: the disk did not answer in ``timeout_s`` seconds.
        """
        with self._changed:
            self._discard()
        self.close(timeout_s)
        shutil.rmtree(self.folder, ignore_errors=True)

    # -- reading -----------------------------------------------------------------------------------

    @property
    def stats(self) -> Stats:
        """Numbers as they are now."""
        with self._changed:
            return replace(self._stats)

    def channels(self) -> list[str]:
        """Channels of which there are records."""
        with self._changed:
            return sorted(
                {channel for channel, places in self._places.items() if places} | {c for c, _ in self._waiting}
            )

    def indices(self, channel: str) -> list[int]:
        """Records of ``channel`` that are there, in order."""
        with self._changed:
            return sorted({*self._places.get(channel, ()), *(i for c, i in self._waiting if c == channel)})

    def first(self, channel: str, before: int | None = None) -> int | None:
        """The record from which on all are there, without a gap; None if the last of them is not there.

        Args:
            channel: of the records.
            before: they end before this one; at the newest put if it is None.
        """
        with self._changed:
            index = self._newest.get(channel) if before is None else before - 1
            if index is None or not self._holds(channel, index):
                return None
            while self._holds(channel, index - 1):
                index -= 1
            return index

    def read(self, channel: str, index: int) -> tuple[Key, list[torch.Tensor]]:
        """A record, bit for bit as it was put, in tensors of its own.

        Raises:
            CorruptFile: it is damaged, and then no longer in the index, or was never there.
        """
        with self._changed:
            waiting = self._waiting.get((channel, index))
            place = self._places.get(channel, {}).get(index)
        if waiting is not None:
            key, tensors = segments.decode(waiting.header, waiting.size - len(waiting.header))
            for mine, theirs in zip(tensors, waiting.tensors, strict=True):
                if mine.numel():
                    segments.view_bytes(mine)[:] = segments.view_bytes(theirs)
            return key, tensors
        if place is None:
            raise CorruptFile(
                f"there is no message {index} of {channel} in {self.folder}: go back to the newest checkpoint"
            )
        try:
            return segments.read_record(self._seed, place, channel, index)
        except CorruptFile:
            self._forget(channel, index, place)
            raise

    def verify(self) -> list[tuple[str, int]]:
        """Read every record in the files. Returns the (channel, index) of those that are damaged, which are no longer
        in the index then.
        """
        with self._changed:
            places = [(channel, i, place) for channel, held in self._places.items() for i, place in held.items()]
        damaged = []
        for channel, index, place in places:
            try:
                segments.read_record(self._seed, place, channel, index)
            except CorruptFile:
                if self._forget(channel, index, place):
                    damaged.append((channel, index))
        return damaged

    # -- inner: callers hold the condition ---------------------------------------------------------

    def _closed_or_failed(self) -> bool:
        return self._closing or self._stats.failed is not None

    def _holds(self, channel: str, index: int) -> bool:
        return index in self._places.get(channel, ()) or (channel, index) in self._waiting

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
                self._changed, room
            )
        except WaitTimeout:
            self._stop(TimeoutError(errno.ETIMEDOUT, f"the disk is too slow: waited {self._stall_s:g} s for it"))
        finally:
            self._stats.blocked_s += time.monotonic() - begin

    def _drop(self, segment: Segment) -> None:
        """Forget the records of a segment and have its file deleted."""
        segment.gone = True
        self._segments.remove(segment)
        self._doomed.append(segment)
        for channel, index, *_ in segment.entries:
            held = self._places.get(channel, {})
            if index in held and held[index].segment is segment:
                del held[index]

    def _discard(self) -> None:
        """Forget what waits."""
        self._done += len(self._ring)
        self._ring.clear()
        self._waiting.clear()
        self._stats.bytes_waiting = 0
        self._changed.notify_all()

    def _stop(self, error: Exception) -> None:
        """Log no more until :meth:`restart`."""
        why = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        number = getattr(error, "errno", None)
        self._stats.failed = why
        self._stats.stopped_times += 1
        for segment in list(self._segments):
            self._drop(segment)
        self._discard()
        if number in self._told:
            return
        self._told.add(number)
        who = f"{self.owner}: " if self.owner else ""
        what_to_do = "make room there" if number in _FULL else "see to this disk"
        console(
            f"{who}messages are no longer logged in {self.folder} ({why}). Training goes on, but when a worker is lost "
            "whose state no other one holds, the job goes back to its newest checkpoint. "
            f"To have the log again, {what_to_do} or choose another folder"
        )

    # -- inner: loading ----------------------------------------------------------------------------

    def _make_folder(self) -> None:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def _load(self) -> None:
        """Fill the index from the files there are."""
        damaged: list[tuple[str, int]] = []
        loaded: list[Segment] = []
        for number, path in sorted(_files(self.folder)):
            self._next_number = max(self._next_number, number + 1)
            try:
                segment, bad = segments.load_segment(path, self._seed, number)
            except (CorruptFile, OSError, ValueError) as error:
                console(f"a file of the log is passed over: {path}: {error}")
                continue
            self._next_number = max(self._next_number, segment.number + 1)
            loaded.append(segment)
            if segment.size > segments.START and not segment.entries and not bad:
                console(f"nothing in {path} can be used: it is cut off, damaged, or the log of another rank")
            for key in bad:
                damaged.append((key.channel, key.index))
                self._newest[key.channel] = max(key.index, self._newest.get(key.channel, key.index))
        # In the order they were written: a record that was put again after damage counts.
        for segment in sorted(loaded, key=lambda one: one.number):
            self._segments.append(segment)
            self._stats.bytes_on_disk += segment.size
            for channel, index, _, offset, header, payload in segment.entries:
                self._newest[channel] = max(index, self._newest.get(channel, index))
                self._places.setdefault(channel, {})[index] = Place(segment, offset, header, payload)
        if damaged:
            named = ", ".join(f"{index} of {channel}" for channel, index in damaged[:5])
            console(f"the log in {self.folder} has {len(damaged)} damaged message(s), left out: {named}")

    def _forget(self, channel: str, index: int, place: Place) -> bool:
        """Leave a damaged record out of the index. Returns whether it was still meant to be there."""
        with self._changed:
            held = self._places.get(channel, {})
            if held.get(index) is not place:
                return False
            del held[index]
            return True

    # -- inner: the writer -------------------------------------------------------------------------

    def _run(self) -> None:
        while self._step():
            pass
        if self._open is not None and not self._open.gone:
            with contextlib.suppress(OSError):
                self._seal(self._open)

    def _step(self) -> bool:
        """Delete one dropped segment and write one record. Returns False at the end. References to the record's
        tensors end with the call.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._ring or self._doomed or self._closing)
            doomed = self._doomed[0] if self._doomed else None
            record = self._ring[0] if self._ring else None
        if doomed is not None:
            self._delete(doomed)
        if record is not None:
            try:
                self._store(record)
            except Exception as error:  # whatever it is, training goes on
                with self._changed:
                    if self._is_next(record):
                        self._stop(error)
        return doomed is not None or record is not None

    def _is_next(self, record: _Record) -> bool:
        """Whether the record is still wanted: it is not when logging was stopped meanwhile."""
        return bool(self._ring) and self._ring[0] is record

    def _store(self, record: _Record) -> None:
        parts = [segments.view_bytes(tensor) for tensor in record.tensors]
        segment = self._room(record)
        head = segments.frame(self._seed, segment, record.header, parts)
        payload = sum(part.nbytes for part in parts)
        self._write(segment.fd, [head, *parts])
        if not os.fstat(segment.fd).st_nlink:
            raise FileNotFoundError(errno.ENOENT, "the file was deleted by someone else")
        with self._changed:
            offset, segment.size = segment.size, segment.size + len(head) + payload
            self._stats.bytes_on_disk += len(head) + payload
            if not self._is_next(record):
                return
            if not segment.gone:
                segment.add(record.key, offset, len(record.header), payload)
                place = Place(segment, offset, len(record.header), payload)
                self._places.setdefault(record.key.channel, {})[record.key.index] = place
            self._stats.records += 1
            self._stats.bytes_written += len(head) + payload
            self._stats.bytes_waiting -= record.size
            self._ring.popleft()
            del self._waiting[(record.key.channel, record.key.index)]
            self._done += 1
            self._changed.notify_all()

    def _room(self, record: _Record) -> Segment:
        """The segment the record goes to."""
        segment = self._open
        if segment is not None and not segment.gone and segment.entries:
            if segment.size + record.size > self._segment_bytes:
                self._seal(segment)
                segment = None
        with self._changed:
            if segment is not None and not segment.gone:
                segment.top = max(segment.top, record.key.top)  # from here on it is not dropped for being older
                return segment
        self._make_folder()
        number, self._next_number = self._next_number, self._next_number + 1
        segment = Segment(self.folder / f"{number:08d}{segments.SUFFIX}", number, top=record.key.top)
        segment.fd = os.open(segment.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with self._changed:
            self._open = segment
            self._segments.append(segment)
            self._stats.bytes_on_disk += segment.size
            if not self._is_next(record):  # stopped meanwhile
                self._drop(segment)
        self._write(segment.fd, [segments.segment_header(self._seed, number)])
        return segment

    def _write(self, fd: int, parts: Sequence[bytes | memoryview[Any]]) -> None:
        """Append to a segment. Tests put a slow disk here."""
        segments.write_all(fd, parts)

    def _seal(self, segment: Segment) -> None:
        """Close a segment with its index. Without one it is read through when reopened, so a full disk is no harm."""
        with contextlib.suppress(OSError):
            text = segments.index_bytes(self._seed, segment)
            self._write(segment.fd, [text])
            with self._changed:
                segment.size += len(text)
                self._stats.bytes_on_disk += len(text)
        self._open = None
        segment.close()

    def _delete(self, segment: Segment) -> None:
        if segment is self._open:
            self._open = None
        with contextlib.suppress(OSError):
            segment.close()
        with contextlib.suppress(OSError):
            segment.path.unlink()
        with self._changed:
            self._doomed.popleft()
            self._stats.bytes_on_disk -= segment.size
            self._changed.notify_all()


def _files(folder: Path) -> Iterator[tuple[int, Path]]:
    """(number, path) of the segments in a folder."""
    if not folder.is_dir():
        return
    for path in folder.iterdir():
        if path.suffix == segments.SUFFIX and path.stem.isdecimal():
            yield int(path.stem), path

"""The log of one group in memory: results and inputs a replacement or a survivor that is behind may still need."""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from shared_core.errors import CorruptFile
from shared_core.events import console_once
from shared_core.faults import inject
from shared_core.resources import what_to_do, write_all

#: (operation, shapes, dtypes, root or reduce operation): what a replayed call must match.
Signature = tuple[str, tuple[tuple[int, ...], ...], tuple[str, ...], int]
#: What was called, and what it gave.
Logged = tuple[Signature, list[torch.Tensor]]


def read_signature(raw: Sequence[Any]) -> Signature:
    """Inverse of JSON, which has turned tuples into lists."""
    name, shapes, dtypes, detail = raw
    return name, tuple(tuple(shape) for shape in shapes), tuple(dtypes), detail


def same_call(one: Signature, two: Signature) -> bool:
    """Whether two members called the same operation: a scalar and a vector of length one are the same to gloo, and
    DeepSpeed's clipping passes the one on one stage and the other on another. So numbers of elements are compared,
    not shapes.
    """
    sizes = [[math.prod(shape) for shape in each[1]] for each in (one, two)]
    return sizes[0] == sizes[1] and (one[0], one[2], one[3]) == (two[0], two[2], two[3])


@dataclass
class LogEntry:
    """One logged collective. Tensors are on the CPU.

    Attributes:
        boundary: index of the step boundary before it.
        results: the same on every member; None while spilled, empty where ``redo`` is given.
        redo: of operations whose result differs by rank: starts the operation again on an inner group, from ``kept``,
            into scratch outputs.
        pooled: ``results``, or else ``kept``, came from the buffer pool.
        borrowed: ``results`` are the program's memory, which it overwrites later; see :meth:`GroupLog.own`.
        spilled: of each result, the offset in the spill file of its step boundary, shape and dtype.
    """

    signature: Signature
    boundary: int
    results: list[torch.Tensor] | None
    redo: Callable[[Any], Any] | None = None
    kept: list[torch.Tensor] = field(default_factory=list)
    pooled: bool = False
    borrowed: bool = False
    spilled: list[tuple[int, tuple[int, ...], torch.dtype]] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes held in memory; borrowed results count as none."""
        results = () if self.borrowed else self.results or ()
        return sum(t.nbytes for t in (*results, *self.kept))


class BufferPool:
    """Flat CPU buffers for results, used again when the log drops them: in steady state nothing is allocated, and sizes
    no longer asked for are let go. Callers hold the runtime's lock.
    """

    #: Sizes not asked for during so many step boundaries are let go.
    KEEP_BOUNDARIES = 1

    def __init__(self) -> None:
        self._free: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}
        self._asked: dict[tuple[int, torch.dtype], int] = {}
        self._boundaries = 0

    def take(self, like: torch.Tensor) -> torch.Tensor:
        """A buffer with the shape, layout and dtype of ``like``, contents undefined.

        The layout counts: which rank's part gloo adds first depends on an element's place in memory.
        """
        key = (like.numel(), like.dtype)
        self._asked[key] = self._boundaries
        free = self._free.get(key)
        if free:
            flat = free.pop()
        else:
            flat = torch.empty(like.numel(), dtype=like.dtype)
        if like.is_contiguous():
            return flat.view(like.shape)
        return flat.as_strided(like.shape, torch.empty_like(like).stride())

    def give(self, tensors: Iterable[torch.Tensor]) -> None:
        """Return buffers, which nobody may use any more."""
        for tensor in tensors:
            self._free.setdefault((tensor.numel(), tensor.dtype), []).append(tensor.as_strided((tensor.numel(),), (1,)))

    def next_boundary(self) -> None:
        """A step boundary is behind: let go of sizes that are no longer asked for."""
        self._boundaries += 1
        for key in [key for key in self._free if self._boundaries - self._asked.get(key, 0) > self.KEEP_BOUNDARIES]:
            del self._free[key]


class GroupLog:
    """Entries by sequence number, dropped by step boundary, spilled to disk above a limit.

    What is spilled lies in one file for each step boundary, which goes with its last entry: the disk never holds more
    than what can still be asked for.

    Not thread-safe: callers hold the runtime's lock.
    """

    def __init__(self, pool: BufferPool) -> None:
        self.entries: dict[int, LogEntry] = {}
        self.nbytes = 0
        self._pool = pool
        self._spill_files: dict[int, Any] = {}

    def put(self, seq: int, entry: LogEntry) -> None:
        self.entries[seq] = entry
        self.nbytes += entry.nbytes

    def own(self, entry: LogEntry) -> None:
        """Copy results that are the program's memory to pooled buffers; nothing for others."""
        if entry.borrowed and entry.results is not None:
            buffers = [self._pool.take(t) for t in entry.results]
            for buffer, result in zip(buffers, entry.results, strict=True):
                buffer.copy_(result.detach())
            entry.results, entry.borrowed, entry.pooled = buffers, False, True
            self.nbytes += entry.nbytes

    def borrowed(self) -> Iterator[tuple[int, LogEntry]]:
        return ((seq, entry) for seq, entry in self.entries.items() if entry.borrowed)

    def drop(self, seq: int) -> None:
        """Drop one entry; its pooled buffers may be used again at once."""
        entry = self.entries.pop(seq)
        self.nbytes -= entry.nbytes
        if entry.pooled and entry.results is not None:
            self._pool.give(entry.results or entry.kept)

    def drop_before(self, boundary: int) -> None:
        """Drop what was issued before a step boundary, up to the first newer entry: mostly all of it."""
        gone = []
        for seq, entry in self.entries.items():
            if entry.boundary >= boundary:
                break
            gone.append(seq)
        for seq in gone:
            self.drop(seq)
        for spilled in [each for each in self._spill_files if each < boundary]:
            # An operation that finished late stays behind entries of the next step boundary for a while.
            if all(entry.boundary != spilled for entry in self.entries.values()):
                self._spill_files.pop(spilled).close()

    def spill(self, keep_bytes: int) -> int:
        """Move the oldest results to unlinked temporary files until at most ``keep_bytes`` stay in memory. Returns
        bytes moved. Raises OSError if the disk does not take them; all that it did not take is in memory as before.
        """
        moved = 0
        for entry in self.entries.values():
            if self.nbytes <= keep_bytes:
                break
            if not entry.results or entry.redo is not None or entry.borrowed:
                continue
            inject.point("spill")
            if entry.boundary not in self._spill_files:
                # Unbuffered: what a full disk has refused must not be written, and refused, again by a later call.
                file = tempfile.TemporaryFile(prefix="swift-log-", dir=self.folder, buffering=0)
                self._spill_files[entry.boundary] = file
            file = self._spill_files[entry.boundary]
            spilled = []
            size = entry.nbytes
            for tensor in entry.results:
                offset = file.seek(0, os.SEEK_END)
                write_all(file.fileno(), tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
                spilled.append((offset, tuple(tensor.shape), tensor.dtype))
            entry.spilled = spilled
            if entry.pooled:
                self._pool.give(entry.results)
                entry.pooled = False
            entry.results = None
            self.nbytes -= size
            moved += size
        return moved

    @property
    def folder(self) -> str:
        return os.environ.get("TMPDIR") or tempfile.gettempdir()

    def results(self, seq: int) -> list[torch.Tensor]:
        """Results of a logged collective: the log's own tensors, not to be written, or new ones if they were spilled.
        Raises CorruptFile if the disk does not give them back.
        """
        entry = self.entries[seq]
        self.own(entry)
        if entry.results is not None:
            return entry.results
        out = []
        for offset, shape, dtype in entry.spilled or ():
            flat = torch.empty(shape, dtype=dtype)
            if flat.numel():
                file = self._spill_files[entry.boundary]
                file.seek(offset)
                view = flat.view(-1).view(torch.uint8)
                _read_all(file, view.numpy().data, self.folder)
            out.append(flat)
        return out


def _read_all(file: Any, into: memoryview, folder: str) -> None:
    while into:
        try:
            got = file.readinto(into)
        except OSError as error:
            raise CorruptFile(f"logged messages cannot be read from their file in {folder}: {error}") from error
        if not got:
            raise CorruptFile(f"logged messages are missing from their file in {folder}")
        into = into[got:]


#: A disk that has refused is tried again after so long, in seconds.
RETRY_S = 10.0


class Spilling:
    """The log of one rank. Not thread-safe: callers hold the runtime's lock. What the disk refuses stays in memory: two
    step boundaries' worth at most, and nothing is lost.
    """

    def __init__(self, rank: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._rank, self._clock = rank, clock
        self._next, self._told = 0.0, False

    def spill(self, log: GroupLog, keep_bytes: int) -> int:
        """As :meth:`GroupLog.spill`, but where the disk refuses, fewer bytes or none, and no error. Retries
        after ``RETRY_S``.
        """
        if self._clock() < self._next:
            return 0
        before = log.nbytes
        try:
            return log.spill(keep_bytes)
        except OSError as error:
            self._next = self._clock() + RETRY_S
            if not self._told:
                self._told = True
                console_once(
                    "spill",
                    f"rank {self._rank}: logged messages stay in memory, beyond log.spill_bytes={keep_bytes}: "
                    f"the folder for temporary files {log.folder} cannot be written {what_to_do(error)}, or set "
                    "TMPDIR to another folder. The job continues",
                )
            return before - log.nbytes

"""The logs of collectives, kept until no replacement and no survivor that is behind can need them."""

from __future__ import annotations

import ctypes
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from weakref import WeakValueDictionary

import torch

from shared_core.resources import map_file
from shared_core.worker.comm.groups import Groups, GroupState
from shared_core.worker.comm.op import KeptResults, Op, RunAgain, input_checksum
from shared_core.worker.comm.state import SharedState
from shared_core.worker.messages.disk_log import DiskLog
from shared_core.worker.messages.group_log import BufferPool, LogEntry, Logged, Spilling

#: A rank that waits for a peer also waits for its replay, which may take longer than a program expects of an operation.
_REPLAY = timedelta(days=1)
#: Gradients are copied for late ranks only after these were waited for: as long as the copy takes, and at least this.
_MAX_WAIT_S, _COPIED_PER_S = 0.05, 2e9
_POLL_S = 1e-4


class CollectiveResults:
    """The logs of all groups, in memory and on disk.

    Attributes:
        pool: buffers for results, on the CPU. Guarded by the runtime's lock.
        max_bytes: in memory, for each group; what is above is spilled to a file.
        spilled_bytes: moved to such files so far.
        peak_bytes: the most that one group's log took of memory.
        sharded: parameters are divided over the ranks and gathered: their shards are logged, not what was gathered.
        padded: inputs of reduce-scatter contain uninitialised memory, so they have no checksum.
        lent: nobody overwrites the inputs of operations, so they are logged without a copy.
    """

    def __init__(
        self,
        state: SharedState,
        groups: Groups,
        disk: DiskLog,
        pool: BufferPool,
        max_bytes: int,
        marks: BoundaryMarks | None = None,
    ) -> None:
        self._state, self._groups, self._disk, self.pool, self.max_bytes = state, groups, disk, pool, max_bytes
        self._marks = marks
        self._spilling = Spilling(state.rank)
        self.spilled_bytes = self.peak_bytes = 0
        self.inputs = KeptInputs()
        self.sharded = self.padded = self.lent = False
        self._forgets = False

    def forget_all(self) -> None:
        """Keep nothing from now on: no worker of this job is replaced."""
        self._forgets = True

    def shard(self, sharded: bool, *, padded: bool) -> None:
        """Set ``sharded`` and ``padded``. All ranks call this at the same place of the program."""
        self.sharded, self.padded = sharded, padded

    @contextmanager
    def lending(self) -> Iterator[None]:
        """In here nobody overwrites the inputs of operations, so that the log needs no copies."""
        self.lent = True
        try:
            yield
        finally:
            self.lent = False

    @property
    def knows_boundaries(self) -> bool:
        """Whether this rank sees which step boundaries the others have published."""
        return self._marks is not None

    def limit(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes

    def buffer(self, like: torch.Tensor) -> torch.Tensor:
        """A pooled CPU buffer of this shape, layout and dtype; contents undefined."""
        with self._state.lock:
            return self.pool.take(like)

    def copied(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.buffer(tensor).copy_(tensor)

    def keep(self, group: GroupState, op: Op) -> LogEntry:
        """Log a finished operation. Callers hold the lock, and call :meth:`archive` without it."""
        group.done.add(op.seq)
        keeps = op.keeps
        if isinstance(keeps, RunAgain):
            entry = LogEntry(op.signature, op.boundary, [], redo=keeps.redo, kept=keeps.tensors, pooled=keeps.pooled)
        elif keeps is KeptResults.COPY:
            entry = LogEntry(op.signature, op.boundary, [t.detach().clone() for t in op.results])
        else:
            borrowed = keeps is KeptResults.BUCKET
            entry = LogEntry(op.signature, op.boundary, op.results, pooled=not borrowed, borrowed=borrowed)
        group.log.put(op.seq, entry)
        if op.full and op.boundary > self._state.stable:
            if group.size == self._state.world_size:
                # Every rank has contributed, so every rank has published this boundary: nothing older can be asked for.
                self.settle(op.boundary)
            elif self.sharded:
                self.settle_marked()
        if self._forgets:
            group.log.drop_before(op.boundary + 1)
        if group.log.nbytes > self.max_bytes:
            self.spilled_bytes += self._spilling.spill(group.log, self.max_bytes)
        self.peak_bytes = max(self.peak_bytes, group.log.nbytes)
        return entry

    def borrows(self, buckets: Sequence[torch.Tensor]) -> bool:
        """Whether DDP's buckets may be reduced in place and be the log themselves: only a single one, where this rank
        sees the others' step boundaries and nothing is logged to disk.
        """
        if self._marks is None or self._disk.archive is not None or len(buckets) != 1:
            return False
        with self._state.lock:
            for group in self._groups.all():
                for seq, entry in list(group.log.borrowed()):
                    if entry.results and entry.results[0].data_ptr() == buckets[0].data_ptr():
                        # Overwritten without a forward that was announced: nobody can be given it any more.
                        group.log.drop(seq)
                        return False
        return True

    def release(self) -> None:
        """DDP is about to overwrite its buckets: copy those that somebody may still ask for.

        Mostly all ranks have published a step boundary since, and nothing is copied. For ranks that have not, this
        blocks about as long as a copy takes: the first reduction of this backward waits for them anyway.
        """
        if self._marks is None:
            return
        self._await_marks(self._marks)
        self.settle_marked()
        with self._state.lock:
            for group in self._groups.all():
                for _, entry in group.log.borrowed():
                    group.log.own(entry)

    def _await_marks(self, marks: BoundaryMarks) -> None:
        state = self._state
        with state.lock:
            kept = [entry for group in self._groups.all() for _, entry in group.log.borrowed()]
            newest = max((entry.boundary for entry in kept), default=state.boundary)
            size = sum(result.nbytes for entry in kept for result in entry.results or ())
        if newest == state.boundary:
            return  # nothing is there, or this rank itself has published nothing since
        end, pause_s = time.monotonic() + max(_MAX_WAIT_S, size / _COPIED_PER_S), _POLL_S
        while not state.broken and marks.lowest() <= newest and time.monotonic() < end:
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 10 * _POLL_S)

    def mark(self, boundary: int) -> None:
        if self._marks is not None:
            self._marks.put(boundary)

    def settle_marked(self) -> int:
        """Drop what is older than the newest step boundary that every rank has published, and return that one."""
        with self._state.lock:
            lowest = self._marks.lowest() if self._marks is not None and not self._state.broken else 0
            if lowest > self._state.stable:
                self.settle(lowest)
            return self._state.stable

    def archive(self, group: GroupState, seq: int, entry: LogEntry, results: Sequence[torch.Tensor]) -> None:
        """Log to disk as well, if that is open. May block for the disk: callers do not hold the lock."""
        if entry.redo is None and group.size > 1:  # what nobody else takes part in nobody else can hand back
            self._disk.put_result(group.name, seq, entry, results)

    def settle(self, boundary: int) -> None:
        """Drop collectives from before ``boundary``, and messages from before the one before it."""
        with self._state.lock:
            self._state.stable = boundary
            for group in self._groups.all():
                group.log.drop_before(boundary)
                group.channels.drop_before(boundary - 1)
                if group.over and group.destroyed_at < boundary - 1 and self._disk.archive is None:
                    self._groups.drop(group)
            self.pool.next_boundary()

    def logged(self, group: GroupState, seq: int) -> Logged:
        """What was called as operation ``seq``, and its results, which alias the log. May raise CorruptFile."""
        with self._state.lock:
            if seq in group.log.entries:
                return group.log.entries[seq].signature, group.log.results(seq)
            if seq in group.replay:
                return group.replay[seq]
        return self._disk.result(group.name, seq)

    def log_to_disk(self) -> None:
        """Log to disk from now on, and copy there what memory holds. Group time-outs become a day at least."""
        if not self._disk.open(self._state.boundary):
            return
        with self._state.lock:
            groups = self._groups.all()
            for group in groups:
                for _, entry in group.log.borrowed():
                    group.log.own(entry)
            kept = [(group, *item) for group in groups for item in group.log.entries.items() if item[1].redo is None]
        for group, seq, entry in kept:
            self.archive(group, seq, entry, group.log.results(seq))
        for group in groups:
            group.timeout = max(group.timeout, _REPLAY)
            group.channels.archive_all()


_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


class KeptInputs:
    """Contiguous copies of inputs, each once, while somebody holds them: FSDP gathers the same twice."""

    def __init__(self) -> None:
        self._kept: WeakValueDictionary[tuple[int, torch.dtype, int], torch.Tensor] = WeakValueDictionary()

    def keep(self, tensor: torch.Tensor) -> tuple[torch.Tensor, bool]:
        """A copy on the CPU, and whether it is new: one that is held serves where all bits are the same."""
        dense = tensor.detach().contiguous()
        key = (dense.numel(), dense.dtype, input_checksum([dense]))
        kept = self._kept.get(key)
        if kept is not None and not _memcmp(kept.data_ptr(), dense.data_ptr(), dense.nbytes):
            return kept, False
        self._kept[key] = kept = dense.clone()
        return kept, True


_MARK = struct.Struct("<Q")


class BoundaryMarks:
    """The newest published step boundary of every rank of a machine that has all ranks, in the file ``path``. Written
    and read without a lock. Raises OutOfResources if there is no room for it.

    A mark outlives its worker, as the publication does. A replacement that starts before the failed worker's newest
    boundary sets the mark back, before it takes part in any operation.
    """

    def __init__(self, path: Path, rank: int, world_size: int) -> None:
        self._map = map_file(path, world_size * _MARK.size)
        self._all = struct.Struct(f"<{world_size}Q")
        self._at = rank * _MARK.size

    def put(self, boundary: int) -> None:
        _MARK.pack_into(self._map, self._at, boundary)

    def lowest(self) -> int:
        """The newest step boundary that every rank has published; 0 if one has published none."""
        return int(min(self._all.unpack_from(self._map)))

"""One collective in flight, from issue to completion, and the ``Work`` that the caller sees."""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shared_core.encoding.raw_memory import memory_of
from shared_core.errors import WaitTimeout
from shared_core.worker.comm.compute_lock import ComputeLock
from shared_core.worker.messages.group_log import Signature

Start = Callable[[Any], Any]  # inner gloo group -> inner work


class Op:
    """A collective.

    Attributes:
        seq: sequence number in its group.
        place: from where in the program it was called, packed.
        signature: what must match when it is replayed.
        start: starts it on an inner group and returns the inner work; called again after a failure.
        results: tensors that hold the result once the inner work is done; what the log keeps.
        install: puts a result (from the inner work or from a log) where the caller expects it; None if it is there
            already.
        value: what the future delivers.
        copy_results: the log must copy ``results``, because they are the caller's own tensors.
        borrowed: ``results`` are buckets of DDP, which the log copies only if it needs them for longer than DDP.
        lazy: ``install`` may wait until somebody calls ``wait()``: DDP's reducer takes the future's value and needs
            no copy.
        redo: for rank-specific operations: as ``start``, but into scratch outputs.
        kept: inputs kept for ``redo``.
        kept_pooled: they are in pooled buffers.
        full: every member contributes, so its end proves that all have come so far.
        record: keeps the result for later replacements, before the caller can change it; None if nobody needs it.
        awaited: the program's thread does nothing but wait for it.
        begun: ``time.monotonic()`` when it was issued, in this generation.
    """

    __slots__ = (
        "attempt",
        "awaited",
        "begun",
        "borrowed",
        "checksum",
        "copy_results",
        "full",
        "future",
        "inner_work",
        "install",
        "installed",
        "kept",
        "kept_pooled",
        "lazy",
        "place",
        "record",
        "redo",
        "results",
        "seq",
        "signature",
        "start",
        "boundary",
        "value",
    )

    def __init__(
        self,
        signature: Signature,
        start: Start,
        results: list[torch.Tensor],
        *,
        install: Callable[[Sequence[torch.Tensor]], None] | None = None,
        value: Any = None,
        copy_results: bool = True,
        borrowed: bool = False,
        lazy: bool = False,
        redo: Start | None = None,
        kept: list[torch.Tensor] | None = None,
        kept_pooled: bool = False,
        full: bool = True,
        checksum: int = 0,
    ) -> None:
        self.seq = -1
        self.boundary = 0
        self.place = b""
        self.attempt = 0
        self.awaited = False
        self.begun = time.monotonic()
        self.signature = signature
        self.start = start
        self.results = results
        self.install = install
        self.installed = False
        self.value = value
        self.copy_results, self.borrowed = copy_results, borrowed
        self.lazy = lazy
        self.record: Callable[[], None] | None = None
        self.redo = redo
        self.kept, self.kept_pooled = kept or [], kept_pooled
        self.full = full
        self.checksum = checksum
        self.inner_work: Any = None
        self.future: torch.futures.Future[Any] = torch.futures.Future()

    def put(self) -> None:
        """Copy the result to the caller's tensors, once."""
        if self.install is not None and not self.installed:
            self.installed = True
            self.install(self.results)

    def serve(self, results: Sequence[torch.Tensor]) -> None:
        """Complete with these results instead of running: every operation that gloo does not run ends here."""
        for own, result in zip(self.results, results, strict=True):
            if own is not result:
                own.data.copy_(result.view(own.shape))
        self.put()
        if self.record is not None:
            self.record()
        self.future.set_result(self.value)


class SwiftWork(dist.Work):
    """The ``Work`` of a collective; it survives failures of other ranks without an exception."""

    def __init__(self, op: Op, compute_lock: ComputeLock) -> None:
        super().__init__()
        self._op, self._compute_lock = op, compute_lock

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the result is in the caller's tensors.

        Raises:
            RuntimeError: what gloo reported, when no rank failed (a mismatch between ranks, say).
            WaitTimeout: after ``timeout``, if one is given.
        """
        future = self._op.future
        self._op.awaited = threading.current_thread() is threading.main_thread()
        if timeout is not None and timeout.total_seconds() > 0 and not future.done():
            done = threading.Event()
            future.add_done_callback(lambda _: done.set())
            if not done.wait(timeout.total_seconds()):
                self._op.awaited = False
                raise WaitTimeout(
                    f"{self._op.signature[0]} did not finish within {timeout.total_seconds():.0f} s, the timeout that "
                    "wait() was given: another rank does not make this call, or is slow (swiftctl status says where "
                    "each rank is)"
                )
        with self._compute_lock.passed_on():
            future.wait()
        if self._op.lazy:
            self._op.put()
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        """Future whose value is the list of result tensors, as gloo's."""
        return self._op.future

    def is_completed(self) -> bool:
        return bool(self._op.future.done())

    def is_success(self) -> bool:
        return self.is_completed()

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> Any:
        self.wait()
        return self._op.value

    def source_rank(self) -> int:
        return -1


def signature(name: str, tensors: Sequence[torch.Tensor], detail: int = 0) -> Signature:
    """What a replayed call of ``name`` on ``tensors`` must match."""
    return name, tuple(tuple(t.shape) for t in tensors), tuple(str(t.dtype) for t in tensors), detail


def describe(logged: Signature) -> str:
    """A call in words."""
    name, shapes, dtypes, _ = logged
    tensors = (dtype.removeprefix("torch.") + str(list(shape)) for shape, dtype in zip(shapes, dtypes, strict=True))
    return f"{name}({', '.join(tensors)})"


#: Inputs up to so many bytes are summed whole, of larger ones about as many: runs of 64, evenly spaced. A run is a line
#: of the processor's cache: to fetch it is what takes time.
_SAMPLE, _RUN = 2048, 64


def input_checksum(tensors: Sequence[torch.Tensor]) -> int:
    """32-bit checksum of the inputs, sampled when they are large."""
    crc = 1
    for tensor in tensors:
        dense = tensor if tensor.is_contiguous() and tensor.is_cpu else tensor.detach().cpu().contiguous()
        memory, size = memory_of(dense), dense.nbytes
        if 0 < size <= _SAMPLE:
            crc = zlib.crc32(memory[:size], crc)
        elif size:
            apart = size // _SAMPLE * _RUN
            crc = zlib.crc32(b"".join([memory[at : at + _RUN] for at in range(0, size - _RUN + 1, apart)]), crc)
    return crc

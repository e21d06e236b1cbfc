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
    """A collective. The runtime's lock guards ``seq``, ``attempt``, ``inner_work``.

    Attributes:
        seq: number in its group; -1 before it is issued.
        boundary: the step boundary before it.
        place: from where in the program it was called, packed.
        attempt: a completion with another number than this is ignored.
        signature: must match when it is replayed.
        start: starts it on an inner group and returns the inner work. After a failure it is called again, on
            any thread.
        results: CPU tensors that hold the result once the inner work is done; the log keeps them.
        install: copies ``results`` to the caller's tensors; None if they are the caller's.
        value: of the future.
        copy_results: the log must copy ``results``, because the caller may overwrite them.
        borrowed: ``results`` are buckets of DDP, which the log copies only if it needs them for longer than DDP.
        lazy: ``install`` may wait for ``wait()``: DDP's reducer takes the future's value and needs no copy.
        redo: of operations whose result differs by rank: as ``start``, from ``kept`` into scratch outputs.
        kept: inputs for ``redo``.
        kept_pooled: they are pooled buffers, which go back to the pool.
        full: every member contributes, so its end proves that all have called it.
        checksum: of the inputs; 0 where there is none.
        record: keeps the result for later replacements, before the caller can change it; None if nobody needs it.
        awaited: the program's thread waits for it, in ``wait()``.
        begun: ``time.monotonic()`` when it was last started on gloo.
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
        """Copy the result to the caller's tensors; a second call does nothing."""
        if self.install is not None and not self.installed:
            self.installed = True
            self.install(self.results)

    def serve(self, results: Sequence[torch.Tensor]) -> None:
        """Complete with ``results`` instead of running; they are copied to the caller's tensors, in their shape. Every
        operation that gloo does not run ends here.
        """
        for own, result in zip(self.results, results, strict=True):
            if own is not result:
                own.data.copy_(result.view(own.shape))
        self.put()
        if self.record is not None:
            self.record()
        self.future.set_result(self.value)


class BaseWork(dist.Work):
    """What torch asks of a work besides ``wait()`` and ``is_completed()``."""

    def is_success(self) -> bool:
        return bool(self.is_completed())

    def synchronize(self) -> None:
        self.wait()


class SwiftWork(BaseWork):
    """The ``Work`` of a collective; it survives failures of other ranks without an exception."""

    def __init__(self, op: Op, compute_lock: ComputeLock) -> None:
        super().__init__()
        self._op, self._compute_lock = op, compute_lock

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the result is in the caller's tensors. None or 0 waits without a limit, across failures of ranks.

        Raises:
            RuntimeError: what gloo reported, when no rank failed (a mismatch between ranks, say).
            SwiftError: what ended the job.
            WaitTimeout: after ``timeout``. The operation stays under way.
        """
        future = self._op.future
        self._op.awaited = threading.current_thread() is threading.main_thread()
        with self._compute_lock.passed_on():
            if timeout is not None and timeout.total_seconds() > 0 and not future.done():
                done = threading.Event()
                future.add_done_callback(lambda _: done.set())
                if not done.wait(timeout.total_seconds()):
                    self._op.awaited = False
                    raise WaitTimeout(
                        f"{self._op.signature[0]} did not finish within {timeout.total_seconds():.0f} s, the timeout "
                        "that wait() was given: another rank does not make this call, or is slow (swiftctl status "
                        "says where each rank is)"
                    )
            future.wait()
        if self._op.lazy:
            self._op.put()
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        """Its value is the list of result tensors, as gloo's; of DDP's buckets, memory of the log."""
        return self._op.future

    def is_completed(self) -> bool:
        return bool(self._op.future.done())

    def result(self) -> Any:
        self.wait()
        return self._op.value

    def source_rank(self) -> int:
        return -1


def signature(name: str, tensors: Sequence[torch.Tensor], detail: int = 0) -> Signature:
    """``detail`` is the root or the reduce operation, 0 where there is neither."""
    return name, tuple(tuple(t.shape) for t in tensors), tuple(str(t.dtype) for t in tensors), detail


def describe(logged: Signature) -> str:
    """A call in words, as ``all_reduce(float32[3, 4])``."""
    name, shapes, dtypes, _ = logged
    tensors = (dtype.removeprefix("torch.") + str(list(shape)) for shape, dtype in zip(shapes, dtypes, strict=True))
    return f"{name}({', '.join(tensors)})"


#: Inputs up to so many bytes are summed whole, of larger ones about as many: runs of 64 bytes, evenly spaced. A run is
#: a cache line, because fetching lines takes the time.
_SAMPLE, _RUN = 2048, 64


def input_checksum(tensors: Sequence[torch.Tensor]) -> int:
    """32-bit CRC of the inputs' bytes, of at most 2 KiB whole and of larger ones sampled. Tensors on a device are
    copied to the host, and the device is waited for.
    """
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

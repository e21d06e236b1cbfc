"""One collective in flight, from issue to completion, and the ``Work`` that the caller sees."""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist

from shared_core.encoding.raw_memory import memory_of
from shared_core.errors import WaitTimeout
from shared_core.worker.messages.group_log import Signature


class ComputeLock:
    """Held by the thread of the training program except while it waits in this backend, in all for ``waited_s``. A
    helper thread that takes it may use the global generators and compute: the program continues as if it had waited
    longer.
    """

    def __init__(self) -> None:
        self.waited_s = 0.0
        self._lock = threading.Lock()
        self._program: int | None = None

    def begin(self) -> None:
        """The calling thread is the program. Later calls do nothing."""
        if self._program is None:
            self._lock.acquire()
            self._program = threading.get_ident()

    @contextmanager
    def passed_on(self) -> Iterator[None]:
        """The program waits in here. On other threads, and before :meth:`begin`, this does nothing."""
        if self._program != threading.get_ident():
            yield
            return
        self._lock.release()
        began = time.perf_counter()
        try:
            yield
        finally:
            self._lock.acquire()
            self.waited_s += time.perf_counter() - began

    @contextmanager
    def taken(self) -> Iterator[None]:
        """A helper computes in here; blocks until the program waits."""
        with self._lock:
            yield


Start = Callable[[Any], Any]  # inner gloo group -> inner work


class KeptResults(Enum):
    #: A copy, because the caller may overwrite them.
    COPY = "copy"
    #: They are pooled buffers, which nobody overwrites.
    POOLED = "pooled"
    #: They are buckets of DDP; they are copied only if the log needs them for longer than DDP.
    BUCKET = "bucket"


@dataclass(frozen=True)
class RunAgain:
    """The log keeps inputs, because the result differs by rank: after a failure every member runs it again.

    Attributes:
        redo: as :attr:`Op.start`, from these inputs into scratch outputs.
        tensors: the inputs; empty where something else keeps them.
        pooled: they are pooled buffers, which go back to the pool.
    """

    redo: Start
    tensors: list[torch.Tensor]
    pooled: bool = False


@dataclass(eq=False, slots=True)
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
        again: of DDP's buckets: as ``start``, from the same input, when the results have been written; else None.
        results: CPU tensors that hold the result once the inner work is done; the log keeps them.
        install: copies ``results`` to the caller's tensors; None if they are the caller's.
        value: of the future.
        keeps: what the log keeps.
        lazy: ``install`` may wait for ``wait()``: DDP's reducer takes the future's value and needs no copy.
        full: every member contributes, so its end proves that all have called it.
        checksum: of the inputs; 0 where there is none.
        record: keeps the result for later replacements, before the caller can change it; None if nobody needs it.
        awaited: the program's thread waits for it, in ``wait()``.
        begun: ``time.monotonic()`` when it was last started on gloo.
    """

    signature: Signature
    start: Start
    results: list[torch.Tensor]
    install: Callable[[Sequence[torch.Tensor]], None] | None = None
    value: Any = None
    keeps: KeptResults | RunAgain = KeptResults.COPY
    lazy: bool = False
    full: bool = True
    checksum: int = 0
    again: Start | None = None
    seq: int = -1
    boundary: int = 0
    place: bytes = b""
    attempt: int = 0
    awaited: bool = False
    installed: bool = False
    begun: float = field(default_factory=time.monotonic)
    record: Callable[[], None] | None = None
    inner_work: Any = None
    future: torch.futures.Future[Any] = field(default_factory=torch.futures.Future)

    def put(self) -> None:
        """Copy the result to the caller's tensors; a second call does nothing."""
        if self.install is not None and not self.installed:
            self.installed = True
            self.install(self.results)

    def serve(self, results: Sequence[torch.Tensor]) -> None:
        """Complete with ``results``, copied to the caller's tensors, in the place of running on gloo."""
        for own, result in zip(self.results, results, strict=True):
            if own is not result:
                own.data.copy_(result.view(own.shape))
        if not self.lazy:
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
    """32-bit CRC of the inputs' bytes, sampled above 2 KiB. Copies from devices, which are waited for."""
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

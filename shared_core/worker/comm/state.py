"""State that all parts of the communication of one process share, and the lock that guards it."""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NoReturn, Protocol

import torch
from torch.nn.parallel import DistributedDataParallel

from shared_core.errors import SwiftError, WaitTimeout, told
from shared_core.events import console
from shared_core.protocol.frontier import StepBoundary
from shared_core.protocol.worker_env import WorkerEnv
from shared_core.waiting import Wait, ranks_text
from shared_core.worker.comm.op import ComputeLock, Op
from shared_core.worker.comm.places import ProgramPlace
from shared_core.worker.link import JobStore
from shared_core.worker.messages.group_log import Logged
from shared_core.worker.start import hot_standby
from shared_core.worker.state.publications import Part, RecordKey, SharedMemoryPublisher


class KeptBucketInput(Protocol):
    """Recomputes the content of a gradient bucket while its reduction is under way."""

    def write(self, bucket: torch.Tensor, checksum: int) -> None:
        """Overwrite ``bucket``, flat and on the CPU, with what was there before its reduction. Raises RecoveryFailed if
        that does not have this checksum, of :func:`input_checksum`.
        """


class OperationListener(Protocol):
    """Given to :class:`~shared_core.worker.comm.runtime.Runtime`. Called on any thread, some with the runtime's
    lock held.
    """

    def first_group(self) -> None:
        """The default process group is made: form the first generation, or see that a replacement joins later."""

    def made_again(self, group: str) -> tuple[StepBoundary | None, Mapping[int, Logged]]:
        """For a group that the program makes: the step boundary where a replacement begins in it (None in all others),
        and what was logged for it, by sequence number.
        """

    def exact(self) -> bool:
        """False while a replacement computes with newer parameters than the failed worker: inputs differ."""

    def before_bucket(self) -> None:
        """DDP hands over a gradient bucket, or a collective is called in a backward pass."""

    def bucket_input(self, bucket: torch.Tensor) -> KeptBucketInput | None:
        """Recomputes the bucket that DDP hands over; None if that cannot be done."""

    def bucket_handed_over(self, op: Op) -> None:
        """DDP has handed over a bucket, which this operation reduces."""

    def bucket_order(self, ddp: DistributedDataParallel, op: Op) -> None:
        """DDP agrees on the order of its buckets by this operation."""

    def waiting_changed(self, waiting: bool) -> None:
        """Operations are in flight, or none any more: while there are, the progress time-out does not run."""

    def whereabouts(self) -> str:
        """Where the ranks are that are waited for, in a sentence and a space; empty if it is not known."""

    def await_absent(self) -> bool:
        """A collective of all ranks is called on the program's thread while some are absent. Blocks. True when they are
        in again, False if nobody admits them.
        """


#: Exit code of a replacement whose place, or state, a further failure made useless; the agent starts another.
EXIT_STALE = 75
#: How long the launcher may take to end a worker that has ended the job, in seconds.
_END_S = 60.0


class FatalActions:
    """Ends one worker, or the job, when it cannot continue. A hot standby only ends itself: it holds no rank yet."""

    def __init__(self, state: SharedState, store: JobStore) -> None:
        self._state, self._store = state, store

    def fall_back(self, reason: str) -> NoReturn:
        """Nobody can serve a replacement: all workers start again. Does not return. Takes the state's lock."""
        _end_spare(reason)
        self._store.tell("restart", {"reason": reason})
        with self._state.lock:
            try:
                wait_for_change(self._state, "the launcher to restart all workers", lambda: False)
            except WaitTimeout as error:
                console(str(error))
        os._exit(1)

    def cannot_complete(self, what: str) -> NoReturn:
        """Restart all workers: the program is in an operation that waits for absent ranks. Does not return."""
        absent = sorted(self._state.absent)
        self.fall_back(
            f"rank {self._state.rank} is in {what}, which waits for all ranks, and {ranks_text(absent)} "
            f"{'is' if len(absent) == 1 else 'are'} absent. With on_failure='reroute' only training steps continue "
            "without a failed rank: leave other collectives out of the loop, or use on_failure='replace'"
        )

    def fail(self, error: BaseException) -> None:
        """Tell the launcher to end the job with this error. Returns, except in a hot standby."""
        _end_spare(str(error))
        self._store.tell("fail", {"rank": self._state.rank, "message": told(error)})

    def give_up(self, error: BaseException) -> NoReturn:
        """As :meth:`fail`, then wait to be killed. Does not return."""
        self.fail(error)
        self.await_end()

    def await_end(self) -> NoReturn:
        """The launcher ends this worker; should it not, the process exits by itself."""
        threading.Event().wait(_END_S)
        os._exit(1)

    def break_down(self, error: BaseException) -> NoReturn:
        """As :meth:`give_up`, for an unexpected error: prints the traceback here first."""
        traceback.print_exception(error)
        self.give_up(error)


def _end_spare(reason: str) -> None:
    if hot_standby.is_hot_standby():
        console(f"a hot standby ends: {reason}")
        os._exit(1)


def wait_for_change(state: SharedState, whom: str, done: Callable[[], bool], *, speaks: bool = True) -> None:
    """Wait on ``state.changed``, whose lock the caller holds, until ``done()``. ``whom`` is text for the user. Raises
    WaitTimeout after its ``wait_timeout_s``.
    """
    advice = "See above why that does not happen; raise detection.wait_timeout_s if it is only slow."
    who, limit_s = f"rank {state.rank}", state.wait_timeout_s
    Wait(who, whom, limit_s, speaks=lambda: speaks, advice=advice).until(state.changed, done)


@dataclass
class Held:
    """Results that replacements may never ask for. ``nbytes`` counts also what is to be an entry and not finished."""

    entries: list[tuple[RecordKey, list[torch.Tensor]]] = field(default_factory=list)
    nbytes: int = 0


class SharedState:
    """Which generation is live, where the program is, and who waits.

    Attributes:
        publisher: keeps what replacements of this rank need.
        lock: reentrant; guards everything here and in the groups. ``changed`` is its condition.
        generation: the one that is installed; -1 before the first.
        broken: a failure is known and the next generation is not yet live.
        absent: ranks that failed and without which the others continue (``on_failure="reroute"``).
        ended: why the job cannot continue; None while it can.
        starting: a replacement before its join: operations are answered from the failed worker's records.
        in_startup: results are recorded for later replacements, which start as this worker does.
        entry: number of the entry call; -1 before the first, and -2 - e between call e and the next.
        part: of the program, which is starting up and which replacements run again; empty for the first.
        keeps_small: only small results are recorded, because the part repeats itself.
        held: results of this part that replacements may never ask for; None where results are recorded at once.
        records: what a failed worker has recorded.
        expected: checksums of the failed worker's inputs, by group id and sequence number.
        damaged: that worker's state was damaged, and so may be what it gave to others.
        sources: from whom a failed worker has received its messages from any source, by group and tag, and number.
        stable: newest step boundary that every rank is known to have published.
        operates: the program's operations run here, and not in torch's own groups of a device.
        checksums: inputs have checksums, which are published.
        bucket_checksums: the same of DDP's buckets: with unused parameters they hold leftovers that mean nothing.
        stages: operations on tensors of devices run over host memory.
        restarts: all workers start again when one fails.
        beside: what the program's thread waits for outside of the program's groups: since when (``time.monotonic()``),
            of whom (global ranks), what. None if nothing.
    """

    def __init__(
        self, env: WorkerEnv, listener: OperationListener, publisher: SharedMemoryPublisher, store: JobStore
    ) -> None:
        self.rank, self.world_size = env.rank, env.world_size
        self.listener, self.publisher, self.store = listener, publisher, store
        self.fatal_actions = FatalActions(self, store)
        detection = env.config.detection
        self.connect_timeout_s, self.wait_timeout_s = detection.connect_timeout_s, detection.wait_timeout_s
        self.stages, self.restarts = env.config.device.experimental, env.config.restarts
        self.operates = True
        self.checksums = self.bucket_checksums = env.config.state.verify_checksums
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.compute_lock = ComputeLock()
        self.entry = -1
        self.in_startup, self.keeps_small = True, False
        self.part: Part = ()
        self.held: Held | None = None
        self.boundary = self.stable = 0
        self.place = ProgramPlace()
        self.begin_again()

    def begin_again(self) -> None:
        """Nothing is known of others; what is known of the program stays."""
        self.generation = self.latest = -1
        self.broken = self.starting = self.damaged = False
        self.absent: frozenset[int] = frozenset()
        self.ended: SwiftError | None = None
        self.records: dict[RecordKey, list[torch.Tensor]] = {}
        self.expected: dict[tuple[int, int], int] = {}
        self.sources: dict[tuple[int, int], int] = {}
        self.beside: tuple[float, tuple[int, ...], str] | None = None
        self._waiting = 0

    def stand_aside(self) -> None:
        self.operates = False

    def end(self, error: SwiftError) -> SwiftError:
        """Remember that the job cannot continue, wake everybody, and return ``error``. On any thread."""
        with self.lock:
            self.ended = error
            self.changed.notify_all()
        self.fatal_actions.fail(error)
        return error

    def raise_if_ended(self) -> None:
        if self.ended is not None:
            raise self.ended

    def note_waiting(self, change: int) -> None:
        """Count operations in flight, without which the progress time-out runs. Callers hold the lock."""
        before, self._waiting = self._waiting, self._waiting + change
        if (before > 0) != (self._waiting > 0):
            self.listener.waiting_changed(self._waiting > 0)

    @contextmanager
    def waiting_beside(self, ranks: Sequence[int], what: str) -> Iterator[None]:
        """In here the program's thread waits for ``ranks`` outside of its groups: the progress time-out does not run,
        and helpers may compute. ``what`` they are to do is for the line that a long wait prints.
        """
        with self.compute_lock.passed_on():
            with self.lock:
                self.note_waiting(+1)
                self.beside = time.monotonic(), tuple(ranks), what
            try:
                yield
            finally:
                with self.lock:
                    self.note_waiting(-1)
                    self.beside = None

    def enter_call(self, entry: int) -> None:
        """The program begins or leaves an entry call: up to the next step boundary it starts up."""
        with self.lock:
            self.entry, self.in_startup = entry, True
            self.place.enter_call(entry)

    def start_up_again(self, part: Part = (), *, hold: bool = False) -> None:
        """A replacement does again what the program does up to the next step boundary.

        Args:
            part: what begins here; empty to continue with the same part.
            hold: a replacement does it again only if another step boundary follows before the next part:
                see :meth:`keep_held`.
        """
        with self.lock:
            self.in_startup, self.part, self.keeps_small = True, part or self.part, not part
            self.held = Held() if hold else None

    def keep_held(self) -> None:
        """Another step boundary follows in this part: replacements need what it has recorded."""
        with self.lock:
            held, self.held = self.held, None
        for key, results in held.entries if held is not None else ():
            self.publisher.records.add(key, results)

    def passed_boundary(self, boundary: int) -> None:
        with self.lock:
            self.boundary, self.in_startup = boundary, False

    def answer_from(self, records: dict[RecordKey, list[torch.Tensor]]) -> None:
        with self.lock:
            self.starting, self.records = True, records

    def sum_buckets(self, on: bool) -> None:
        self.bucket_checksums = on

    @contextmanager
    def unchecked(self) -> Iterator[None]:
        """Inputs of operations in here have no checksums: they depend on the clock or on files."""
        before, self.checksums = self.checksums, False
        try:
            yield
        finally:
            self.checksums = before

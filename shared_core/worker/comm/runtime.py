"""The state that all groups of a process share: which generation is live, what is in flight, what is logged.

Operations are issued to gloo where they are called, and completed on gloo's own threads; there is no executor
between, so operations overlap as they do
without this product. When a rank is lost the inner groups are cut; what was in flight stays pending, and is served
or issued again in the next generation.
"""

from __future__ import annotations

import re
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from shared_core.errors import (
    CollectiveTimeout,
    ConfigError,
    GenerationAbandoned,
    NotConnected,
    ReplayDivergence,
    SwiftError,
    Unsupported,
    WaitTimeout,
)
from shared_core.protocol.frontier import Done
from shared_core.testing import inject
from shared_core.waiting import ranks_text
from shared_core.worker.comm.compute_turn import Turn
from shared_core.worker.comm.gloo import STUCK_S, InnerGroup
from shared_core.worker.comm.listener import Listener
from shared_core.worker.comm.op import Op
from shared_core.worker.messages.disk_log import DiskLog
from shared_core.worker.messages.group_log import BufferPool, Entry, GroupLog, Signature, same_call

if TYPE_CHECKING:
    from shared_core.worker.comm.p2p import Channels

#: How long an operation may have failed before the loss that explains it is announced.
SUSPECT_S = 15.0
#: Attempts to connect the members of a group in one generation.
MAX_ATTEMPTS = 8
#: Who waits for a peer waits for its replay too, which may take longer than a program expects of an operation.
REPLAY_TIMEOUT = timedelta(days=1)
#: Results up to so many bytes are recorded in the start-up phase for later newcomers.
_STARTUP_BYTES = 64 * 1024


class GroupState:
    """What the runtime knows of one group at this rank.

    Attributes:
        name: unique in the job and equal on all members.
        ranks: global ranks of the members, in group order.
        next: sequence number of the next collective.
        done: finished collectives.
        pending: issued and not finished, by sequence number.
        replay: results to serve instead of running, by sequence number.
        inner: the gloo group of the live generation.
        inflight: operations that gloo has not yet finished or failed.
    """

    def __init__(
        self, name: str, rank: int, size: int, ranks: tuple[int, ...], timeout: timedelta, pool: BufferPool
    ) -> None:
        self.name, self.rank, self.size, self.ranks, self.timeout = name, rank, size, ranks, timeout
        self.id = zlib.crc32(name.encode())
        self.next = 0
        self.done = Done()
        self.pending: dict[int, Op] = {}
        self.log = GroupLog(pool)
        self.replay: dict[int, tuple[Signature, list[torch.Tensor]]] = {}
        self.inner: InnerGroup | None = None
        self.inflight = 0
        self.again: list[Any] = []
        self.channels: Channels = None  # type: ignore[assignment]  # set by the process group that owns it


class Runtime:
    """One per process.

    Attributes:
        lock: guards everything here; ``changed`` is its condition.
        starting: a newcomer before its join: operations are answered from its predecessor's records.
        broken: a loss is known and the next generation is not yet live.
        top: index of the last published batch top.
        stable: newest batch top that every rank is known to have published.
        checksums: whether inputs are summed and published.
        max_log_bytes: memory above which results are spilled.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        listener: Listener,
        disk: DiskLog,
        *,
        connect_timeout_s: float,
        wait_timeout_s: float,
        checksums: bool,
        log_spill_bytes: int = 0,
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self.listener, self.disk = listener, disk
        self.connect_timeout_s, self.wait_timeout_s = connect_timeout_s, wait_timeout_s
        self.checksums = checksums
        self.max_log_bytes = log_spill_bytes or 64 << 20
        #: Whether DDP's buckets are summed: with unused parameters they hold leftovers that mean nothing.
        self.bucket_checksums = checksums
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.pool = BufferPool()
        self.turn = Turn()
        self._sides: list[tuple[int, InnerGroup]] = []
        self.groups: dict[str, GroupState] = {}
        self.world: GroupState | None = None
        self.generation = -1
        self.latest = -1
        self.starting = False
        self.broken = False
        self.ended: SwiftError | None = None
        self.top = 0
        self.stable = 0
        self.spilled_bytes = 0
        self.peak_log_bytes = 0
        self.served_operations = 0
        # Recording for later newcomers, and what a predecessor recorded.
        self.in_startup = True
        #: Number of the entry call; -1 before the first, and -2 - e between call e and the next.
        self.entry = -1
        #: Ranks that were lost and without which the others go on (``on_failure="reroute"``).
        self.absent: frozenset[int] = frozenset()
        self._ordinals: dict[tuple[int, str, str], int] = {}
        self.records: dict[tuple[int, str, str, int], list[torch.Tensor]] = {}
        self.expected: dict[tuple[int, int], int] = {}
        self._waiting = 0
        #: What the program's thread waits for outside of the program's groups: since when, of whom, what.
        self.beside: tuple[float, tuple[int, ...], str] | None = None
        #: Results to serve to the next operations, whatever their place: DDP's agreement on buckets is repeated from
        #: records.
        self.scripted: deque[list[torch.Tensor]] = deque()

    # -- groups ------------------------------------------------------------------------------------

    def add_group(self, group: GroupState) -> None:
        """Register a group and, when a generation is live, connect it."""
        with self.lock:
            while group.name in self.groups:  # destroyed and made again under the same name
                group.name += "'"
            group.id = zlib.crc32(group.name.encode())
            self.groups[group.name] = group
            group.replay.update(self.listener.kept_for(group.name))
            first = self.world is None
            if first:
                if group.size != self.world_size:
                    raise ConfigError(
                        f"the first process group has {group.size} ranks, but the job has {self.world_size}; create "
                        "the default group first"
                    )
                self.world = group
        if first:
            self.listener.first_group()
        elif not self.starting and not self.broken:
            try:
                # A group that the program makes: a member may be late for reasons of its own, as without this product.
                self.connect(group, self.generation, self.longest_s(group))
            except GenerationAbandoned:
                pass  # the recovery under way connects it
            except WaitTimeout as error:
                raise CollectiveTimeout(f"{error} {self.listener.whereabouts()}") from error

    def connect(self, group: GroupState, generation: int, limit_s: float | None = None) -> None:
        """Connect ``group`` in ``generation`` and issue what is pending in it.

        Args:
            group: which one.
            generation: for which.
            limit_s: longest wait for a member; ``wait_timeout_s`` if None.

        Raises:
            GenerationAbandoned: if the generation ended meanwhile.
            NotConnected: if the members do not reach each other in many attempts.
            WaitTimeout: if a member does not come.
        """
        for attempt in range(MAX_ATTEMPTS):
            try:
                inner = self.new_inner(group, generation, attempt, limit_s)
                break
            except NotConnected:
                if attempt + 1 == MAX_ATTEMPTS:
                    raise
        with self.lock:
            if self.latest > generation:
                inner.discard()
                raise GenerationAbandoned(group.name)
            group.inner = inner
            self._reissue(group)

    def new_inner(self, group: GroupState, generation: int, attempt: int, limit_s: float | None = None) -> InnerGroup:
        """A fresh gloo group for ``group``, not yet used by it.

        Gloo now and then waits for its whole time-out before it repeats a connection attempt, so the first time-
        outs are
        short.

        Args:
            group: which one.
            generation: for which.
            attempt: its number.
            limit_s: longest wait for a member; ``wait_timeout_s`` if None.

        Raises:
            GenerationAbandoned: if the generation ended meanwhile.
            NotConnected: if a member was not reached; all members make the next attempt then.
            WaitTimeout: if a member does not come.
        """
        return InnerGroup.connect(
            self.listener.new_store(f"inner/{generation}.{attempt}/{group.name}"),
            self.rank,
            group.ranks,
            operation_timeout=group.timeout,
            connect_timeout_s=min(self.connect_timeout_s, 0.5 * 2**attempt),
            wait_timeout_s=self.wait_timeout_s if limit_s is None else limit_s,
            abandoned=lambda: self.latest > generation,
            what=f"{self.called(group)} in generation {generation}",
            silent=limit_s is None and group is not self.world,
        )

    def side_group(
        self,
        name: str,
        ranks: Sequence[int],
        generation: int,
        *,
        attempt: int | None = None,
        operation_timeout: timedelta = timedelta(days=10),
    ) -> InnerGroup:
        """A group of some ranks beside those of the program, for one generation; cut when that ends.

        Args:
            name: unique in the generation.
            ranks: its members, this rank among them.
            generation: which one.
            attempt: the first ones have short time-outs, see :meth:`new_inner`; None: there is only one.
            operation_timeout: of its operations.

        Raises:
            GenerationAbandoned: if the generation ends meanwhile.
            NotConnected: if the members do not reach each other.
            WaitTimeout: if one does not come.
        """
        inner = InnerGroup.connect(
            self.listener.new_store(f"side/{generation}/{name}"),
            self.rank,
            ranks,
            operation_timeout=operation_timeout,
            connect_timeout_s=min(self.connect_timeout_s, 0.5 * 2 ** (attempt if attempt is not None else 9)),
            wait_timeout_s=self.wait_timeout_s,
            abandoned=lambda: self.latest > generation,
            what=f"side group {name!r} in generation {generation}",
        )
        with self.lock:
            if self.latest > generation:
                inner.discard()
                raise GenerationAbandoned(name)
            self._sides.append((generation, inner))
        return inner

    def drop_side(self, inner: InnerGroup) -> None:
        """Cut a side group and forget it."""
        with self.lock:
            kept = [(generation, each) for generation, each in self._sides if each is not inner]
            if len(kept) < len(self._sides):
                self._sides = kept
                inner.discard()

    def called(self, group: GroupState) -> str:
        """The group in the user's words."""
        return "the default group" if group is self.world else f"group {group.name!r} of {ranks_text(group.ranks)}"

    def longest_s(self, group: GroupState) -> float:
        """How long a member that was never lost is waited for, in seconds: as long as torch does, at least."""
        return max(self.wait_timeout_s, group.timeout.total_seconds())

    def inner_backend(self, group: GroupState) -> Any:
        """The inner gloo backend, waiting for one while a recovery runs."""
        with self.lock:
            while group.inner is None:
                self.raise_if_ended()
                self.changed.wait(1.0)
            return group.inner.pg

    def log_to_disk(self) -> None:
        """Log to disk from now on, with all that is in memory."""
        if not self.disk.open(self.top):
            return
        with self.lock:
            kept = [
                (group, seq, entry)
                for group in self.groups.values()
                for seq, entry in group.log.entries.items()
                if entry.redo is None
            ]
        for group, seq, entry in kept:
            self._archive(group, seq, entry, group.log.results(seq))
        for group in self.groups.values():
            group.timeout = max(group.timeout, REPLAY_TIMEOUT)
            group.channels.archive_all()

    def _archive(self, group: GroupState, seq: int, entry: Entry, results: Sequence[torch.Tensor]) -> None:
        if group.size > 1:  # what nobody else takes part in nobody else can hand back
            self.disk.put_result(group.name, seq, entry, results)

    def logged(self, group: GroupState, seq: int) -> tuple[Signature, list[torch.Tensor]]:
        """What was called as operation ``seq`` and what it gave.

        Raises:
            CorruptFile: if it is on disk and damaged.
        """
        with self.lock:
            if seq in group.log.entries:
                return group.log.entries[seq].signature, group.log.results(seq)
            if seq in group.replay:
                return group.replay[seq]
        return self.disk.result(group.name, seq)

    # -- operations --------------------------------------------------------------------------------

    def pool_take(self, like: torch.Tensor) -> torch.Tensor:
        """A pooled buffer like ``like``."""
        if like.device.type != "cpu":
            raise Unsupported(
                f"backend swift got a tensor on {like.device}: only CPU tensors are supported in this version"
            )
        with self.lock:
            return self.pool.take(like)

    def submit(self, group: GroupState, op: Op, inputs: Sequence[torch.Tensor]) -> None:
        """Issue, serve or queue an operation. Returns at once, except for the first operations of a start-up.

        Raises:
            ReplayDivergence: if a newcomer's operation is not the one its predecessor ran.
            RuntimeError: if gloo refuses the arguments.
        """
        name = op.signature[0]
        inject.point("collective.before", operation=name)
        served: list[torch.Tensor] | None = None
        if self.scripted:
            op.serve(self.scripted.popleft())
            return
        if self.absent and group.size == self.world_size and threading.current_thread() is threading.main_thread():
            self.listener.await_absent()
        with self.lock:
            self.raise_if_ended()
            if self.in_startup:
                key = (self.entry, group.name, name)
                ordinal = self._ordinals.get(key, 0)
                self._ordinals[key] = ordinal + 1
                if self.starting:
                    served = self.records.get((*key, ordinal))
                else:
                    self._record_when_done((*key, ordinal), op)
            if self.starting:
                self._answer(group, op, inputs, served)
                return
            if self.absent and group.size > 1:
                self.listener.cannot_complete(f"{describe(op.signature)} of group {group.name!r}")
            op.seq, op.top = group.next, self.top
            group.next += 1
            logged = group.replay.pop(op.seq, None)
            if op.checksum and (logged is None or same_call(logged[0], op.signature)):
                self._check(group, op)
            if logged is None:
                group.pending[op.seq] = op
                self.note_waiting(+1)
                if group.inner is not None and (not self.broken or group.size == 1):
                    try:
                        self._start(group, op)
                    except Exception:
                        del group.pending[op.seq]
                        group.next -= 1
                        self.note_waiting(-1)
                        raise
        if logged is not None:
            self._serve(group, op, *logged)

    def _start(self, group: GroupState, op: Op) -> None:
        inner = group.inner
        assert inner is not None
        with torch.no_grad():  # again on a thread that does not know the caller's mode
            op.inner_work = op.start(inner.pg)
        op.attempt = attempt = op.attempt + 1
        op.begun = time.monotonic()
        group.inflight += 1
        try:
            future = op.inner_work.get_future()
        except RuntimeError:  # gloo's reduce-scatter has none
            waiter = _Waited(op.inner_work, lambda waited: self._finished(group, op, attempt, waited))
            threading.Thread(target=waiter.run, name="swift-wait", daemon=True).start()
        else:
            future.add_done_callback(lambda done: self._finished(group, op, attempt, done))

    def _finished(self, group: GroupState, op: Op, attempt: int, future: Any) -> None:
        """Runs on gloo's thread."""
        error: Exception | None = None
        try:
            future.value()
        except Exception as caught:  # noqa: BLE001 (gloo raises plain RuntimeError)
            error = caught
        with self.lock:
            if op.attempt != attempt:
                return  # given up
            group.inflight -= 1
            op.inner_work = None
            if error is None:
                del group.pending[op.seq]
                entry = self._log(group, op)
            self.changed.notify_all()
        if error is None and entry.redo is None:
            self._archive(group, op.seq, entry, op.results)
        if error is not None:
            self.suspect(error)
            return
        if not op.lazy:
            op.put()
        with self.lock:
            self.note_waiting(-1)
        try:
            # before the caller can go on: "after the second collective of step 3" is then always in step 3
            inject.point("collective.after", operation=op.signature[0])
        except inject.FaultInjected as fault:
            op.future.set_exception(fault)
        else:
            op.future.set_result(op.value)

    def _log(self, group: GroupState, op: Op) -> Entry:
        group.done.add(op.seq)
        if op.redo is not None:
            entry = Entry(op.signature, op.top, [], redo=op.redo, kept=op.kept)
        elif op.copy_results:
            entry = Entry(op.signature, op.top, [t.detach().clone() for t in op.results])
        else:
            entry = Entry(op.signature, op.top, op.results, pooled=True)
        group.log.put(op.seq, entry)
        if op.full and group is self.world and op.top > self.stable:
            # Every rank has contributed, so every rank has published this top: nothing older can be asked for.
            self.settle(op.top)
        if group.log.nbytes > self.max_log_bytes:
            self.spilled_bytes += group.log.spill(self.max_log_bytes)
        self.peak_log_bytes = max(self.peak_log_bytes, group.log.nbytes)
        return entry

    def settle(self, top: int) -> None:
        """Nothing from before batch top ``top`` can be asked for any more."""
        with self.lock:
            self.stable = top
            for each in self.groups.values():
                each.log.drop_before(top)
                each.channels.drop_before(top - 1)
            self.pool.next_top()

    def _serve(self, group: GroupState, op: Op, logged: Signature, results: list[torch.Tensor]) -> None:
        if not same_call(logged, op.signature):
            raise self.end(
                ReplayDivergence(
                    f"rank {self.rank} takes over from a lost worker and calls {describe(op.signature)} as "
                    f"operation {op.seq} of group "
                    f"{group.name!r}, but its predecessor had called {describe(logged)} there. The training code "
                    "must do the same when it is run "
                    "again: seed every random number, and do not branch on time or on files the run itself writes."
                )
            )
        op.serve(results)
        with self.lock:
            self.served_operations += 1
            entry = self._log(group, op)
            self.changed.notify_all()
        self._archive(group, op.seq, entry, op.results)
        inject.point("collective.after", operation=op.signature[0])

    def _check(self, group: GroupState, op: Op) -> None:
        expected = self.expected.pop((group.id, op.seq), None)
        if expected is not None and expected != op.checksum and self.listener.exact():
            raise self.end(
                ReplayDivergence(
                    f"rank {self.rank} takes over from a lost worker, and its input to operation {op.seq} of group "
                    f"{group.name!r} "
                    f"({describe(op.signature)}) has checksum {op.checksum:08x}, its predecessor's had "
                    f"{expected:08x}. The training code computed "
                    "something else when it was run again: an unseeded or unregistered random number, or state that "
                    "was not registered "
                    "(job.register)."
                )
            )
        self.listener.publish_checksum(group.id, op.seq, op.checksum)

    def _answer(
        self, group: GroupState, op: Op, inputs: Sequence[torch.Tensor], recorded: list[torch.Tensor] | None
    ) -> None:
        """A newcomer's start-up: what the predecessor got, else something neutral; real state is loaded at the join."""
        fits = recorded is not None and [t.shape for t in recorded] == [t.shape for t in op.results]
        if fits and recorded is not None:
            op.serve(recorded)
            return
        name = op.signature[0]
        if name.startswith("all_reduce"):
            for buffer, tensor in zip(op.results, inputs, strict=True):
                buffer.copy_(tensor.detach())
        elif name.startswith("all_gather") and inputs:
            for out in op.results:
                if out.numel() == inputs[0].numel():
                    out.data.copy_(inputs[0].detach().view(out.shape))
                elif inputs[0].numel():
                    out.data.view(-1, inputs[0].numel()).copy_(
                        inputs[0].reshape(1, -1).expand(out.numel() // inputs[0].numel(), -1)
                    )
        op.put()
        op.future.set_result(op.value)

    def _record_when_done(self, key: tuple[int, str, str, int], op: Op) -> None:
        if sum(t.numel() * t.element_size() for t in op.results) <= _STARTUP_BYTES:
            op.future.add_done_callback(lambda _: self.listener.record(key, op.results))

    # -- failures ----------------------------------------------------------------------------------

    def break_off(self) -> None:
        """A rank is lost: cut every connection, and wait until gloo has given everything back. A group of this rank
        alone goes on while others are absent.
        """
        with self.lock:
            self.broken = True
            # The program may have met the others in a side group of the newest generation before we came here.
            for generation, inner in self._sides:
                if generation < self.latest:
                    inner.discard()
            self._sides = [side for side in self._sides if side[0] >= self.latest]
            cut = [group for group in self.groups.values() if not self.absent or group.size > 1]
            inners = [group.inner for group in cut if group.inner is not None]
            for group in cut:
                group.inner = None
            for inner in inners:
                inner.sever()
            end = time.monotonic() + STUCK_S
            while any(group.inflight for group in cut):
                if not self.changed.wait(0.05):
                    for inner in inners:  # a connection that was being set up while we cut
                        inner.sever()
                if time.monotonic() > end:
                    self._abandon(cut)
            for group in cut:
                group.channels.cut()
        for inner in inners:
            inner.discard()

    def _abandon(self, groups: Sequence[GroupState]) -> None:
        """Give up on operations that gloo does not give back. (When a connection is cut while a message waits for
        room in the socket's buffer, gloo forgets
        to wake the sender.) They only read from their buffers any more; their end, if it ever comes, is ignored."""
        for group in groups:
            for op in group.pending.values():
                if op.inner_work is not None:
                    op.attempt += 1
                    op.inner_work = None
            group.inflight = 0

    def go_live(
        self, generation: int, world_inner: InnerGroup, redo: dict[str, set[int]], received: dict[str, dict[str, int]]
    ) -> None:
        """Install a generation: serve what others had finished, issue the rest again in order, let new operations
        through.
        """
        with self.lock:
            self.generation = generation
            self._redo = redo
            self._has = received
            served = [
                (group, group.pending.pop(seq), *group.replay.pop(seq))
                for group in self.groups.values()
                for seq in sorted(group.pending)
                if seq in group.replay
            ]
        for group, op, logged, results in served:
            self._serve(group, op, logged, results)
            with self.lock:
                self.note_waiting(-1)
        with self.lock:
            self.broken = False
            assert self.world is not None
            self.world.inner = world_inner
            self._reissue(self.world)
            kept = [group for group in self.groups.values() if group.size == 1 and group.inner is not None]
            others = [group for group in self.groups.values() if group is not self.world and group not in kept]
            self.changed.notify_all()
        for group in others:
            threading.Thread(
                target=self._connect_later, args=(group, generation), name=f"swift-connect-{group.name}", daemon=True
            ).start()

    def _connect_later(self, group: GroupState, generation: int) -> None:
        try:
            self.connect(group, generation)
        except GenerationAbandoned:
            return
        except SwiftError as error:
            self.end(error)

    _redo: dict[str, set[int]] = {}
    _has: dict[str, dict[str, int]] = {}

    def _reissue(self, group: GroupState) -> None:
        assert group.inner is not None
        group.again.clear()
        redo = {seq: group.log.entries[seq] for seq in self._redo.get(group.name, ()) if seq in group.log.entries}
        for seq in sorted({*redo, *group.pending}):
            if seq in group.pending:
                self._start(group, group.pending[seq])
            else:
                again = redo[seq].redo
                assert again is not None
                group.again.append(again(group.inner.pg))
        group.channels.repeat(self._has.get(group.name, {}))
        self.changed.notify_all()

    def under_way(self) -> str:
        """An operation among several ranks that is not finished, in words; empty if there is none."""
        with self.lock:
            for group in self.groups.values():
                if group.size > 1 and group.pending:
                    return f"{describe(next(iter(group.pending.values())).signature)} of group {group.name!r}"
                if group.channels.awaited():
                    return f"a receive in group {group.name!r}"
        return ""

    def withdraw(self) -> tuple[GroupState, Op] | None:
        """Take back the only operation under way, as if it had not been called; see :meth:`call_again`. None if there
        is another one, or if it is not a collective of all ranks that the program's thread waits for.
        """
        with self.lock:
            pending = [(group, op) for group in self.groups.values() if group.size > 1 for op in group.pending.values()]
            waits = any(group.channels.awaited() for group in self.groups.values())
            if len(pending) != 1 or waits:
                return None
            [(group, op)] = pending
            # A moment passes from the call to the waiting.
            self.changed.wait_for(lambda: op.awaited, timeout=1.0)
            if group.size != self.world_size or not op.awaited or op.seq != group.next - 1:
                return None
            del group.pending[op.seq]
            group.next -= 1
            self.note_waiting(-1)
            return group, op

    def call_again(self, group: GroupState, op: Op) -> None:
        """Issue an operation that was withdrawn."""
        with self.lock:
            op.seq, op.top = group.next, self.top
            group.next += 1
            group.pending[op.seq] = op
            self.note_waiting(+1)
            if group.inner is not None and not self.broken:
                self._start(group, op)

    def suspect(self, error: Exception) -> None:
        """An operation failed: a loss that explains it is announced soon, or it is the caller's own mistake."""
        with self.lock:
            if self.broken or self.ended is not None:
                return
            seen = self.latest
        threading.Thread(target=self._await_explanation, args=(error, seen), name="swift-suspect", daemon=True).start()

    def _await_explanation(self, error: Exception, seen: int) -> None:
        with self.lock:
            self.changed.wait_for(
                lambda: self.broken or self.latest > seen or self.ended is not None, timeout=SUSPECT_S
            )
            if self.broken or self.latest > seen or self.ended is not None:
                return
            stuck = []
            for group in self.groups.values():
                failed = [op for op in group.pending.values() if op.inner_work is None]
                for op in failed:
                    del group.pending[op.seq]
                    stuck.append((op, self.overdue(error, group, f"{describe(op.signature)} (#{op.seq}")))
                if isinstance(error, RuntimeError):
                    group.channels.fail(self.overdue(error, group, "a message ("))
            self.changed.notify_all()
        for op, why in stuck:
            op.future.set_exception(why)

    def overdue(self, error: Exception, group: GroupState, call: str) -> Exception:
        """What to raise for an operation that failed although nobody was lost; more is said of one that ran out of
        time.
        """
        if not re.search("(?i)timed out", str(error)):
            return error
        limit_s, whereabouts = group.timeout.total_seconds(), self.listener.whereabouts()
        return CollectiveTimeout(
            f"rank {self.rank} waited {limit_s:g} s (time-out of the process group) in {call} of "
            f"{self.called(group)}). {whereabouts}Another rank is too slow, hangs, or is in another operation: "
            f"raise timeout= of init_process_group or new_group if it is slow. ({error})"
        )

    def end(self, error: SwiftError) -> SwiftError:
        """Remember that the job cannot go on, wake everybody, and return ``error``."""
        with self.lock:
            self.ended = error
            self.changed.notify_all()
        self.listener.failed(error)
        return error

    def raise_if_ended(self) -> None:
        """Raise what ended the job, if anything did."""
        if self.ended is not None:
            raise self.ended

    def note_waiting(self, change: int) -> None:
        """Count operations in flight; while there are any, the progress time-out does not run. Callers hold the
        lock.
        """
        before, self._waiting = self._waiting, self._waiting + change
        if (before > 0) != (self._waiting > 0):
            self.listener.waiting_changed(self._waiting > 0)

    @contextmanager
    def unchecked(self) -> Iterator[None]:
        """Inputs of operations in here are not compared with the predecessor's: they rest on the clock or on files."""
        before, self.checksums = self.checksums, False
        try:
            yield
        finally:
            self.checksums = before

    def log_bytes(self) -> int:
        """Bytes of memory the logs hold now."""
        return sum(group.log.nbytes + group.channels.nbytes for group in self.groups.values())


class _Waited:
    """Stands in for the future of an inner work that has none: waits on a thread of its own."""

    def __init__(self, work: Any, done: Callable[[_Waited], None]) -> None:
        self._work, self._done = work, done
        self._error: Exception | None = None

    def run(self) -> None:
        """Wait, then report."""
        try:
            self._work.wait()
        except RuntimeError as error:
            self._error = error
        self._done(self)

    def value(self) -> None:
        """Raises what the work raised."""
        if self._error is not None:
            raise self._error


def describe(logged: Signature) -> str:
    """A call in words."""
    name, shapes, dtypes, _ = logged
    tensors = (dtype.removeprefix("torch.") + str(list(shape)) for shape, dtype in zip(shapes, dtypes, strict=True))
    return f"{name}({', '.join(tensors)})"

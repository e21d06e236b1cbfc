"""Ends a generation and begins the next. When a rank fails the inner groups are cut; what was in flight stays pending,
and is served or issued again in the next generation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

from shared_core.errors import CollectiveTimeout, GenerationAbandoned, NotConnected, SwiftError, WaitTimeout
from shared_core.system import threads
from shared_core.worker.comm.gloo import STUCK_S, InnerGroup
from shared_core.worker.comm.groups import Groups, GroupState
from shared_core.worker.comm.operations import Operations
from shared_core.worker.comm.other_threads import OtherThreads
from shared_core.worker.comm.state import SharedState

#: Attempts to connect the members of a group in one generation.
MAX_ATTEMPTS = 8
#: Gloo now and then waits for its whole time-out before it repeats an attempt, so the first time-outs are short.
_FIRST_S = 0.5
#: Default time-out of an operation of a side group: a failure ends it at once, and a step may last long.
_FOREVER = timedelta(days=10)


def attempts(connect: Callable[[int], InnerGroup]) -> InnerGroup:
    """``connect(0)``, or of a later attempt; all members make the same. Raises NotConnected after the last."""
    for attempt in range(MAX_ATTEMPTS - 1):
        with suppress(NotConnected):
            return connect(attempt)
    return connect(MAX_ATTEMPTS - 1)


class Generations:
    def __init__(
        self,
        state: SharedState,
        groups: Groups,
        operations: Operations,
        others: OtherThreads,
        compare_places: Callable[[GroupState], None],
    ) -> None:
        self._state, self._groups, self._operations = state, groups, operations
        self._others, self._compare_places = others, compare_places
        self._sides: list[tuple[int, InnerGroup]] = []
        # Of the live generation: rank-specific operations to run again, and what receivers have, by group.
        self._redo: Mapping[str, set[int]] = {}
        self._received: Mapping[str, dict[str, int]] = {}
        self._background = False

    def add_group(self, group: GroupState) -> None:
        """Take in a new group and, when a generation is live, connect it: the program's thread blocks until all members
        are there.

        Raises:
            CollectiveTimeout: a member did not come within the group's time-out.
            ConfigError: the first group has not all ranks.
            NotConnected: the members do not reach each other.
        """
        state = self._state
        with state.lock:
            first = self._groups.world is None
            self._groups.add(group)
            self._compare_places(group)
            boundary, logged = state.listener.made_again(group.name)
            if boundary is not None:
                group.start_from(boundary)
            group.replay.update(logged)
            # Decided under the lock: a recovery that ends now either finds the group, or leaves it to this thread.
            live, generation = not state.starting and not state.broken, state.generation
        if first:
            state.listener.first_group()
        elif live and self._background:
            threads.start(self._connect_later, (group, generation), name=f"swift-connect-{group.name}")
        elif live:
            try:
                # A group that the program makes: a member may be late for reasons of its own, as without this product.
                self._connect(group, generation, self._groups.longest_s(group))
            except GenerationAbandoned:
                pass  # the recovery under way connects it
            except WaitTimeout as error:
                raise CollectiveTimeout(f"{error} {state.listener.whereabouts()}") from error

    @contextmanager
    def in_the_background(self) -> Iterator[None]:
        """Groups that are made in here are connected while the program continues."""
        self._background = True
        try:
            yield
        finally:
            self._background = False

    def _connect(self, group: GroupState, generation: int, limit_s: float | None = None) -> None:
        """Connect ``group`` and issue what is pending in it. Raises what :meth:`new_inner` raises."""
        inner = attempts(lambda attempt: self.new_inner(group, generation, attempt, limit_s))
        with self._state.lock:
            if self._state.latest > generation:
                inner.discard()
                raise GenerationAbandoned(group.name)
            self._reissue(group, inner)

    def _reissue(self, group: GroupState, inner: InnerGroup) -> None:
        """Start what is pending, and what runs again for others, in order. Callers hold the lock."""
        group.inner = inner
        works: list[Any] = []
        redo = {seq: group.log.entries[seq] for seq in self._redo.get(group.name, ()) if seq in group.log.entries}
        for seq in sorted({*redo, *group.pending}):
            if seq in group.pending:
                self._operations.start(group, group.pending[seq])
            else:
                again = redo[seq].redo
                assert again is not None
                redo[seq].pooled = False  # it may still read its inputs when the entry goes
                works.append(again(inner.pg))
        if works:
            threads.start(_let_go, (works,), name=f"swift-again-{group.name}")
        group.channels.repeat(self._received.get(group.name, {}))
        self._state.changed.notify_all()

    def begin_again(self) -> None:
        """In a forked copy of the process: no generation was live, and there are no side groups."""
        self._redo, self._received = {}, {}
        for _, inner in self._sides:
            inner.abandon()
        self._sides = []

    def break_off(self) -> None:
        """A rank fails: cut every connection, and block until gloo has given everything back or is given up. A group of
        this rank alone continues while others are absent.
        """
        state = self._state
        with state.lock:
            state.broken = True
            self._others.at_failure()
            self.cut_sides()
            cut = [group for group in self._groups.all() if not state.absent or group.size > 1]
            inners = [group.inner for group in cut if group.inner is not None]
            for group in cut:
                group.inner = None
            for inner in inners:
                inner.sever()
            began = time.monotonic()
            while any(group.inflight for group in cut):
                if not state.changed.wait(0.05):
                    for inner in inners:  # a connection that was being set up while we cut
                        inner.sever()
                waited_s = time.monotonic() - began
                # While gloo has not closed a connection, what had arrived there may still be written.
                if waited_s > _STARVED_S or (waited_s > STUCK_S and all(inner.closed() for inner in inners)):
                    _give_up(cut)
            for group in cut:
                group.channels.cut()
        for inner in inners:
            inner.discard()

    def go_live(
        self,
        generation: int,
        world_inner: InnerGroup | None,
        redo: Mapping[str, set[int]],
        received: Mapping[str, dict[str, int]],
    ) -> None:
        """Serve what others had finished, issue the rest again in order, admit new operations. Groups beside the
        default one connect in the background.

        Args:
            world_inner: the default group's connections. None while others are absent: then only groups of this rank
                alone are connected, and all else waits.
            redo: numbers of the operations that this rank takes part in again, by group.
            received: how many messages receivers have, by group and channel.

        Raises:
            ReplayDivergence: another operation was called than the log has.
            PlaceMismatch: one was called from another place of the program.
        """
        state = self._state
        if world_inner is None:
            self._connect_own()
            return
        with state.lock:
            state.generation = generation
            self._redo, self._received = redo, received
            served = [
                (group, group.pending.pop(seq), group.replay[seq])
                for group in self._groups.all()
                for seq in sorted(group.pending)
                if seq in group.replay
            ]
        for each in served:
            self._operations.serve(*each)
            with state.lock:
                state.note_waiting(-1)
        with state.lock:
            state.broken = False
            world = self._groups.world
            assert world is not None
            self._reissue(world, world_inner)
            self._others.recovered()
            kept = [group for group in self._groups.all() if group.size == 1 and group.inner is not None]
            others = [group for group in self._groups.all() if group is not world and group not in kept]
            state.changed.notify_all()
        for group in others:
            name = f"swift-connect-{group.name}"
            threads.start(self._connect_later, (group, generation), name=name)

    def _connect_own(self) -> None:
        for group in [each for each in self._groups.all() if each.size == 1]:
            while group.inner is None:
                with suppress(GenerationAbandoned):  # by a failure, which has nothing to do with it
                    self._connect(group, self._state.latest)

    def _connect_later(self, group: GroupState, generation: int) -> None:
        try:
            self._connect(group, generation)
        except GenerationAbandoned:
            return
        except SwiftError as error:
            if not group.over:  # else another rank has let go of it already, and nobody needs it
                self._state.end(error)

    # -- connecting: groups of the program, and side groups that last one generation --------------------

    def new_inner(self, group: GroupState, generation: int, attempt: int, limit_s: float | None = None) -> InnerGroup:
        """A fresh gloo group for ``group``, not yet used by it. All members call with the same generation and attempt.
        ``limit_s``: longest wait for a member; ``wait_timeout_s`` if None.

        Raises:
            GenerationAbandoned: if the generation ended meanwhile.
            NotConnected: if a member was not reached; all members make the next attempt then.
            WaitTimeout: if a member does not come.
        """
        state = self._state
        return InnerGroup.connect(
            state.store.below(f"inner/{generation}.{attempt}/{group.name}/"),
            state.rank,
            group.ranks,
            operation_timeout=group.timeout,
            connect_timeout_s=min(state.connect_timeout_s, _FIRST_S * 2**attempt),
            wait_timeout_s=state.wait_timeout_s if limit_s is None else limit_s,
            abandoned=lambda: state.latest > generation,
            what=f"{self._groups.called(group)} in generation {generation}",
            silent=limit_s is None and group is not self._groups.world,
        )

    def side_group(
        self,
        name: str,
        ranks: Sequence[int],
        generation: int,
        *,
        attempt: int | None = None,
        operation_timeout: timedelta = _FOREVER,
    ) -> InnerGroup:
        """A group of some ranks beside those of the program, for one generation; cut when that ends. Blocks. Raises
        what :meth:`new_inner` raises.

        Args:
            name: unique in the generation.
            ranks: global, this one among them.
            attempt: its number: the first ones have short time-outs. None if there is only one.
        """
        state = self._state
        inner = InnerGroup.connect(
            state.store.below(f"side/{generation}/{name}/"),
            state.rank,
            ranks,
            operation_timeout=operation_timeout,
            connect_timeout_s=min(state.connect_timeout_s, _FIRST_S * 2 ** (attempt if attempt is not None else 9)),
            wait_timeout_s=state.wait_timeout_s,
            abandoned=lambda: state.latest > generation,
            what=f"side group {name!r} in generation {generation}",
        )
        with state.lock:
            if state.latest > generation:
                inner.discard()
                raise GenerationAbandoned(name)
            self._sides.append((generation, inner))
        return inner

    def drop_side(self, inner: InnerGroup) -> None:
        """Cut a side group and forget it; nothing if it was cut already."""
        with self._state.lock:
            kept = [(generation, each) for generation, each in self._sides if each is not inner]
            if len(kept) < len(self._sides):
                self._sides = kept
                inner.discard()

    def cut_sides(self) -> None:
        """Cut the side groups of generations that have ended. Callers hold the lock."""
        latest = self._state.latest  # the program may have met the others in one of the newest generation already
        for generation, inner in self._sides:
            if generation < latest:
                inner.discard()
        self._sides = [side for side in self._sides if side[0] >= latest]

    def backend(self, group: GroupState) -> Any:
        """Gloo's process group; blocks while a recovery runs."""
        with self._state.lock:
            while group.inner is None:
                self._state.raise_if_ended()
                self._state.changed.wait(1.0)
            return group.pg


#: How long a thread of gloo may take to notice that its connections were cut, on a machine that is very busy.
_STARVED_S = 1.0


def _let_go(works: list[Any]) -> None:
    """Wait for operations that run again for others: each holds the memory of a result that nobody here wants."""
    with suppress(RuntimeError):  # cut off: they run again in the next generation
        while works:
            works.pop(0).wait()


def _give_up(groups: Sequence[GroupState]) -> None:
    """Give up on operations that gloo does not give back. (When a connection is cut while a message waits for room in
    the socket's buffer, gloo forgets to wake the sender.) They only read from their buffers any more; their end, if
    it ever comes, is ignored.
    """
    for group in groups:
        for op in group.pending.values():
            if op.inner_work is not None:
                op.attempt += 1
                op.inner_work = None
        group.inflight = 0

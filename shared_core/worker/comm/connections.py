"""Connects gloo groups: those of the program, and side groups that last one generation."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from shared_core.errors import GenerationAbandoned, NotConnected
from shared_core.worker.comm.gloo import InnerGroup
from shared_core.worker.comm.groups import Groups, GroupState
from shared_core.worker.comm.state import SharedState

#: Attempts to connect the members of a group in one generation.
MAX_ATTEMPTS = 8
#: Gloo now and then waits for its whole time-out before it repeats an attempt, so the first time-outs are short.
_FIRST_S = 0.5
#: Default time-out of an operation of a side group: a failure ends it at once, and a step may last long.
_FOREVER = timedelta(days=10)


class Connections:
    def __init__(self, state: SharedState, groups: Groups) -> None:
        self._state, self._groups = state, groups
        self._sides: list[tuple[int, InnerGroup]] = []

    def meet(self, group: GroupState, generation: int, limit_s: float | None = None) -> InnerGroup:
        """As :meth:`new_inner`, in up to ``MAX_ATTEMPTS`` attempts; raises what it raises."""
        for attempt in range(MAX_ATTEMPTS - 1):
            try:
                return self.new_inner(group, generation, attempt, limit_s)
            except NotConnected:
                continue
        return self.new_inner(group, generation, MAX_ATTEMPTS - 1, limit_s)

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
            state.listener.new_store(f"inner/{generation}.{attempt}/{group.name}/"),
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
            state.listener.new_store(f"side/{generation}/{name}/"),
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

    def begin_again(self) -> None:
        """In a forked copy of the process: there are none."""
        for _, inner in self._sides:
            inner.abandon()
        self._sides = []

    def backend(self, group: GroupState) -> Any:
        """Gloo's process group; blocks while a recovery runs."""
        with self._state.lock:
            while group.inner is None:
                self._state.raise_if_ended()
                self._state.changed.wait(1.0)
            return group.pg

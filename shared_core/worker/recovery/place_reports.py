"""Ranks on several machines, which share no memory, tell each other from where they have called operations.

A thread of each rank writes to the store what its groups have called, several times a second, and reads what the next
member of each group has written. So a difference is found soon after it arises; at the latest when the program ends.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from shared_core.codec import Count, decode
from shared_core.errors import DamagedRecord
from shared_core.protocol.place import CollectivePlace
from shared_core.system import threads
from shared_core.worker.comm.groups import GroupState
from shared_core.worker.comm.places import GroupPlaces, mismatch
from shared_core.worker.link import at_end
from shared_core.worker.recovery.context import Context

#: Between two reports; how long the end of a program waits for the last report of another, in seconds.
_EVERY_S, _LAST_S = 0.2, 2.0
#: The first of some operations, how many, and the place from which all of them were called.
_Run = tuple[Count, Count, int, int, int, Count, int]


class PlaceReports:
    def __init__(self, context: Context) -> None:
        self.begin(context)

    def begin(self, context: Context) -> None:
        """Be those of the worker of ``context``; again in a forked copy of the process."""
        self._env, self._runtime, self._store = context.env, context.runtime, context.store
        self._told: dict[str, int] = {}
        self._lock = threading.Lock()
        self._over = threading.Event()

    def start(self) -> None:
        if len(self._env.machines) > 1:
            at_end(self._finish)
            threads.start(self._run, name="swift-places")

    def _run(self) -> None:
        with suppress(RuntimeError):  # the store is gone: so is the agent
            while not self._over.wait(_EVERY_S) and self._runtime.ended is None:
                with self._lock:
                    self._exchange()

    def _finish(self) -> None:
        """At the program's end: compare what the others have called last, for ``_LAST_S`` at most."""
        self._over.set()
        end = time.monotonic() + _LAST_S
        with self._lock, suppress(RuntimeError):
            while not self._exchange() and time.monotonic() < end:
                time.sleep(_EVERY_S / 10)

    def _exchange(self) -> bool:
        """Tell, and read; whether the others have told as much as this rank has called."""
        runtime = self._runtime
        with runtime.lock:
            groups = [(group, group.places, group.next) for group in runtime.groups.all() if group.places is not None]
        level = True
        for group, places, upto in groups:
            if self._told.get(group.name) != upto:
                self._told[group.name] = upto
                self._store.below().set(_key(group, group.rank), json.dumps(_runs(places.own_before(upto))))
            theirs = self._read(group)
            level &= bool(theirs) and sum(theirs[-1][:2]) >= upto
            self._compare(group, places, theirs)
        return level

    def _read(self, group: GroupState) -> Sequence[_Run]:
        """What the next member has told; nothing where that is damaged or missing."""
        store, key = self._store.below(), _key(group, (group.rank + 1) % group.size)
        with suppress(DamagedRecord):
            if store.check([key]):
                found: Sequence[_Run] = decode(store.get(key), list[_Run], key)
                return found
        return ()

    def _compare(self, group: GroupState, places: GroupPlaces, theirs: Sequence[_Run]) -> None:
        runtime = self._runtime
        called = {seq: CollectivePlace(*run[2:]) for run in theirs for seq in range(run[0], run[0] + run[1])}
        with runtime.lock:
            mine = places.own_before(group.next)
            for seq, place in called.items():
                places.told((group.rank + 1) % group.size, seq, place)
            for seq, place in mine:
                other = places.elsewhere(seq, place.packed(), recovered=runtime.generation > 0)
                if other is not None:
                    call = f"operation {seq} of {runtime.groups.called(group)}"
                    runtime.end(mismatch(runtime.rank, call, place.packed(), other))
                    return


def _key(group: GroupState, member: int) -> str:
    return f"place/{group.id:08x}/{group.ranks[member]}"


def _runs(called: Sequence[tuple[int, CollectivePlace]]) -> list[list[int]]:
    runs: list[list[int]] = []
    for seq, place in called:
        if runs and runs[-1][2:] == [*place] and sum(runs[-1][:2]) == seq:
            runs[-1][1] += 1
        else:
            runs.append([seq, 1, *place])
    return runs

"""``on_failure="reroute"``: a replacement is given its state while the others train, so that none of them waits for it.

The replacement asks the lowest of its replicas, which copies its state and logs the updates that it continues making
(:mod:`shared_core.worker.state.incremental_copy`). When the replacement lacks the newest update only, it asks to join.
If the copy cannot be made or used, or everybody waits for the replacement, it gets its state when all stand still.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from shared_core.errors import GenerationAbandoned, NotConnected, RecoveryFailed, SwiftError, WaitTimeout
from shared_core.faults import inject
from shared_core.protocol.frontier import StepBoundary
from shared_core.protocol.generation import copy_key, still_key
from shared_core.system import threads
from shared_core.waiting import Wait, poll, wait_for
from shared_core.worker.comm.generations import MAX_ATTEMPTS
from shared_core.worker.comm.gloo import InnerGroup
from shared_core.worker.comm.runtime import Runtime
from shared_core.worker.comm.state import EXIT_STALE
from shared_core.worker.recovery.context import Context
from shared_core.worker.recovery.transfer import nbytes, receive, send
from shared_core.worker.state.incremental_copy import (
    CopyPiece,
    CopySums,
    IncrementalCopy,
    LoggedUpdate,
    compare,
    followable,
    in_order,
    put,
    repeat,
)
from shared_core.worker.state.replicated import Replicated
from shared_core.worker.state.updates import Updates


@dataclass
class Sent:
    """Bytes that a copy has sent so far, and when it began (``time.monotonic()``)."""

    nbytes: int = 0
    began: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began


def give(inner: InnerGroup, replacement: int, updates: Updates, incremental_copy: IncrementalCopy, sent: Sent) -> None:
    """Send a copy until it is closed, and wait until the replacement, by its index in the group, says that it has it.
    ``sent`` is counted on. Raises what :func:`transfer.send` raises.
    """

    def say(head: dict[str, Any], tensors: Any = ()) -> None:
        inject.point("copy.give")
        send(inner, replacement, head, tensors)
        sent.nbytes += nbytes(tensors)

    for item in incremental_copy.next_items(updates.gate.held, lambda: updates.state_version):
        if isinstance(item, CopyPiece):
            say({"what": "piece", "places": item.places, "states": item.description}, item.tensors)
        elif isinstance(item, LoggedUpdate):
            facts = {"version": item.version, "optimizer": item.optimizer, "groups": item.groups}
            say({"what": "update", "places": item.places} | facts, item.gradients)
        elif isinstance(item, CopySums):
            say({"what": "sums", "places": item.places, "sums": item.sums})
        else:
            say({"what": "level"})
    say({"what": "end", "failed": incremental_copy.failed})
    receive(inner, replacement, "to say that it has its copy")  # before the connection is cut


class Taking:
    """A replacement's side, on a thread of its own. It clears the optimizers' state and then writes parameters and
    optimizer state in place; the program's thread waits meanwhile. ``donor`` is an index in the group.

    Attributes:
        level: all of the state is here, but for the newest update.
        failed: why the copy is of no use; empty while it is of use.
    """

    def __init__(self, runtime: Runtime, inner: InnerGroup, donor: int, replicated: Replicated) -> None:
        self._runtime, self._inner, self._donor, self._replicated = runtime, inner, donor, replicated
        self._ended = threading.Event()
        self.level, self.failed = False, ""
        for optimizer in replicated.optimizers:
            optimizer.state.clear()
        self._thread = threads.start(self._run, name="swift-copy")

    def _run(self) -> None:
        try:
            while self._take():
                pass
        except (SwiftError, RuntimeError, ValueError, KeyError) as error:
            self.failed = str(error) or type(error).__name__
        self._ended.set()

    def _take(self) -> bool:
        head, tensors = receive(self._inner, self._donor, "to send its state", math.inf, idle=True)
        inject.point("copy.take")
        what, replicated = head["what"], self._replicated
        if what == "piece":
            put(replicated, CopyPiece(head["places"], head["states"], tensors))
        elif what == "update":
            repeat(
                replicated,
                LoggedUpdate(head["version"], head["optimizer"], head["groups"], head["places"], tensors, []),
            )
        elif what == "sums":
            compare(replicated, CopySums(head["places"], head["sums"]))
        elif what == "level":
            self.level = True
        else:
            self.failed = head["failed"]
            send(self._inner, self._donor, {}, [])
            return False
        return True

    @property
    def over(self) -> bool:
        return self._ended.is_set()

    def finish(self, states: list[list[Any]]) -> str:
        """Block until all is here, in the order ``states``. Returns why not, or empty. Raises WaitTimeout."""
        wait = Wait(
            f"rank {self._runtime.rank}",
            f"rank {self._inner.members[self._donor]} to send the last updates",
            self._runtime.wait_timeout_s,
        )
        while not self._ended.wait(wait.next_s()):
            wait.look()
        if not self.failed:
            try:
                in_order(self._replicated, states)
            except RecoveryFailed as error:
                self.failed = str(error)
        return self.failed

    def stop(self) -> None:
        self._runtime.generations.drop_side(self._inner)
        self._thread.join()


#: Longest that a donor may take to answer, in seconds: a thread of it waits for the question.
_ANSWER_S = 10.0


@dataclass(frozen=True)
class _Given:
    generation: int
    incremental_copy: IncrementalCopy


class StateCopies:
    """Copies of replicated state that are made while training continues, as giver and as replacement. ``replicas``
    gives the global ranks that train the same as this one; empty where all do.
    """

    def __init__(self, context: Context, updates: Updates, replicas: Callable[[], Sequence[int]]) -> None:
        self._updates, self._replicas = updates, replicas
        self.begin(context)

    def begin(self, context: Context) -> None:
        """Be those of the worker of ``context``; again in a forked copy of the process."""
        self._env, self._runtime = context.env, context.runtime
        self._store, self._events = context.store, context.events
        self._given: dict[int, _Given] = {}
        self._taking: Taking | None = None
        self._states: list[list[Any]] = []

    def _donor(self, absent: frozenset[int]) -> int | None:
        """The lowest rank that is present and trains what this one does; None without one."""
        return min({*(self._replicas() or range(self._env.world_size))} - absent, default=None)

    def _connect(self, replacement: int, donor: int, generation: int) -> InnerGroup:
        for attempt in range(MAX_ATTEMPTS):
            try:
                name = f"copy{replacement}.{attempt}"
                return self._runtime.generations.side_group(
                    name, sorted((replacement, donor)), generation, attempt=attempt
                )
            except NotConnected:
                continue
        raise NotConnected(f"ranks {replacement} and {donor} do not reach each other")

    # -- giving: a thread for each replacement --------------------------------------------------------

    def offer(self) -> None:
        """A failure is announced: start a thread for each replacement that this worker gives its state."""
        with self._runtime.lock:
            generation, absent = self._runtime.latest, self._runtime.absent
        mine = absent.intersection(self._replicas() or range(self._env.world_size))
        for rank in sorted(mine) if self._donor(absent) == self._env.rank else ():
            threads.start(self._serve, (rank, generation), name="swift-copy")

    def _serve(self, rank: int, generation: int) -> None:
        key, store, updates = copy_key(generation, rank), self._store.below(), self._updates
        abandoned = lambda: self._runtime.latest > generation  # noqa: E731
        try:
            wait_for(store, {rank: key}, abandoned, math.inf, self._env.rank, "to ask for its state", silent=True)
        except (GenerationAbandoned, RuntimeError):
            return
        with updates.gate.held():
            incremental_copy = updates.followers.start(updates.replicated) if updates.exact else None
        if incremental_copy is None:
            store.set(f"{key}/answer", "no")
            return
        sent = Sent()
        self._events.emit("copying", rank=rank, generation=generation, donor=self._env.rank)
        try:
            store.set(f"{key}/answer", "yes")
            self._give(rank, generation, incremental_copy, sent)
        except (SwiftError, RuntimeError) as error:
            incremental_copy.cancel(str(error))
        finally:
            updates.followers.end(incremental_copy)
            self._say(rank, generation, incremental_copy, sent)

    def _give(self, rank: int, generation: int, incremental_copy: IncrementalCopy, sent: Sent) -> None:
        inner = self._connect(rank, self._env.rank, generation)
        self._given[rank] = _Given(generation, incremental_copy)
        try:
            give(inner, inner.members.index(rank), self._updates, incremental_copy, sent)
        finally:
            self._runtime.generations.drop_side(inner)

    def _say(self, rank: int, generation: int, incremental_copy: IncrementalCopy, sent: Sent) -> None:
        fields = {"bytes_moved": sent.nbytes, "copy_s": sent.seconds, "why": incremental_copy.failed}
        self._events.emit("copied", rank=rank, generation=generation, **fields)

    def close(self, rank: int, boundary: StepBoundary, description: dict[str, Any]) -> bool:
        """All stand still, and this worker is to give ``rank`` its state, of ``description``, at ``boundary``. Whether
        the replacement has it but for the last updates, which are sent now on the thread of the copy.
        """
        given = self._given.pop(rank, None)
        if given is None or given.generation != self._runtime.latest:
            return False
        if description["version"] != boundary.version:  # it needs what the parameters were at the boundary, too
            given.incremental_copy.cancel("a step was made since the step boundary")
            return False
        return given.incremental_copy.close()

    # -- taking: the replacement's program ------------------------------------------------------------

    def fetch(self, generation: int) -> None:
        """Replacement: take the state while the others train. Blocks until it is here but for the newest update, or
        until it is better, or only, had when all stand still. The program's thread. Raises GenerationAbandoned if
        another rank fails meanwhile.
        """
        self._stop()
        runtime, state, store = self._runtime, self._updates.replicated, self._store.below()
        donor, still = self._donor(runtime.absent), still_key(generation)
        if donor is None or state is None or not self._updates.followers.able or not followable(state):
            return
        if store.check([still]):
            return
        key, me = copy_key(generation, self._env.rank), self._env.rank
        abandoned = lambda: runtime.latest > generation  # noqa: E731
        with runtime.waiting_beside((donor,), "to copy its state to this replacement"):
            store.set(key, "1")
            try:
                answer, what = {donor: f"{key}/answer"}, "to say whether it copies its state"
                wait_for(store, answer, abandoned, _ANSWER_S, me, what, silent=True)
                if store.get(f"{key}/answer") != b"yes":
                    return
                inner = self._connect(me, donor, generation)
            except (WaitTimeout, NotConnected):
                return
            taking = self._taking = Taking(runtime, inner, inner.members.index(donor), state)
            wait = Wait(
                f"rank {me}", f"rank {donor} to copy its state", math.inf, ends="it waits as long as they train"
            )
            poll(lambda: taking.level or taking.over or store.check([still]), abandoned, wait)

    def in_place(self, copied: bool, states: list[list[Any]]) -> bool:
        """All stand still. Whether the state of the donor is here, but for updates that come now; see :meth:`complete`.
        ``copied``: the donor has sent all of it, or is about to; ``states`` describes its optimizer state.
        """
        if copied and self._taking is not None and not self._taking.failed:
            self._states = states
            return True
        self._stop()
        return False

    @property
    def pending(self) -> bool:
        return self._taking is not None

    def complete(self) -> None:
        """Block until the last updates are made. If they do not come this process exits; another takes the place."""
        taking = self._taking
        assert taking is not None
        try:
            failed = taking.finish(self._states)
        except WaitTimeout as error:
            failed = str(error)
        if failed:
            message = f"the copy of the state was not completed, starting over: {failed}"
            rank, generation = self._env.rank, self._runtime.latest
            self._events.emit("warning", rank=rank, generation=generation, message=message)
            os._exit(EXIT_STALE)
        self._stop()

    def _stop(self) -> None:
        taking, self._taking = self._taking, None
        if taking is not None:
            taking.stop()

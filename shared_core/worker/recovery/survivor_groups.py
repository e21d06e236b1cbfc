"""``on_failure="reroute"``: the workers that are there continue without a failed one, and admit a replacement later.

A *survivor group* connects the ranks that are present. An executor does all communication of a training step over it,
so that a step waits for nobody who is absent; at a failure the survivor group breaks, and the executor asks for
another. Everything else that communicates continues to mean all ranks. A replacement runs the user's script up to its
first step boundary and asks to join there; the others admit it when all of them stand at a step boundary, as a copy of
one of its replicas.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from enum import Enum
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist

from shared_core.codec import decode
from shared_core.errors import (
    ConfigError,
    DamagedRecord,
    GenerationAbandoned,
    NotConnected,
    SurvivorGroupBroken,
    SwiftError,
    WaitTimeout,
)
from shared_core.events import console
from shared_core.faults import inject
from shared_core.protocol.generation import join_request_key, still_key, survivor_group_key
from shared_core.protocol.rounds import Round, admitting_key
from shared_core.system import threads
from shared_core.transport.store import Store
from shared_core.waiting import Keys, ranks_text, wait_for
from shared_core.worker import link
from shared_core.worker.comm.generations import MAX_ATTEMPTS
from shared_core.worker.comm.gloo import STUCK_S, InnerGroup, finish
from shared_core.worker.comm.operations import SUSPECT_S
from shared_core.worker.comm.runtime import Runtime
from shared_core.worker.recovery.copies import StateCopies
from shared_core.worker.recovery.exchange import Received
from shared_core.worker.recovery.recovery import WorkerRecovery
from shared_core.worker.state.local_state import BoundaryPosition
from shared_core.worker.state.replicated import pack, unpack

#: Longest that an unsent tensor is kept.
LONGEST_WAIT = timedelta(days=10)


class SurvivorGroupWork:
    """A message that is being received."""

    def __init__(self, survivor_group: SurvivorGroup, work: Any, rank: int) -> None:
        self._survivor_group, self._work, self._rank = survivor_group, work, rank
        self._error: RuntimeError | None = None
        self._waiter: threading.Thread | None = None

    def wait(self) -> None:
        """Block until the message is in the tensor given to :meth:`SurvivorGroup.recv`.

        Raises:
            SurvivorGroupBroken: if a worker failed meanwhile.
            CollectiveTimeout: if gloo timed out although no worker failed.
            RuntimeError: what else gloo reported, if no worker failed.
        """
        inject.point("survivor_group.wait")
        with self._survivor_group.waiting((self._rank,), "the training step (a message)"):
            if self._waiter is None:
                self._run()
            else:
                self._waiter.join(STUCK_S)
                while self._waiter.is_alive():
                    if self._survivor_group.broken():
                        raise SurvivorGroupBroken("gloo does not give a message back that was cut")
                    self._waiter.join(STUCK_S)
        if self._error is not None:
            self._survivor_group.explain(self._error)

    def done(self) -> bool:
        """Whether :meth:`wait` returns, or raises, at once. The first call starts a thread."""
        # Gloo cannot be asked, so somebody waits: a thread, and only for works that are asked about.
        if self._waiter is None:
            self._waiter = threads.start(self._run, name="swift-group")
        return not self._waiter.is_alive()

    def _run(self) -> None:
        work, self._work = self._work, None
        if work is None:
            return  # waited for before
        try:
            work.wait(self._survivor_group.timeout)
        except RuntimeError as error:
            self._error = error


class SurvivorGroup:
    """Connects the ranks that are present in one generation. Used by the program's thread.

    Attributes:
        number: rises with each survivor group: a generation has several, each with more ranks.
        ranks: who is connected, ascending; global.
        finished: ranks that had left the program for good before this survivor group was formed; neither here
            nor absent.
        timeout: of one operation; a failure ends it at once.
    """

    def __init__(
        self, runtime: Runtime, inner: InnerGroup, generation: int, ranks: tuple[int, ...], finished: tuple[int, ...]
    ) -> None:
        self.generation, self.ranks, self.finished = generation, ranks, finished
        self.number = generation * (runtime.world_size + 1) + len(ranks) + len(finished)
        self._runtime, self._inner = runtime, inner
        #: Of one operation; a failure ends it at once.
        self.timeout = runtime.world.timeout if runtime.world is not None else LONGEST_WAIT
        self._sent: SimpleQueue[tuple[Any, torch.Tensor] | None] = SimpleQueue()
        threads.start(_keep, (self._sent,), name="swift-group-sends")

    def broken(self) -> bool:
        """Whether a worker failed since: what is under way may never finish."""
        return self._runtime.latest > self.generation

    def send(self, tensor: torch.Tensor, rank: int, tag: int) -> None:
        """Send, without waiting. The tensor is not copied: it is kept until it is sent, and must not change until the
        step ends.

        Args:
            tensor: contiguous, on the CPU.
            rank: global rank of the receiver.
            tag: at least 0; tells messages between the same two ranks apart that are under way together.

        Raises:
            SurvivorGroupBroken: if a worker failed meanwhile.
        """
        inject.point("survivor_group.send")
        tensor = tensor.detach()
        self._sent.put((self._issue(lambda pg: pg.send([tensor], self.ranks.index(rank), tag)), tensor))

    def recv(self, tensor: torch.Tensor, rank: int, tag: int) -> SurvivorGroupWork:
        """Begin to receive into ``tensor``, which is undefined until :meth:`SurvivorGroupWork.wait` returns.

        Args:
            tensor: contiguous, on the CPU, of the message's shape and dtype.
            rank: global rank of the sender.
            tag: the sender's.

        Raises:
            SurvivorGroupBroken: if a worker failed meanwhile.
        """
        return SurvivorGroupWork(self, self._issue(lambda pg: pg.recv([tensor], self.ranks.index(rank), tag)), rank)

    def exchange(self, value: Any) -> dict[int, Any]:
        """What each rank gives, by global rank. All ranks call it; blocks. ``value``: plain data that JSON can hold.
        Raises SurvivorGroupBroken if a worker failed meanwhile; others may have got the answer.
        """
        mine = pack(value)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in self.ranks]
        self._run(lambda pg: pg.allgather([sizes], [torch.tensor([mine.numel()])]))
        most = max(int(size) for size in sizes)
        padded = torch.zeros(most, dtype=torch.uint8)
        padded[: mine.numel()] = mine
        parts = [torch.empty_like(padded) for _ in self.ranks]
        self._run(lambda pg: pg.allgather([parts], [padded]))
        return {rank: unpack(part[: int(size)]) for rank, part, size in zip(self.ranks, parts, sizes, strict=True)}

    def barrier(self) -> None:
        """Block until all have called. Raises SurvivorGroupBroken, where others may have returned."""
        self._run(lambda pg: pg.barrier(dist.BarrierOptions()))

    def waiting(self, ranks: Sequence[int], what: str) -> AbstractContextManager[None]:
        """In here this worker waits for others: the progress time-out does not run, and helpers may compute. ``what``:
        what they are to do, for the line that a long wait prints.
        """
        return self._runtime.waiting_beside(ranks, what)

    def explain(self, error: RuntimeError) -> None:
        """An operation failed. Waits ``SUSPECT_S`` for a failure that explains it, then raises.

        Raises:
            SurvivorGroupBroken: a failure was announced.
            CollectiveTimeout: none was, and gloo timed out.
            RuntimeError: ``error``, if none was.
        """
        with self._runtime.lock:
            self._runtime.changed.wait_for(lambda: self.broken() or self._runtime.ended, timeout=SUSPECT_S)
            self._runtime.raise_if_ended()
        if self.broken():
            raise SurvivorGroupBroken(f"a worker failed after generation {self.generation}") from error
        assert self._runtime.world is not None
        others = ranks_text(rank for rank in self.ranks if rank != self._runtime.rank)
        raise self._runtime.operations.overdue(error, self._runtime.world, f"the training step (with {others},")

    def close(self) -> None:
        self._runtime.generations.drop_side(self._inner)
        self._sent.put(None)

    def _issue(self, start: Callable[[Any], Any]) -> Any:
        pg = self._inner.pg
        if pg is None or self.broken():
            raise SurvivorGroupBroken(f"a worker failed after generation {self.generation}")
        try:
            return start(pg)
        except RuntimeError as error:
            self.explain(error)

    def _run(self, start: Callable[[Any], Any]) -> None:
        inject.point("survivor_group.wait")
        work = self._issue(start)
        with self.waiting(
            [rank for rank in self.ranks if rank != self._runtime.rank], "the training step (an exchange)"
        ):
            try:
                finish(work, self.broken, "a survivor group that is cut")
                return
            except RuntimeError as error:
                failed = error
        self.explain(failed)


def _keep(sent: SimpleQueue[tuple[Any, torch.Tensor] | None]) -> None:
    """Thread: keep tensors until they are sent. Receivers take them in any order, so some are kept a little longer."""
    while (item := sent.get()) is not None:
        try:
            item[0].wait(LONGEST_WAIT)
        except RuntimeError:
            pass  # the survivor group is broken: whoever receives notices


class _Arrivals:
    """Looks like a store whose keys are ranks: there when they have come to a survivor group or have finished."""

    def __init__(self, store: Store, meeting: str) -> None:
        self._store, self._meeting = store, meeting

    def come(self, rank: int | str) -> bool:
        return bool(self._store.check([f"{self._meeting}/{rank}"]))

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all these ranks need not be waited for."""
        return all(self.come(rank) or self._store.check([f"done/{rank}"]) for rank in keys)


class _AnyOf:
    """Looks like a store whose keys are there when one of them is."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def check(self, keys: Sequence[str]) -> bool:
        return any(self._store.check([key]) for key in keys)


class WaitFor(Enum):
    """For which absent ranks :meth:`SurvivorGroups.joining_ranks` waits."""

    #: For nobody: who is ready is admitted.
    NOT_AT_ALL = "nobody"
    #: For the first that comes.
    FOR_ONE = "one"
    FOR_ALL = "all"


class SurvivorGroups:
    """Forms survivor groups, and admits replacements. Used by the program's thread but for :meth:`await_absent`."""

    def __init__(self, recovery: WorkerRecovery, copies: StateCopies, position: BoundaryPosition) -> None:
        self._recovery, self._copies, self._position = recovery, copies, position
        self.begin()

    def begin(self) -> None:
        """There is no survivor group yet; again in a forked copy of the process."""
        self._runtime, self._env = self._recovery.runtime, self._recovery.env
        self._survivor_group: SurvivorGroup | None = None
        self._passed_over: set[str] = set()
        self._admits: Callable[[], None] | None = None
        self._comes: Callable[[], None] = lambda: None
        self._closes: Callable[[], None] | None = None

    @property
    def formed(self) -> bool:
        """Whether there has been one: then all use them, and no failure is answered by a replay."""
        return self._survivor_group is not None

    @property
    def absent(self) -> frozenset[int]:
        """Ranks that failed and have not been admitted again, as of the newest announcement."""
        return self._runtime.absent

    def survivor_group(self) -> SurvivorGroup:
        """Connect the ranks that are present; blocks until all of them have called this. See :class:`SurvivorGroup`.

        A worker that uses survivor groups does all communication of its training steps over them. Ask again when one
        breaks; one that is whole is returned again. If a rank does not come in the time-out of the process group, the
        job ends.

        Raises:
            ConfigError: if ``on_failure`` is not ``reroute``.
            NotConnected: if the ranks do not reach each other.
        """
        runtime, started = self._runtime, time.time()
        if not self._env.config.reroutes:
            raise ConfigError(
                "survivor groups are for on_failure='reroute': in all other cases a failed rank is waited for"
            )
        if self._survivor_group is None:
            self._recovery.store.below().set(survivor_group_key(self._env.rank, self._env.incarnation), "1")
        while True:
            with runtime.lock:
                # Failures before all use survivor groups, or without a replacement, are answered by a new generation.
                while not runtime.absent and runtime.generation < runtime.latest:
                    runtime.raise_if_ended()
                    runtime.changed.wait(1.0)
                generation, absent = runtime.latest, runtime.absent
            present = [rank for rank in range(self._env.world_size) if rank not in absent]
            if self._survivor_group is not None:
                survivor_group = self._survivor_group
                if survivor_group.generation == generation and {*survivor_group.ranks, *survivor_group.finished} == set(
                    present
                ):
                    return survivor_group
                survivor_group.close()
            try:
                self._survivor_group = self._connect(generation, present)
            except GenerationAbandoned:
                continue
            if self._env.rank == self._survivor_group.ranks[0]:
                self._recovery.events.emit(
                    "survivor_group",
                    rank=self._env.rank,
                    generation=generation,
                    ranks=list(self._survivor_group.ranks),
                    formed_s=time.time() - started,
                    boundary=runtime.boundary,
                )
            return self._survivor_group

    def _connect(self, generation: int, present: Sequence[int]) -> SurvivorGroup:
        """One survivor group of those that come. Raises GenerationAbandoned if the generation ends meanwhile."""
        runtime, rank = self._runtime, self._env.rank
        inject.point("survivor_group.connect")
        # A generation has several survivor groups if replacements are admitted in it, each with more ranks.
        name = f"survivor group{len(present)}"
        store, meeting = self._recovery.store.below(), f"gen/{generation}/{name}"
        store.set(f"{meeting}/{rank}", "1")
        arrivals = _Arrivals(store, meeting)
        # As long as torch waits at least: nobody that is present failed, so whoever is late computes.
        limit_s = runtime.groups.longest_s(runtime.world) if runtime.world is not None else runtime.wait_timeout_s
        what = f"to begin the next training step (in generation {generation}, without the failed ranks)"
        self._wait(arrivals, {each: str(each) for each in present}, generation, limit_s, what)
        # Whoever comes here does not finish in between, and whoever has finished does not come.
        ranks = tuple(each for each in present if arrivals.come(each))
        timeout = runtime.world.timeout if runtime.world is not None else LONGEST_WAIT
        for attempt in range(MAX_ATTEMPTS):
            try:
                inner = runtime.generations.side_group(
                    f"{name}.{attempt}", ranks, generation, attempt=attempt, operation_timeout=timeout
                )
            except NotConnected:
                continue
            survivor_group = SurvivorGroup(
                runtime, inner, generation, ranks, tuple(each for each in present if each not in ranks)
            )
            try:
                survivor_group.barrier()  # all are connected, or nobody uses it
                return survivor_group
            except RuntimeError as error:
                survivor_group.close()
                if isinstance(error, SurvivorGroupBroken):
                    raise GenerationAbandoned(str(error)) from error
                if isinstance(error, (SwiftError, inject.FaultInjected)):
                    raise
        raise NotConnected(
            f"rank {rank}: {ranks_text(ranks)} do not reach each other, although all of them run. Check the network, "
            "and firewalls between their machines"
        )

    def _wait(
        self,
        store: Keys,
        keys: dict[int, str],
        generation: int,
        limit_s: float,
        what: str,
        *,
        bound: str = "time-out of the process group",
        ends: str = "this ends with an error",
    ) -> None:
        """Block until the keys are there, or end the job. Raises GenerationAbandoned at a failure."""
        with self._runtime.lock:
            self._runtime.note_waiting(+1)
        try:
            with self._runtime.compute_lock.passed_on():
                abandoned = lambda: self._runtime.latest > generation  # noqa: E731
                wait_for(store, keys, abandoned, limit_s, self._env.rank, what, bound=bound, ends=ends)
        except WaitTimeout as error:
            self._recovery.fatal_actions.give_up(error)
        finally:
            with self._runtime.lock:
                self._runtime.note_waiting(-1)

    def before_collectives(self, call: Callable[[], None]) -> None:
        """Have ``call`` run before a collective of all ranks while some are absent; also for one that waits already
        when they fail, on another thread then. It admits them. The newest ``call`` counts.
        """
        self._admits = call

    def while_completed(self, call: Callable[[], None]) -> None:
        """Have ``call`` run in a replacement that is in, before it gets the last updates of its state."""
        self._comes = call

    def at_end(self, call: Callable[[], None]) -> None:
        """Have ``call`` run when the program has ended without an error, before this worker is done."""
        link.at_end(call)

    def close_at_end(self, close: Callable[[], None]) -> Callable[[], None] | None:
        """As :meth:`at_end`, where the newest of its kind counts. Returns the one before, or None."""
        if self._closes is None:
            link.at_end(lambda: self._closes() if self._closes is not None else None)
        before, self._closes = self._closes, close
        return before

    def await_absent(self) -> bool:
        if self._admits is None:
            return False
        self._admits()
        return True

    # -- admitting --------------------------------------------------------------------------------

    def joining_ranks(self, *, wait: WaitFor = WaitFor.NOT_AT_ALL) -> tuple[int, ...]:
        """Absent ranks whose replacements wait to be admitted. Who waits in another entry call cannot be admitted here:
        where that is waited for, all go back to the checkpoint.

        Ask on one rank, right after :meth:`Job.step_boundary`, and tell the others: they may see it later. ``wait``:
        block until all absent ranks do, or one of them, or until another rank fails; otherwise this returns at once. If
        they do not come in ``rejoin_after_s`` and ``wait_timeout_s`` together, the job ends.
        """
        with self._runtime.lock:
            generation, absent = self._runtime.latest, sorted(self._runtime.absent)
        if not absent:
            return ()
        keys = {rank: join_request_key(generation, rank) for rank in absent}
        store, waits = self._recovery.store.below(), wait is not WaitFor.NOT_AT_ALL
        if waits:
            store.set(still_key(generation), "1")
            timeout_s = self._env.config.reroute.rejoin_after_s + self._runtime.wait_timeout_s
            try:
                what = "to be admitted (they failed, and their replacements run the script up to the training loop)"
                bound = "reroute.rejoin_after_s and detection.wait_timeout_s"
                those = _AnyOf(store) if wait is WaitFor.FOR_ONE else store
                self._wait(those, keys, generation, timeout_s, what, bound=bound)
            except GenerationAbandoned:
                return ()
        said = {rank: self._asked_to_join(store, key, waits=waits) for rank, key in keys.items()}
        other = [rank for rank, entry in said.items() if entry not in (None, self._position.entry)]
        if waits and other:
            self._recovery.fatal_actions.fall_back(
                f"the replacement of {ranks_text(other)} is in another call of the program (fit, validate, ...) than "
                "the others, so it cannot be admitted: all ranks must make the same calls"
            )
        return tuple(rank for rank, entry in said.items() if entry == self._position.entry)

    def _asked_to_join(self, store: Store, key: str, *, waits: bool) -> int | None:
        """In which entry call a replacement waits; None if it does not, or what it says is damaged."""
        if not store.check([key]):
            return None
        try:
            entry: int = decode(store.get(key), int, key)
            return entry
        except DamagedRecord as error:
            if waits:
                self._recovery.fatal_actions.give_up(error)
            if key not in self._passed_over:
                self._passed_over.add(key)
                console(f"{error}. The replacement that wrote it is not admitted; its rank stays absent")
            return None

    def admit(self, ranks: Sequence[int]) -> bool:
        """Admit replacements, each as a copy of one of its replicas as it has published itself at the last step
        boundary, random generators included. All members of the newest survivor group call this after the same step
        boundary: right after it, or after the step that followed and before anything else that communicates.
        Replacements then run the batch from its boundary; updates that their state contains already do nothing.
        ``ranks``: what :meth:`joining_ranks` gave, on one of them. Other absent ranks stay absent.

        Returns:
            Whether they are in. If not, another rank failed meanwhile. In both cases ask for the next survivor group.
        """
        assert self._survivor_group is not None
        runtime, recovery, survivor_group = self._runtime, self._recovery, self._survivor_group
        present = {*survivor_group.ranks, *survivor_group.finished}
        absent = frozenset(range(self._env.world_size)) - present
        turn = Round(survivor_group.generation, absent, frozenset(ranks))
        started, first = time.time(), self._env.rank == survivor_group.ranks[0]
        inject.point("survivor_group.admit")
        for rank in ranks if first else ():
            recovery.store.below().set(admitting_key(survivor_group.generation, rank), turn.to_json())
        try:
            received = recovery.admit(turn)
        except GenerationAbandoned:
            self._await_next(survivor_group.generation)
            return False
        if first:
            stall_s = time.time() - started
            for rank in ranks:
                recovery.events.emit(
                    "admitted",
                    rank=rank,
                    generation=survivor_group.generation,
                    boundary=runtime.boundary,
                    stall_s=stall_s,
                    bytes_moved=received.nbytes,
                )
        return True

    def join_request(self, entry: int) -> Received:
        """Replacement: block until it is admitted and its state is complete. Returns what was received."""
        runtime, recovery, rank = self._runtime, self._recovery, self._env.rank
        inject.point("survivor_group.join_request")
        store = recovery.store.below()
        while True:
            generation = runtime.latest
            key = admitting_key(generation, rank)
            try:
                self._copies.fetch(generation)
                store.set(join_request_key(generation, rank), str(entry))
                others = set(range(self._env.world_size)) - runtime.absent
                what = f"and the others to let rank {rank} in, at their next step boundary"
                letting = {min(others, default=0): key}
                self._wait(store, letting, generation, math.inf, what, ends="it waits as long as they train")
                turn = Round.from_json(store.get(key), generation, rank, self._env.world_size)
                received = recovery.admit(turn)
                break
            except GenerationAbandoned:
                self._await_next(generation)
            except DamagedRecord as error:
                recovery.fatal_actions.give_up(error)
        if self._copies.pending:
            self._comes()
            self._copies.complete()
        return received

    def _await_next(self, generation: int) -> None:
        with self._runtime.lock:
            while self._runtime.latest <= generation:
                self._runtime.raise_if_ended()
                self._runtime.changed.wait(1.0)

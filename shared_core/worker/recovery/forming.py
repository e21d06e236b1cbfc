"""The forming of a generation, as every rank does it.

All post their frontier, one computes the plan for all (:mod:`shared_core.worker.recovery.agreement`), they connect,
move what the plan says, and install it only after a barrier. If anybody fails meanwhile, the generation is abandoned
and the next one formed: nothing is ever half-installed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from shared_core.errors import GenerationAbandoned
from shared_core.events import console
from shared_core.faults import inject
from shared_core.protocol.admission import admit
from shared_core.protocol.frontier import StepBoundary
from shared_core.protocol.plan import Agreed, Plan
from shared_core.protocol.rounds import Round, ranks_in
from shared_core.protocol.worker_phase import WorkerEvent
from shared_core.transport.store import Store
from shared_core.waiting import Wait, poll, ranks_text
from shared_core.worker.comm.gloo import InnerGroup
from shared_core.worker.comm.state import EXIT_STALE, wait_for_change
from shared_core.worker.messages.group_log import Logged
from shared_core.worker.recovery.agreement import Agreement, decided
from shared_core.worker.recovery.context import Context
from shared_core.worker.recovery.exchange import Exchange, Received, Replay, Replaying
from shared_core.worker.recovery.transfer import StillWriting
from shared_core.worker.state.publications import SharedMemoryPublisher


@dataclass(frozen=True, eq=False)
class Comparison:
    """Replicas are to be compared.

    Attributes:
        generation: in which they were given their state.
        version: optimizer steps from which on they are compared.
        start: nobody was given any state: it is seen whether they are replicas at all.
    """

    generation: int
    version: int
    ranks: tuple[int, ...]
    start: bool = False


class Forming:
    """Forms generations on the thread that calls, and admits replacements to them.

    Attributes:
        target: the step boundary that a replacement has prepared for; None for the beginning of the script.
        comparison: the newest that is due, by identity; None before a generation was formed.
    """

    def __init__(
        self,
        context: Context,
        publisher: SharedMemoryPublisher,
        agreement: Agreement,
        exchange: Exchange,
    ) -> None:
        self._env, self._runtime, self._events = context.env, context.runtime, context.events
        self._lifecycle, self._store = context.lifecycle, context.store
        self._publisher, self._agreement, self._exchange = publisher, agreement, exchange
        self.target: StepBoundary | None = None
        self.comparison: Comparison | None = None
        self._for_later: Replay = {}
        self._boundary: StepBoundary | None = None

    def prepare(self, generation: int) -> StepBoundary | None:
        """Replacement: the step boundary where it starts, as all ranks see it; None for the beginning of the
        script. Blocks.

        Raises:
            GenerationAbandoned: if somebody failed meanwhile.
            RecoveryFailed: if nobody can serve it.
            WaitTimeout: if a rank does not say where it stands.
        """
        store = self._store.below()
        self._agreement.post(store, generation)
        self.target = self._agreement.plan(store, generation).boundaries.get(self._env.rank)
        return self.target

    def form(self, generation: int) -> Received:
        """One attempt at a generation. Blocks. The process exits where this worker has to start over: its step boundary
        can no longer be reached, or a cut message may still arrive in its parameters.

        Raises:
            GenerationAbandoned: if somebody failed meanwhile; nothing is installed then.
            RecoveryFailed: if nobody can serve a replacement.
            WaitTimeout: if a rank does not take part in time.
        """
        store, agreement, joins = self._store.below(), self._agreement, self._lifecycle.joins
        agreement.post(store, generation)
        plan = agreement.plan(store, generation)
        if plan.leave:
            self._start_together(plan, generation)
        # Replicas are compared at the first step boundary after everyone has made a step beyond what anybody has now.
        everyone = tuple(range(self._env.world_size))
        self.comparison = Comparison(generation, plan.newest + 1, everyone, start=not plan.boundaries)
        if joins:
            if plan.boundaries.get(self._env.rank) != self.target:
                message = "step boundary no longer reachable, starting over"
                self._events.emit("warning", rank=self._env.rank, generation=generation, message=message)
                os._exit(EXIT_STALE)
            agreement.say_ready(store, generation, plan.replacements)
        agreement.go(store, generation, plan.replacements)
        began = time.monotonic()
        inner = self._connect(plan, generation)
        received = self._exchange.take()
        received.seconds = time.monotonic() - began
        replayed = tuple(
            r for r, boundary in sorted(plan.boundaries.items()) if plan.logged and (boundary is None or boundary.saved)
        )
        if replayed:
            survivors = tuple(rank for rank in range(self._env.world_size) if rank not in plan.boundaries)
            starts = [plan.boundaries[rank] for rank in replayed]
            boundaries = tuple(0 if boundary is None else boundary.index for boundary in starts)
            received.replaying = Replaying(generation, replayed, survivors, plan.oldest, boundaries)
        self._install(plan, inner, generation, received.replay, joins)
        inject.point("recovery.installed")
        return received

    def _connect(self, plan: Plan, generation: int, members: Sequence[int] | None = None) -> InnerGroup:
        """As :meth:`Exchange.connect`; exits where a cut message may still arrive in the parameters."""
        try:
            return self._exchange.connect(plan, generation, members)
        except StillWriting:
            message = "a message that was cut may still arrive in its parameters, starting over"
            self._events.emit("warning", rank=self._env.rank, generation=generation, message=message)
            os._exit(EXIT_STALE)

    def _start_together(self, plan: Plan, generation: int) -> NoReturn:
        """A replacement needs messages that are not on disk: their senders begin again with it (selective logging).
        Exits in these. Raises GenerationAbandoned in all others, when that is known.
        """
        if self._env.rank in plan.leave:
            self._events.emit(
                "together", rank=self._env.rank, generation=generation, replacements=list(plan.replacements)
            )
            console(
                f"rank {self._env.rank} starts again together with {ranks_text(plan.replacements)}: they share a group "
                "of log.groups"
            )
            os._exit(EXIT_STALE)
        whom = f"{ranks_text(plan.leave)} to end, which start again together with {ranks_text(plan.replacements)}"
        first = min(set(range(self._env.world_size)) - set(plan.leave), default=0)
        with self._runtime.lock:
            given_up = lambda: self._lifecycle.ended(generation)  # noqa: E731
            wait_for_change(self._runtime, whom, given_up, speaks=self._env.rank == first)
        raise GenerationAbandoned("others start again")

    def _install(self, plan: Plan, inner: InnerGroup, generation: int, replay: Replay, joins: bool) -> None:
        """Take over what was moved, and go live. Raises GenerationAbandoned if somebody failed meanwhile."""
        runtime, lifecycle = self._runtime, self._lifecycle
        with runtime.lock:
            # From here on this worker counts as a survivor; entries are heard under the same lock.
            if lifecycle.ended(generation):
                inner.discard()
                raise GenerationAbandoned("a failure was announced at the last moment")
            runtime.absent = frozenset()
            lifecycle.step(WorkerEvent.INSTALLED)
            runtime.generation = generation
            if joins:
                self._take_place(plan)
            for name, entries in replay.items():
                if name in runtime.groups:
                    runtime.groups[name].replay.update(entries)
                else:
                    self._for_later.setdefault(name, {}).update(entries)
        runtime.generations.go_live(generation, inner, plan.redo, plan.received)

    def _take_place(self, plan: Plan) -> None:
        """Set the counts to where the failed worker stood at the step boundary. Callers hold the runtime's lock."""
        runtime, boundary = self._runtime, plan.boundaries[self._env.rank]
        self._boundary = boundary
        runtime.results.mark(0 if boundary is None else boundary.index)
        if boundary is not None:
            runtime.boundary = runtime.stable = boundary.index
            runtime.in_startup = False
            runtime.entry = boundary.entry
            for group in runtime.groups.all():
                group.start_from(boundary)
        runtime.sources = {} if plan.copies else self._publisher.sources.read()
        # What a failed worker with a damaged state has computed is no measure.
        born = self._lifecycle.entries[self._lifecycle.born]
        runtime.damaged = born.divergent(self._env.rank)
        skips = (runtime.damaged and not self._env.config.state.heals_corruption) or plan.copies
        runtime.expected = {} if skips else self._publisher.input_checksums.read()

    def made_again(self, group: str) -> tuple[StepBoundary | None, dict[int, Logged]]:
        return self._boundary, self._for_later.pop(group, {})

    # -- rounds: replacements that have asked to join, on the program's thread of all members ----------

    def admit(self, turn: Round) -> Received:
        """Admit the replacements of a round; all survivors stand at the same step boundary. Blocks.

        Raises:
            GenerationAbandoned: if somebody failed meanwhile, and the replacements are not in.
            RecoveryFailed: if they cannot be admitted.
            WaitTimeout: if a rank does not take part in time.
            DamagedRecord: what another rank has said is no frontier, or no plan.
        """
        store = self._store.below()
        plan = self._plan_round(turn, store)
        inner = self._agree_on_round(turn, plan, store)
        received = self._install_round(turn, plan, inner)
        inject.point("recovery.installed")
        return received

    def _plan_round(self, turn: Round, store: Store) -> Plan:
        rank, name, members = self._env.rank, turn.name, turn.members(self._env.world_size)
        frontiers, plan = {each: f"{name}/front/{each}" for each in members}, f"{name}/plan"
        newest: Sequence[StepBoundary] = self._publisher.boundaries()[-1:]
        store.set(frontiers[rank], self._agreement.front(newest).to_json())
        if store.add(f"{name}/fronts", 1) == len(members):
            inject.point("recovery.deciding")
            absent = self._lifecycle.entries[turn.generation].absent or ()
            agreed = decided(store, frontiers, self._env.world_size, lambda found: admit(found, absent))
            store.set(plan, agreed.to_json())

        def come(each: int) -> bool:
            return bool(store.check([frontiers[each]]))

        def what() -> str:
            missing = ranks_text(each for each in members if not come(each))
            return f"{missing} to take part in letting {ranks_text(turn.ranks)} in"

        def speaks() -> bool:
            return not any(come(each) for each in members if each < rank)

        limit_s, bound = self._agreement.wait_limit(turn.generation)
        wait = Wait(f"rank {rank}", what, limit_s, bound=bound, speaks=speaks)
        poll(lambda: store.check([plan]), lambda: self._lifecycle.ended(turn.generation), wait)
        return Agreed.from_json(store.get(plan), plan, self._env.world_size).plan_or_fail()

    def _agree_on_round(self, turn: Round, plan: Plan, store: Store) -> InnerGroup | None:
        """Connect, move, and settle whether the replacements are in. Returns the connected group, or None if another
        failure has ended the generation with the replacements in. Raises GenerationAbandoned if it has ended
        without them.
        """
        inner = None
        try:
            inner = self._connect_round(turn, plan)
            # The first says whether the replacements are in: one of us, or an agent that has seen another failure.
            said = store.compare_set(turn.key, "", turn.word)
            inject.point("survivor_group.agreed")
        except GenerationAbandoned:
            # Somebody may have come further than we did. Then all have got to the barrier, with all that they need.
            if not store.check([turn.key]):
                raise
            said = store.get(turn.key)
        if ranks_in(said, turn.key, turn.absent) == turn.ranks:
            return inner
        if inner is not None:
            inner.discard()
        raise GenerationAbandoned("another failure came first")

    def _connect_round(self, turn: Round, plan: Plan) -> InnerGroup:
        """Connect a round, the last one in the default group, and move. Raises as :meth:`Exchange.connect`."""
        members = turn.members(self._env.world_size) if turn.away else None
        return self._connect(plan, turn.generation, members)

    def _install_round(self, turn: Round, plan: Plan, inner: InnerGroup | None) -> Received:
        """The replacements of a round are in: take over what was moved. While others are absent, or if another failure
        has ended the generation, it does not go live. ``inner``: what :meth:`_connect_round` gave; None if it was
        abandoned with the replacements in.
        """
        runtime, lifecycle, joins = self._runtime, self._lifecycle, self._lifecycle.joins
        with runtime.lock:
            late = lifecycle.ended(turn.generation)
            live = not late and not turn.away
            if not late:
                runtime.absent = turn.away
            if not live:
                runtime.broken = True
            lifecycle.step(
                WorkerEvent.ADMITTED if live else WorkerEvent.ADMITTED_LATE if late else WorkerEvent.ADMITTED_SOME
            )
            if live or joins:
                runtime.generation = turn.generation
            if joins:
                self._take_place(plan)
            self.comparison = Comparison(turn.generation, plan.newest + 1, turn.members(self._env.world_size))
        if not live and inner is not None:
            inner.discard()
        runtime.generations.go_live(turn.generation, inner if live else None, plan.redo, plan.received)
        return self._exchange.take()

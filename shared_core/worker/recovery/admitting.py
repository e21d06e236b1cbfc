"""Admits replacements that have asked to join, those that are ready in one round; others stay absent meanwhile.

Survivors and these replacements say where they stand, and the last to do so computes the plan for all
(:mod:`shared_core.protocol.admission`). They connect, move what the plan says, and meet at a barrier; then the first
word counts, of one of them or of an agent that has seen another failure. While others are absent they connect for this
alone, and continue without the default group. In the round of the last of them the generation goes live.
"""

from __future__ import annotations

from collections.abc import Sequence

from shared_core.errors import GenerationAbandoned, RecoveryFailed
from shared_core.faults import inject
from shared_core.protocol.admission import admit
from shared_core.protocol.frontier import StepBoundary, read_frontiers
from shared_core.protocol.plan import Agreed, Plan
from shared_core.protocol.rounds import Round, ranks_in
from shared_core.transport.store import Store
from shared_core.waiting import Wait, poll, ranks_text
from shared_core.worker.comm.gloo import InnerGroup
from shared_core.worker.recovery.context import Context
from shared_core.worker.recovery.exchange import Received
from shared_core.worker.recovery.forming import Forming
from shared_core.worker.recovery.frontier_builder import FrontierBuilder
from shared_core.worker.state.publications import SharedMemoryPublisher


class Admitting:
    """Admits replacements, on the program's thread of all members of a round."""

    def __init__(
        self, context: Context, publisher: SharedMemoryPublisher, frontier_builder: FrontierBuilder, forming: Forming
    ) -> None:
        self._env, self._runtime = context.env, context.runtime
        self._lifecycle, self._store = context.lifecycle, context.store
        self._publisher, self._frontier_builder, self._forming = publisher, frontier_builder, forming

    def admit(self, turn: Round) -> Received:
        """Admit the replacements of a round; all survivors stand at the same step boundary. Blocks.

        Raises:
            GenerationAbandoned: if somebody failed meanwhile, and the replacements are not in.
            RecoveryFailed: if they cannot be admitted.
            WaitTimeout: if a rank does not take part in time.
            DamagedRecord: what another rank has said is no frontier, or no plan.
        """
        store = self._store.below()
        plan = self._plan(turn, store)
        inner = self._agree(turn, plan, store)
        received = self._forming.install_round(turn, plan, inner)
        inject.point("recovery.installed")
        return received

    def _plan(self, turn: Round, store: Store) -> Plan:
        rank, name, members = self._env.rank, turn.name, turn.members(self._env.world_size)
        frontiers, decided = {each: f"{name}/front/{each}" for each in members}, f"{name}/plan"
        newest: Sequence[StepBoundary] = self._publisher.boundaries()[-1:]
        store.set(frontiers[rank], self._frontier_builder.front(newest).to_json())
        if store.add(f"{name}/fronts", 1) == len(members):
            inject.point("recovery.deciding")
            store.set(decided, self._decide(turn, store, frontiers).to_json())

        def come(each: int) -> bool:
            return bool(store.check([frontiers[each]]))

        def what() -> str:
            missing = ranks_text(each for each in members if not come(each))
            return f"{missing} to take part in letting {ranks_text(turn.ranks)} in"

        def speaks() -> bool:
            return not any(come(each) for each in members if each < rank)

        limit_s, bound = self._frontier_builder.wait_limit(turn.generation)
        wait = Wait(f"rank {rank}", what, limit_s, bound=bound, speaks=speaks)
        poll(lambda: store.check([decided]), lambda: self._lifecycle.ended(turn.generation), wait)
        return Agreed.from_json(store.get(decided), decided, self._env.world_size).plan_or_fail()

    def _decide(self, turn: Round, store: Store, keys: dict[int, str]) -> Agreed:
        said = store.multi_get(list(keys.values()))
        frontiers = read_frontiers(dict(zip(keys, said, strict=True)), keys, self._env.world_size)
        try:
            return Agreed(admit(frontiers, self._lifecycle.entries[turn.generation].absent or ()))
        except RecoveryFailed as error:
            return Agreed(None, str(error))

    def _agree(self, turn: Round, plan: Plan, store: Store) -> InnerGroup | None:
        """Connect, move, and settle whether the replacements are in. Returns the connected group, or None if another
        failure has ended the generation with the replacements in. Raises GenerationAbandoned if it has ended
        without them.
        """
        inner = None
        try:
            inner = self._forming.connect_round(turn, plan)
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

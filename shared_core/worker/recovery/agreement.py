"""How the ranks of a generation agree on its plan: one of them computes it for all.

Each rank says where it stands and counts itself. Whoever is the last finds all that a plan needs, computes the plan and
publishes it. If it fails before, that is a failure like any other: the next generation is formed. The others wait for
one key, in which the watcher of their ledger blocks. Whoever ends the generation sets that key too: nobody polls.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

from shared_core.errors import GenerationAbandoned, RecoveryFailed
from shared_core.faults import inject
from shared_core.protocol.frontier import Frontier, GroupFrontier, StepBoundary, read_frontiers
from shared_core.protocol.generation import GIVEN_UP, generation_key, go_key, plan_key
from shared_core.protocol.plan import Agreed, Plan, decide
from shared_core.transport.store import Store
from shared_core.waiting import Wait, ranks_text, wait_for
from shared_core.worker.comm.groups import GroupState
from shared_core.worker.messages.archive import Archive
from shared_core.worker.recovery.context import Context
from shared_core.worker.recovery.exchange import Donor

Heard = TypeVar("Heard")


class Agreement:
    """What one rank says and hears before a generation is connected. Its watcher, its recovery threads and its
    program call.

    Attributes:
        boundaries: in a replacement, the step boundaries that the failed worker has published, or that are in a
            checkpoint.
    """

    def __init__(self, context: Context, donor: Donor) -> None:
        self._env, self._runtime, self._lifecycle = context.env, context.runtime, context.lifecycle
        self._donor = donor
        self.boundaries: tuple[StepBoundary, ...] = ()
        self._saying = threading.Lock()
        self._said: set[str] = set()
        self._plans: dict[int, Agreed] = {}
        self._gone = -1

    # -- where this rank stands --------------------------------------------------------------------

    def front(self, boundaries: Sequence[StepBoundary] | None = None) -> Frontier:
        """Where this rank stands. Where replacements are admitted, with the step ``boundaries`` that it has passed."""
        front = self._of_replacement() if self._lifecycle.joins else self._of_survivor()
        return front if boundaries is None else replace(front, boundaries=tuple(boundaries))

    def wait_limit(self, generation: int) -> tuple[float, str]:
        """How long others are waited for in a generation, in seconds, and the name of that bound."""
        limit_s, world = self._runtime.wait_timeout_s, self._runtime.world
        if generation == 0 and world is not None and self._runtime.groups.longest_s(world) > limit_s:
            # Nobody failed: the scripts come here when they do, as without this product.
            return self._runtime.groups.longest_s(world), "time-out of the process group"
        return limit_s, "detection.wait_timeout_s"

    def collect(self, store: Store, name: str, ranks: Sequence[int], generation: int, what: str) -> list[bytes]:
        """Block until ``ranks`` have set ``name`` in a generation. Returns the values in their order. ``what``: the
        ranks are to do, for the line that a long wait prints. Raises GenerationAbandoned and WaitTimeout.
        """
        keys = {rank: f"{generation_key(generation)}/{name}/{rank}" for rank in ranks}
        limit_s, bound = self.wait_limit(generation)
        given_up = lambda: self._lifecycle.ended(generation)  # noqa: E731
        wait_for(store, keys, given_up, limit_s, self._env.rank, what, bound=bound)
        return store.multi_get(list(keys.values()))

    def _of_replacement(self) -> Frontier:
        return Frontier(
            rank=self._env.rank,
            incarnation=self._env.incarnation,
            replacement=True,
            version=0,
            boundaries=self.boundaries,
        )

    def _of_survivor(self) -> Frontier:
        with self._runtime.lock:
            groups = {
                name: _group_front(group, self._runtime.disk.archive) for name, group in self._runtime.groups.items()
            }
        return Frontier(
            rank=self._env.rank,
            incarnation=self._env.incarnation,
            replacement=False,
            version=self._donor.version,
            boundaries=(),
            groups=groups,
            together=list(self._runtime.disk.together),
            **self._donor.keeps,
        )

    # -- what this rank says -----------------------------------------------------------------------

    def post(self, store: Store, generation: int) -> None:
        """Say where this rank stands; does nothing a second time in a generation. The last rank to do so decides for
        all. Raises DamagedRecord if what another rank has said is no frontier.
        """
        if not self._first(f"front/{generation}"):
            return
        key, world_size = generation_key(generation), self._env.world_size
        store.set(f"{key}/front/{self._env.rank}", self.front().to_json())
        if store.add(f"{key}/fronts", 1) != world_size:
            return
        inject.point("recovery.deciding")
        agreed = decided(store, {rank: f"{key}/front/{rank}" for rank in range(world_size)}, world_size, decide)
        store.compare_set(plan_key(generation), "", agreed.to_json())
        if agreed.plan is not None and not agreed.plan.boundaries:
            store.compare_set(go_key(generation), "", "1")

    def say_ready(self, store: Store, generation: int, replacements: Sequence[int]) -> None:
        """This replacement has come to where it joins. The last of ``replacements`` lets all others connect."""
        if not self._first(f"ready/{generation}"):
            return
        key = generation_key(generation)
        store.set(f"{key}/ready/{self._env.rank}", "1")
        if store.add(f"{key}/readies", 1) == len(replacements):
            store.compare_set(go_key(generation), "", "1")

    def _first(self, what: str) -> bool:
        """Whether this is said for the first time: the watcher and the program may both come to say it."""
        with self._saying:
            new = what not in self._said
            self._said.add(what)
            return new

    # -- what it hears -----------------------------------------------------------------------------

    def hear(self, store: Store, generation: int) -> None:
        """The watcher's thread: block in ``store`` until a generation has its plan and all its replacements are ready,
        or it has ended; those that wait are woken. Raises DamagedRecord if what was said is no plan.
        """
        key = plan_key(generation)
        if (said := store.get(key)) != GIVEN_UP.encode():
            agreed = Agreed.from_json(said, key, self._env.world_size)
            with self._runtime.lock:
                self._plans = {generation: agreed}
                self._runtime.changed.notify_all()
        if store.get(go_key(generation)) != GIVEN_UP.encode():
            with self._runtime.lock:
                self._gone = generation
                self._runtime.changed.notify_all()

    def plan(self, store: Store, generation: int) -> Plan:
        """Block until the plan of a generation is there.

        Raises:
            GenerationAbandoned: if the generation ends meanwhile.
            RecoveryFailed: if nobody can serve a replacement.
            WaitTimeout: if a rank does not say where it stands.
        """
        what = self._lifecycle.why("create the process group", generation)
        name = f"{generation_key(generation)}/front"

        def come(rank: int) -> bool:
            return bool(store.check([f"{name}/{rank}"]))

        ranks = range(self._env.world_size)
        speaks = lambda: not any(come(rank) for rank in range(self._env.rank))  # noqa: E731
        agreed = self._wait(lambda: self._plans.get(generation), ranks, come, generation, what, speaks)
        return agreed.plan_or_fail()

    def go(self, store: Store, generation: int, replacements: Sequence[int]) -> None:
        """Block until all replacements have come to where they join. Raises GenerationAbandoned and WaitTimeout."""
        what = self._lifecycle.why("reach the training loop", generation)
        name, others = f"{generation_key(generation)}/ready", set(range(self._env.world_size)) - set(replacements)

        def come(rank: int) -> bool:
            return bool(store.check([f"{name}/{rank}"]))

        speaks = lambda: self._env.rank == min(others, default=0)  # noqa: E731
        self._wait(lambda: generation == self._gone or None, replacements, come, generation, what, speaks)

    def _wait(
        self,
        heard: Callable[[], Heard | None],
        ranks: Iterable[int],
        come: Callable[[int], bool],
        generation: int,
        what: str,
        speaks: Callable[[], bool],
    ) -> Heard:
        runtime, (limit_s, bound) = self._runtime, self.wait_limit(generation)
        missing = lambda: f"{ranks_text(rank for rank in ranks if not come(rank))} {what}"  # noqa: E731
        wait = Wait(f"rank {self._env.rank}", missing, limit_s, bound=bound, speaks=speaks)
        while True:
            with runtime.lock:
                runtime.changed.wait_for(lambda: heard() or self._lifecycle.ended(generation), wait.next_s())
                if self._lifecycle.ended(generation):
                    raise GenerationAbandoned(what)
                if (found := heard()) is not None:
                    return found
            wait.look()  # it asks the store, so not under the lock


def decided(
    store: Store, keys: dict[int, str], world_size: int, decide: Callable[[dict[int, Frontier]], Plan]
) -> Agreed:
    """What ``decide`` makes of the frontiers under ``keys``, by rank. Raises DamagedRecord if one is none."""
    frontiers = read_frontiers(dict(zip(keys, store.multi_get(list(keys.values())), strict=True)), keys, world_size)
    try:
        return Agreed(decide(frontiers))
    except RecoveryFailed as error:
        return Agreed(None, str(error))


def _group_front(group: GroupState, archive: Archive | None) -> GroupFrontier:
    received, sent = group.channels.watermarks()
    entries = group.log.entries
    on_disk = archive.indices(group.name) if archive is not None else ()
    return GroupFrontier(
        ranks=group.members,
        next=group.next,
        done=group.done.to_json(),
        log=sorted({*(seq for seq, entry in entries.items() if entry.redo is None), *group.replay, *on_disk}),
        exclusive=[seq for seq, entry in entries.items() if entry.redo is not None],
        received=received,
        sent=sent,
        held=group.channels.held(),
        over=group.over,
    )

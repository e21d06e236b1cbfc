"""The number of workers changes: those that stay agree on a step boundary, and write the state there."""

from __future__ import annotations

import traceback
from collections.abc import Sequence

from shared_core.errors import DamagedRecord, GenerationAbandoned
from shared_core.faults import inject
from shared_core.protocol.cut import Offer, choose_cut
from shared_core.protocol.generation import Entry, generation_key
from shared_core.protocol.worker_env import Resized
from shared_core.transport.store import Store
from shared_core.worker.recovery.context import Context
from shared_core.worker.recovery.donor import Donor
from shared_core.worker.recovery.frontier_builder import FrontierBuilder
from shared_core.worker.recovery.resize import local_state


class Draining:
    """What one worker does when the number of workers changes. Each method runs on a thread of its own."""

    def __init__(self, context: Context, donor: Donor, frontier_builder: FrontierBuilder) -> None:
        self._env, self._runtime = context.env, context.runtime
        self._lifecycle, self._store = context.lifecycle, context.store
        self._donor, self._frontier_builder = donor, frontier_builder

    def drain_for_resize(self, entry: Entry) -> None:
        """Write the state. If that cannot be done, the launcher is told, and failed workers are replaced after all."""
        with self._lifecycle.acting:
            try:
                self._drain_for_resize(entry)
            except GenerationAbandoned:
                return  # somebody else failed, or nobody leaves
            except Exception as error:  # noqa: BLE001 (a full disk, too: whatever it is, another way must be found)
                if not isinstance(error, DamagedRecord):
                    traceback.print_exc()
                reason = f"rank {self._env.rank}: {error}"
                self._store.tell("declined", {"generation": entry.generation, "reason": reason})

    def withdraw(self, entry: Entry) -> None:
        """Nobody leaves, unless a later entry says so again."""
        with self._lifecycle.acting:
            if not self._lifecycle.ended(entry.generation):
                self._donor.withdraw()

    def _drain_for_resize(self, entry: Entry) -> None:
        generation, stay = entry.generation, entry.stay
        joined = self._runtime.generation >= 0
        if not self._lifecycle.break_off(entry) if joined else self._lifecycle.ended(generation):
            return
        inject.point("resize.severed")
        store, key = self._store.below(), generation_key(generation)
        store.set(f"{key}/offer/{self._env.rank}", self._donor.offer().to_json())
        said = self._collect(store, "offer", stay, generation, "to say what state they have")
        offers = [Offer.from_json(raw, f"{key}/offer/{rank}", rank) for rank, raw in zip(stay, said, strict=True)]
        cut = choose_cut({offer.rank: offer for offer in offers})
        inject.point("resize.cut")
        if self._env.rank in cut.donors.values():
            self._donor.drain_for_resize(cut)
            store.set(f"{key}/handed/{self._env.rank}", "1")
        if self._env.rank == min(stay):
            resized = Resized(self._env.restart, self._env.world_size, stay, cut.boundary)
            if cut.boundary and not self._env.machines:
                local_state(self._env, resized)  # only to know that it can be done
            self._collect(store, "handed", tuple(cut.donors.values()), generation, "to hand their state on")
            self._store.tell("handed", {"generation": generation, "boundary": cut.boundary})

    def _collect(self, store: Store, name: str, ranks: Sequence[int], generation: int, what: str) -> list[bytes]:
        return self._frontier_builder.collect(store, name, ranks, generation, f"{what} (the number of workers changes)")

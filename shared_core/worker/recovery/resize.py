"""The number of workers changes: all workers end at one step boundary, and the new ones continue from there.

Those that leave hand their state on in the agent's shared memory: publications are there anyway, and one worker of each
machine adds parameters and optimizer state. The new ones run the script from its start, as a replacement does, with the
new world size, so that everything that depends on it (averages, samplers, gathers) is right by itself; at the step
boundary they take the state over and deal out what is left of the pass over the data.
"""

from __future__ import annotations

import shutil
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shared_core.encoding.plain import loads
from shared_core.errors import DamagedRecord, GenerationAbandoned, RecoveryFailed
from shared_core.faults import inject
from shared_core.loaders.reshard import advance, at_path, divide, loader_states, order_name, taken_up, used
from shared_core.protocol.cut import Offer, choose_cut
from shared_core.protocol.frontier import StepBoundary
from shared_core.protocol.generation import Entry, generation_key
from shared_core.protocol.mirroring import REPLICATED
from shared_core.protocol.worker_env import Resized, WorkerEnv
from shared_core.transport.store import Store
from shared_core.worker.checkpoints.recovery_line import Restored, ends_before
from shared_core.worker.checkpoints.resharding import RANDOM, random_state, sources
from shared_core.worker.recovery.agreement import Agreement
from shared_core.worker.recovery.context import Context
from shared_core.worker.recovery.exchange import Donor
from shared_core.worker.state.publication_file import read_file
from shared_core.worker.state.publications import TALLY, SharedMemoryPublisher


@dataclass(frozen=True)
class _Old:
    publisher: SharedMemoryPublisher
    boundary: StepBoundary
    parts: dict[str, Any]


def take_over(env: WorkerEnv, resized: Resized) -> Restored:
    """What this rank continues from after the number of workers has changed.

    Raises:
        CorruptFile: if what was handed on is damaged.
        RecoveryFailed: if a failed worker's place in the data cannot be told, or this machine has no state.
    """
    mine, added = local_state(env, resized)
    folder = env.rank_dir / f"attempt{env.restart}"
    for tally in () if added else mine.publisher.folder.glob(f"{TALLY}*"):
        shutil.copy(tally, folder)
    main = _read(env, resized, 0) if env.rank == 0 and 0 not in resized.stay else None
    handed = next(env.job_dir.glob(f"rank*/attempt{resized.attempt}/{REPLICATED}"), None)
    if handed is None:
        raise RecoveryFailed(f"nobody has handed the state of step boundary {resized.boundary} on to this machine")
    description, tensors = loads(read_file(handed)[1])
    ends = ends_before(mine.publisher, mine.boundary.entry)
    return Restored(
        mine.boundary,
        mine.parts,
        ends,
        mine.publisher.records.read(),
        description,
        tensors,
        resized=True,
        added=added,
        main=main.parts if main is not None else {},
    )


def local_state(env: WorkerEnv, resized: Resized) -> tuple[_Old, bool]:
    """The rank-local state that ``env.rank`` of ``env.world_size`` continues with, and whether it is an added worker.

    Raises:
        CorruptFile: if a publication is damaged.
        RecoveryFailed: if a failed worker's place in the data cannot be told.
    """
    old = {rank: found for rank in range(resized.world_size) if (found := _read(env, resized, rank)) is not None}
    there = {rank for rank, each in old.items() if each.boundary.index == resized.boundary}
    source = sources(resized.stay, there, env.world_size)[env.rank]
    mine = old[max(resized.stay) if source is None else source]
    for path, state in loader_states(mine.parts):
        owned = {"scalars": state["moved"], "generators": state["owned"]["generators"]}
        state |= _deal(env, resized, old, mine, path, state) | {"owned": owned}
    if source is None:
        mine.parts[RANDOM] = random_state(resized.attempt, resized.boundary, env.rank)
    return mine, source is None


def _read(env: WorkerEnv, resized: Resized, rank: int) -> _Old | None:
    """An old worker's newest publication up to the cut; None if it has none."""
    folder = env.job_dir / f"rank{rank}" / f"attempt{resized.attempt}"
    if not folder.is_dir():
        return None
    publisher = SharedMemoryPublisher(folder)
    boundary = max(
        (boundary for boundary in publisher.boundaries() if boundary.index <= resized.boundary),
        key=lambda boundary: boundary.index,
        default=None,
    )
    return None if boundary is None else _Old(publisher, boundary, publisher.read_boundary(boundary.index))


def _deal(
    env: WorkerEnv, resized: Resized, old: Mapping[int, _Old], mine: _Old, path: tuple[Any, ...], state: dict[str, Any]
) -> dict[str, Any]:
    """Changes to a loader's state, so that this rank continues with its part of the rest."""
    if not state["live"]:
        return {"iterations": []}  # earlier passes shape the next one only in worker processes, which are new
    last = state["iterations"][-1]
    if not used(state) and not last["dealt"]:
        return {"fresh": True}
    if not order_name(state) and "indices" not in state:
        return {"live": False, "iterations": []}  # a stream: the pass ends here
    exact = env.config.resize.data == "exact"
    rests = []
    for rank in range(resized.world_size) if exact else sorted(resized.stay):
        each = old.get(rank)
        theirs = at_path(each.parts, path) if each is not None else None
        if each is None or theirs is None:
            raise RecoveryFailed(f"rank {rank} has published no place in the data, so its rest cannot be dealt out")
        done = used(theirs)
        if each.boundary.index != mine.boundary.index:
            # It failed between its last contribution to a batch and the next boundary: that batch is used.
            done = advance(theirs, *_between(resized, old, path, each.boundary.index))
        rests.append(_order(each.publisher, theirs)[done:])
    return taken_up(state, divide(rests, env.world_size)[env.rank])


def _order(publisher: SharedMemoryPublisher, state: Mapping[str, Any]) -> list[Any]:
    """The order of the iteration in progress; it comes with the state where that has just been dealt out."""
    indices: list[Any] = state["indices"] if "indices" in state else publisher.orders.read(order_name(state))
    return indices


def _between(
    resized: Resized, old: Mapping[int, _Old], path: tuple[Any, ...], boundary: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state of the same loader at an earlier boundary and at the cut, of a worker that stayed."""
    for rank in resized.stay:
        if rank in old and any(each.index == boundary for each in old[rank].publisher.boundaries()):
            before, after = at_path(old[rank].publisher.read_boundary(boundary), path), at_path(old[rank].parts, path)
            if before is not None and after is not None:
                return before, after
    raise RecoveryFailed(f"nobody has step boundary {boundary} any more, where a failed worker was seen last")


class Draining:
    """What one worker does when the number of workers changes. Each method runs on its own thread."""

    def __init__(self, context: Context, donor: Donor, agreement: Agreement) -> None:
        self._env, self._runtime = context.env, context.runtime
        self._lifecycle, self._store = context.lifecycle, context.store
        self._donor, self._agreement = donor, agreement

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
        return self._agreement.collect(store, name, ranks, generation, f"{what} (the number of workers changes)")

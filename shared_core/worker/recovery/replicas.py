"""Replicas are compared after each recovery: a minority is replaced, without a majority the job ends.

A large state is not summed at one step boundary, which would be a second stall, but part by part at several: each part
at the same step boundary on all ranks, between two steps, while nothing changes it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from shared_core.codec import Count, damaged, decode
from shared_core.errors import DamagedRecord, GenerationAbandoned, ReplicaMismatch, Unsupported, WaitTimeout
from shared_core.events import console
from shared_core.system import threads
from shared_core.waiting import wait_for
from shared_core.worker.recovery.forming import Comparison
from shared_core.worker.recovery.recovery import WorkerRecovery
from shared_core.worker.state.checksums import RunningSums, combined
from shared_core.worker.state.replicated import Replicated
from shared_core.worker.state.updates import Updates

_WAIT_S = 60.0

_APART = (
    "ranks have trained parameter {} to different values, or keep different optimizer state for it. What is attached "
    "must be the same at all ranks, because a replacement is given another rank's. What each trains for itself "
    "(experts, "
    "parameters that are averaged now and then) goes to job.register(module, its_optimizer) in the place of attach()"
)


@dataclass(frozen=True)
class ReplicaSums:
    """Checksums of replicated state, by parameter, and its version when the last part was summed."""

    version: Count
    sums: list[int]

    @classmethod
    def read(cls, raw: bytes, key: str, parameters: int) -> ReplicaSums:
        """Parse ``raw``, read from ``key``. Raises DamagedRecord if it is none of so many parameters."""
        found: ReplicaSums = decode(raw, cls, key)
        if len(found.sums) != parameters:
            raise damaged(key, f"it has {len(found.sums)} sums of {parameters} parameters")
        return found


class Replicas:
    def __init__(self, recovery: WorkerRecovery, updates: Updates) -> None:
        self._recovery, self._updates = recovery, updates
        self.begin()

    def begin(self) -> None:
        """Nothing is compared yet; again in a forked copy of the process."""
        self._env = self._recovery.env
        #: Comparisons that are made, and of which sums are being made.
        self._compared: Comparison | None = None
        self._summed: Comparison | None = None
        self._sums = RunningSums([])

    def compare(self, ranks: Sequence[int], *, alike: Callable[[], bool], last: bool = False) -> None:
        """Call at each step boundary, on the program's thread; acts at the first ones after all have stepped beyond a
        recovery, or the start. Only sums here: the lowest rank waits for the others and judges on a thread.

        Args:
            ranks: those that hold the same state, this one among them.
            alike: whether something else keeps it the same, so that it need not be compared at the start.
            last: there may be none after this one soon.
        """
        due, options = self._recovery.forming.comparison, self._env.config.state
        # Where they are compared all the time, that decides: it knows what damage may have spread.
        if due is None or not options.verify_checksums or options.verify_every or due is self._compared:
            return
        if self._updates.version < due.version:
            return
        state, ranks = self._updates.replicated, [rank for rank in ranks if rank in due.ranks]
        if due.start and alike():
            ranks = []
        if state is None or len(ranks) < 2 or self._updates.state_version != self._updates.version:
            self._compared = due
            return
        sums = self._sum(state, due, last=last)
        if sums is None:
            return
        self._compared = due
        key = f"sums/{due.generation}/{due.version}"
        report = ReplicaSums(self._updates.version, sums)
        self._recovery.store.below().set(f"{key}/{self._env.rank}", json.dumps(asdict(report)))
        if self._env.rank == min(ranks):
            args = (key, due, ranks, list(state.names))
            threads.start(self._judge, args, name="swift-compare")

    def _sum(self, state: Replicated, due: Comparison, *, last: bool) -> list[int] | None:
        """Sum the next part of the state, or all with ``last``. Returns all sums, by parameter, at the end."""
        found = state.summed(self._updates.outside.local)
        tensors = [data for _, _, data in found]
        sizes = [data.nbytes for data in tensors]
        if self._summed is not due or self._sums.sizes != sizes:
            self._summed, self._sums = due, RunningSums(sizes)
        self._sums.add_part(tensors)
        while last and self._sums.complete is None:
            self._sums.add_part(tensors)
        sums = self._sums.complete
        return None if sums is None else combined(len(state.names), [place for place, _, _ in found], sums)

    def _judge(self, key: str, due: Comparison, members: Sequence[int], names: list[str]) -> None:
        runtime, store = self._recovery.runtime, self._recovery.store.below()
        generation = due.generation
        keys = {rank: f"{key}/{rank}" for rank in members}
        what = "to give the checksums of their parameters after the recovery"
        abandoned, fate = lambda: runtime.latest > generation, "they are not compared"
        try:
            wait_for(store, keys, abandoned, _WAIT_S, self._env.rank, what, bound="a fixed limit", ends=fate)
        except GenerationAbandoned:
            return
        except WaitTimeout as error:
            if due.start:
                return  # it makes no step, or has come to no step boundary
            console(f"{error} Replicas are not compared after this recovery")
            return
        try:
            reports = [ReplicaSums.read(store.get(each), each, len(names)) for each in keys.values()]
        except DamagedRecord as error:
            console(f"{error}. Replicas are not compared after this recovery")
            return
        if len({report.version for report in reports}) != 1:
            return
        verdict = minority([report.sums for report in reports])
        if verdict is None:
            return
        places, place = verdict
        if due.start:
            self._recovery.fatal_actions.fail(Unsupported(_APART.format(names[place])))
            return
        if places:
            self._recovery.store.tell("divergent", [members[each] for each in places])
            return
        self._recovery.fatal_actions.fail(
            ReplicaMismatch(
                f"after the recovery in generation {generation} the replicas differ in parameter {names[place]}, and "
                "there is no majority to tell which is right. Likely causes, the likeliest first. 1. The script "
                "changes parameters or optimizer state outside an optimizer's step: attach averages and target "
                "networks, register what the change depends on, and set state.preimages='always' if such changes "
                "begin late in training. 2. Each rank trains different parameters: register() those and their "
                "optimizer instead of attaching them. 3. The script is not deterministic: an unseeded generator, "
                "a branch on the rank. 4. Memory is faulty. Restart from a checkpoint."
            )
        )


def minority(sums: Sequence[Sequence[int]]) -> tuple[list[int], int] | None:
    """Indices in ``sums`` that differ from more than half of them, and the index of the first parameter that differs;
    None if all are equal.

    Without a majority the list of indices is empty.
    """
    votes: dict[tuple[int, ...], list[int]] = {}
    for rank, each in enumerate(sums):
        votes.setdefault(tuple(each), []).append(rank)
    if len(votes) == 1:
        return None
    best = max(votes, key=lambda each: len(votes[each]))
    other = next(each for each in votes if each != best)
    place = next((i for i, (a, b) in enumerate(zip(best, other, strict=False)) if a != b), 0)
    if 2 * len(votes[best]) > len(sums):
        return sorted(rank for each, ranks in votes.items() if each != best for rank in ranks), place
    return [], place

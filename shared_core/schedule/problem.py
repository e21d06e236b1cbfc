"""What greedy and exact planning share: the problem that they solve, and who computes for a failed worker in it."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

from shared_core.errors import ConfigError
from shared_core.schedule.schedule import Action, Kind, PlannedWorker, Topology
from shared_core.schedule.timing import EQUAL_SLOTS, Times

#: Who computes a micro-batch: (home pipeline, stage, micro-batch) to the worker.
Route = dict[tuple[int, int, int], PlannedWorker]


def survivors(topology: Topology, failed: Collection[PlannedWorker]) -> list[list[int]]:
    """Pipelines that still have a worker, for every stage; ConfigError where a stage has none."""
    for worker in failed:
        if not (0 <= worker.pipeline < topology.pipelines and 0 <= worker.stage < topology.stages):
            raise ConfigError(
                f"failed worker {worker.pipeline}:{worker.stage} does not exist: there are "
                f"{topology.pipelines} pipelines of {topology.stages} stages, counted from 0"
            )
    gone = set(failed)
    alive = [[d for d in range(topology.pipelines) if PlannedWorker(d, s) not in gone] for s in range(topology.stages)]
    for stage, pipelines in enumerate(alive):
        if not pipelines:
            raise ConfigError(
                f"all {topology.pipelines} workers of stage {stage} failed: nobody holds its parameters; wait for a "
                "replacement or restart from a checkpoint"
            )
    return alive


def deal(
    topology: Topology, failed: Collection[PlannedWorker], *, times: Times = EQUAL_SLOTS, ordered: bool = False
) -> Route:
    """Deal every micro-batch of a failed worker out to the peer that would finish first, all its work counted.

    ``ordered``, all of a failed worker to one peer. Peers that are equally fast take turns, over all failures of
    a stage.
    """
    alive = survivors(topology, failed)
    route: Route = {}
    for stage, peers in enumerate(alive):
        gone = sorted(worker.pipeline for worker in set(failed) if worker.stage == stage)
        # In order, the next pipeline takes all: that spreads failures of several stages over the pipelines.
        first = next((i for i, peer in enumerate(peers) if peer > gone[0]), 0) if ordered and gone else 0
        turns = [PlannedWorker(peer, stage) for peer in (*peers[first:], *peers[:first])]
        at = {peer: times.at(peer) for peer in turns}
        takes = {peer: one.forward + one.backward_input + one.backward_weight for peer, one in at.items()}
        count = dict.fromkeys(turns, topology.micro_batches)
        size = topology.micro_batches if ordered else 1
        for d in gone:
            for j in range(topology.micro_batches):
                if j % size == 0:
                    host = min(turns, key=lambda peer: (count[peer] + size) * takes[peer])
                    count[host] += size
                route[d, stage, j] = host
    return route


@dataclass(frozen=True)
class Memory:
    """How many micro-batches a worker can hold at once.

    Attributes:
        micro_batches: at every worker; None is no limit.
        workers: of workers that differ.
    """

    micro_batches: float | None = None
    workers: Mapping[PlannedWorker, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for limit in (self.micro_batches, *self.workers.values()):
            if limit is not None and not limit >= 1:
                raise ConfigError(f"a worker must be able to hold at least 1 micro-batch, got {limit!r}")

    def at(self, worker: PlannedWorker) -> float:
        """The limit of a worker."""
        limit = self.workers.get(worker, self.micro_batches)
        return math.inf if limit is None else limit

    @classmethod
    def of_stages(cls, topology: Topology, room: Sequence[float]) -> Memory:
        """The same limit for all workers of a stage; no entries are no limits."""
        return cls(workers={worker: room[worker.stage] for worker in topology.workers()} if room else {})


NO_LIMIT = Memory()


def held_after(done: Collection[Action]) -> float:
    """How many micro-batches a worker holds that has executed these actions: activations stay until W."""
    change = {Kind.F: 1.0, Kind.I: 0.0, Kind.W: -1.0, Kind.B: -1.0, Kind.OPT: 0.0}
    return sum(change[action.kind] for action in done)


class Variant(StrEnum):
    """How far a plan goes (ReCycle's three techniques, each with those before it)."""

    COUPLED = "coupled"  # backward in one piece
    DECOUPLED = "decoupled"  # hosts run I early and W late
    STAGGERED = "staggered"  # and each stage steps when its own gradients are complete


@dataclass(frozen=True)
class Problem:
    """What is to be scheduled.

    Attributes:
        variant: says whether hosts split their backwards, and what is minimized.
        route: who computes the micro-batches of the failed workers.
        ordered: W (or B) of a pipeline at a stage in ascending order.
        split_last: how many backwards, counted from the last, are split at stages without a failure.
        done: what survivors have executed already, if an iteration is under way.
    """

    topology: Topology
    times: Times
    variant: Variant
    failed: frozenset[PlannedWorker]
    route: Route
    memory: Memory = NO_LIMIT
    ordered: bool = False
    split_last: int = 0
    done: Mapping[PlannedWorker, Collection[Action]] = field(default_factory=dict)

    @cached_property
    def failed_stages(self) -> frozenset[int]:
        return frozenset(worker.stage for worker in self.failed)

    @property
    def staggered(self) -> bool:
        """Whether the period is minimized; of an iteration under way it is always the time until its end."""
        return self.variant is Variant.STAGGERED and not self.done

    def host(self, pipeline: int, stage: int, micro_batch: int) -> PlannedWorker:
        return self.route.get((pipeline, stage, micro_batch)) or PlannedWorker(pipeline, stage)

    def splits(self, pipeline: int, stage: int, micro_batch: int) -> bool:
        if self.variant is Variant.COUPLED:
            return False
        if stage in self.failed_stages:
            return True
        return micro_batch >= self.topology.micro_batches - self.split_last

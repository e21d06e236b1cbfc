"""What greedy and exact planning share: the operations of an iteration as arrays, and a bound that no plan can beat."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from shared_core.reroute.check import NO_LIMIT, Memory
from shared_core.reroute.routing import Route
from shared_core.reroute.schedule import Action, Kind, Topology, Worker
from shared_core.reroute.timing import Times


class Variant(StrEnum):
    """How far a plan goes (ReCycle's three techniques, each with those before it)."""

    COUPLED = "coupled"  # backward in one piece
    DECOUPLED = "decoupled"  # hosts run I early and W late
    STAGGERED = "staggered"  # and each stage steps when its own gradients are complete


@dataclass(frozen=True)
class Problem:
    """What is to be scheduled.

    Attributes:
        topology: shape of the job.
        times: durations.
        variant: the variant; it says whether hosts split their backwards, and what is minimised.
        lost: places without a worker.
        route: who computes their micro-batches.
        memory: limits.
        ordered: W (or B) of a pipeline at a stage in ascending order.
        split: workers that may split backwards: all of them at hosts of a stage with a loss.
        split_last: how many backwards, counted from the last, other workers of an affected pipeline split.
        done: what survivors have executed already, if an iteration is under way.
    """

    topology: Topology
    times: Times
    variant: Variant
    lost: frozenset[Worker]
    route: Route
    memory: Memory = NO_LIMIT
    ordered: bool = False
    split_last: int = 0
    done: Mapping[Worker, Collection[Action]] = field(default_factory=dict)

    @property
    def staggered(self) -> bool:
        """Whether stages step on their own."""
        return self.variant is Variant.STAGGERED

    def host(self, pipeline: int, stage: int, micro_batch: int) -> Worker:
        """Who computes a micro-batch at a stage."""
        return self.route.get((pipeline, stage, micro_batch)) or Worker(pipeline, stage)

    def splits(self, pipeline: int, stage: int, micro_batch: int) -> bool:
        """Whether the backward of a micro-batch is run as I and W."""
        if self.variant is Variant.COUPLED:
            return False
        if any(worker.stage == stage for worker in self.lost):
            return True
        return micro_batch >= self.topology.micro_batches - self.split_last


def lower_bound(problem: Problem) -> float:
    """No plan of a whole iteration has a smaller objective: slots without optimizer, or the period if staggered.

    Of every worker: the way to its first action, all its work, and the way back from its last one (which a worker with
    split backwards need not wait for: its last action can be a W). Staggered, a stage's own work and its optimizer;
    and where it does not split, the way there and back lies within the span of the stages before it.
    """
    topology, times = problem.topology, problem.times
    load: dict[Worker, float] = {}
    for d in range(topology.pipelines):
        for s in range(topology.stages):
            for j in range(topology.micro_batches):
                worker = problem.host(d, s, j)
                at = times.at(worker)
                both = (Kind.I, Kind.W) if problem.splits(d, s, j) else (Kind.B,)
                load[worker] = load.get(worker, 0.0) + at.forward + sum(at.of(kind) for kind in both)
    head, tail = _ways(problem)
    best = 0.0
    lost_stages = {worker.stage for worker in problem.lost}
    for worker, work in load.items():
        s = worker.stage
        free = problem.variant is not Variant.COUPLED and s in lost_stages
        if problem.staggered:
            optimizer = times.at(worker).optimizer
            best = max(best, work + optimizer)
            if not free:
                for before in range(s):
                    way = (head[s] - head[before]) + work + (tail[s] - tail[before])
                    best = max(
                        best, way + min(times.at(Worker(d, before)).optimizer for d in range(topology.pipelines))
                    )
        else:
            best = max(best, head[s] + work + (0.0 if free else tail[s]))
    return best


def _ways(problem: Problem) -> tuple[list[float], list[float]]:
    """Shortest way from stage 0 to each stage, and back from its last action to the end of stage 0's."""
    topology, times = problem.topology, problem.times
    head, tail = [0.0], [0.0]
    split = problem.variant is not Variant.COUPLED
    for s in range(topology.stages - 1):
        near = [times.at(Worker(d, s)) for d in range(topology.pipelines) if Worker(d, s) not in problem.lost]
        head.append(head[-1] + min(at.forward for at in near) + times.communication)
        splits = split and problem.splits(0, s, topology.micro_batches - 1)
        back = math.inf
        for at in near:
            back = min(back, at.of(Kind.I) + (at.of(Kind.W) if splits and s == 0 else 0.0) if splits else at.of(Kind.B))
        tail.append(tail[-1] + back + times.communication)
    return head, tail

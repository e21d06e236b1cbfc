"""What greedy and exact planning share: the operations of an iteration as arrays, and a bound that no plan can beat."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

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

    @cached_property
    def lost_stages(self) -> frozenset[int]:
        """Stages at which somebody is lost."""
        return frozenset(worker.stage for worker in self.lost)

    @property
    def staggered(self) -> bool:
        """Whether the period is minimised; of an iteration under way it is always the time until its end."""
        return self.variant is Variant.STAGGERED and not self.done

    def host(self, pipeline: int, stage: int, micro_batch: int) -> Worker:
        """Who computes a micro-batch at a stage."""
        return self.route.get((pipeline, stage, micro_batch)) or Worker(pipeline, stage)

    def splits(self, pipeline: int, stage: int, micro_batch: int) -> bool:
        """Whether the backward of a micro-batch is run as I and W."""
        if self.variant is Variant.COUPLED:
            return False
        if stage in self.lost_stages:
            return True
        return micro_batch >= self.topology.micro_batches - self.split_last


def lower_bound(problem: Problem) -> float:
    """No plan with the same splits has a smaller objective: slots without optimizer, or the period if staggered.

    Of every worker: the way to its first action, all its work, and the way back from its last backward (behind which
    only W's can follow). Staggered: a stage's own work and its optimizer; and the way there, the work and the way back
    lie within the span of each stage before it. Of an iteration under way: the work alone.
    """
    work, late = _work(problem)
    if problem.done:
        return max(work.values(), default=0.0)
    head, tail = _ways(problem)
    best = 0.0
    for worker, total in work.items():
        s, early = worker.stage, total - late[worker]
        if not problem.staggered:
            best = max(best, head[s] + total, head[s] + early + tail[s])
            continue
        best = max(best, total + problem.times.at(worker).optimizer)
        for before in range(s):
            way = (head[s] - head[before]) + early + (tail[s] - tail[before])
            pipelines = range(problem.topology.pipelines)
            best = max(best, way + min(problem.times.at(Worker(d, before)).optimizer for d in pipelines))
    return best


def _work(problem: Problem) -> tuple[dict[Worker, float], dict[Worker, float]]:
    """Time of all actions of every worker, and of those of them that can be last: W's."""
    topology, times = problem.topology, problem.times
    counts = {worker: topology.micro_batches for worker in topology.workers() if worker not in problem.lost}
    for worker in problem.route.values():
        counts[worker] += 1
    work: dict[Worker, float] = {}
    late: dict[Worker, float] = {}
    for worker, count in counts.items():
        at = times.at(worker)
        split = count if problem.splits(*worker, 0) else min(count, problem.split_last)
        split = 0 if problem.variant is Variant.COUPLED else split
        late[worker] = split * at.of(Kind.W)
        work[worker] = count * at.forward + split * at.of(Kind.I) + late[worker] + (count - split) * at.of(Kind.B)
        work[worker] -= sum(
            at.of(action.kind) for action in problem.done.get(worker, ()) if action.kind is not Kind.OPT
        )
    return work, late


def _ways(problem: Problem) -> tuple[list[float], list[float]]:
    """Shortest way from stage 0 to each stage, and back from the end of its backward to the end of stage 0's."""
    topology, times = problem.topology, problem.times
    head, tail = [0.0], [0.0]
    for s in range(topology.stages - 1):
        near = [times.at(Worker(d, s)) for d in range(topology.pipelines) if Worker(d, s) not in problem.lost]
        head.append(head[-1] + min(at.forward for at in near) + times.communication)
        split = problem.splits(0, s, topology.micro_batches - 1)
        kinds = (Kind.I, Kind.W) if split and s == 0 else (Kind.I,) if split else (Kind.B,)
        tail.append(tail[-1] + min(sum(at.of(kind) for kind in kinds) for at in near) + times.communication)
    return head, tail

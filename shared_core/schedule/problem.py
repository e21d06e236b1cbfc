"""What greedy and exact planning share: the operations of an iteration as arrays, and the least it can take."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

from shared_core.schedule.check import NO_LIMIT, Memory
from shared_core.schedule.routing import Route
from shared_core.schedule.schedule import Action, Kind, Topology, Worker
from shared_core.schedule.timing import Times


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
    """The least that a plan can take (slots without optimizer, or the period if staggered) that is not faster than 1F1B
    without a loss.

    The larger of two: what 1F1B takes at least; and, of every worker of a stage with a loss, the way to its first
    action (staggered: its optimizer instead), all its work, and (coupled) the way back from its last backward. Of an
    iteration under way: the most work that a worker has left.
    """
    topology, times = problem.topology, problem.times
    counts = {worker: topology.micro_batches for worker in topology.workers() if worker not in problem.lost}
    for worker in problem.route.values():
        if worker in counts:  # else it was lost later, after its stage had stepped
            counts[worker] += 1
    heads, tails = _ways(problem)
    best = 0.0
    for worker, count in counts.items():
        at, s = times.at(worker), worker.stage
        step = at.optimizer if problem.staggered else 0.0
        whole = at.forward + at.of(Kind.B)
        split = at.forward + at.backward_input + at.backward_weight
        work = count * (split if problem.splits(*worker, 0) else whole)
        if problem.done:
            left = work - sum(at.of(one.kind) for one in problem.done.get(worker, ()) if one.kind is not Kind.OPT)
            best = max(best, left)
            continue
        best = max(best, heads[s] + topology.micro_batches * whole + tails[s] + step)
        if s in problem.lost_stages:
            # What may be last is a W, behind which there is no way back; staggered, the way there is of no account.
            if problem.variant is Variant.COUPLED:
                work += heads[s] + tails[s]
            elif problem.staggered:
                work += step
            else:
                work += heads[s]
            best = max(best, work)
    return best


def _ways(problem: Problem) -> tuple[list[float], list[float]]:
    """Shortest way from stage 0 to each stage, and back from the end of its backward to the end of stage 0's."""
    topology, times = problem.topology, problem.times
    heads, tails = [0.0], [0.0]
    for s in range(topology.stages - 1):
        near = [times.at(Worker(d, s)) for d in range(topology.pipelines) if Worker(d, s) not in problem.lost]
        heads.append(heads[-1] + min(at.forward for at in near) + times.communication)
        tails.append(tails[-1] + min(at.of(Kind.B) for at in near) + times.communication)
    return heads, tails

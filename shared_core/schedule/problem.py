"""What greedy and exact planning share: the operations of an iteration as arrays, and the least it can take."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

from shared_core.schedule.memory import NO_LIMIT, Memory
from shared_core.schedule.routing import Route
from shared_core.schedule.schedule import Action, Topology, Worker
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
        failed: places without a worker.
        route: who computes their micro-batches.
        memory: limits.
        ordered: W (or B) of a pipeline at a stage in ascending order.
        split: workers that may split backwards: all of them at hosts of a stage with a failure.
        split_last: how many backwards, counted from the last, other workers of an affected pipeline split.
        done: what survivors have executed already, if an iteration is under way.
    """

    topology: Topology
    times: Times
    variant: Variant
    failed: frozenset[Worker]
    route: Route
    memory: Memory = NO_LIMIT
    ordered: bool = False
    split_last: int = 0
    done: Mapping[Worker, Collection[Action]] = field(default_factory=dict)

    @cached_property
    def failed_stages(self) -> frozenset[int]:
        """Stages at which somebody fails."""
        return frozenset(worker.stage for worker in self.failed)

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
        if stage in self.failed_stages:
            return True
        return micro_batch >= self.topology.micro_batches - self.split_last

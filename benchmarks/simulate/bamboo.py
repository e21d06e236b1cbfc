"""Bamboo (Thorpe et al., NSDI 2023) from its code: every worker also holds the next stage's layers.

The forward pass of the next stage is computed in advance (one slot more a micro-batch); when the next stage fails
its predecessor does both, and the synchronous job is as slow as that pipeline. Where too many do two stages, all
workers meet again and form as many whole pipelines as they can; the rest are idle.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.simulate.engine import FailureCost
from benchmarks.simulate.layout import Layout, Pattern, wiped_out
from benchmarks.simulate.rerouting import CheckpointInterval
from benchmarks.simulate.trace import TraceEvent

#: Share of workers that may be part of a doubled stage before all meet again (simulator of Oobleck's artifact).
DOUBLED = 0.05


@dataclass(frozen=True)
class Bamboo:
    """Bamboo; throughput is a share of *its* throughput without failures, which is less than the others'.

    Attributes:
        layout: without failures.
        rendezvous_s: stall of a meeting of all workers.
        shared_batch: what if pipelines shared the batch in proportion to their speed, which its code does not do: a
            pipeline with doubled stages slows only itself, so all continue with doubled stages and never meet.
        checkpoints: for when a worker and its predecessor fail together.
    """

    layout: Layout
    rendezvous_s: float = 30.0
    shared_batch: bool = False
    checkpoints: CheckpointInterval = CheckpointInterval()

    @property
    def name(self) -> str:
        """With the supposition."""
        return "Bamboo, batch shared by speed" if self.shared_batch else "Bamboo"

    def throughput(self, pattern: Pattern) -> float:
        """Of whole pipelines, or with doubled stages."""
        lost, shape = len(pattern.vacant), self.layout
        if not lost:
            return 1.0
        if self.shared_batch:
            return max(0.0, 1 - lost * (1 - self.doubled) / shape.pipelines)
        return pattern.live // shape.stages / shape.pipelines if self._meets(pattern) else self.doubled

    @property
    def doubled(self) -> float:
        """Speed of a pipeline with one doubled stage: 4 slots a stage and micro-batch before, 6 at the doubled one."""
        m, stages = self.layout.micro_batches, self.layout.stages
        return 4 * (m + stages - 1) / (4 * max(0, stages - 2) + 6 * m)

    def failure(self, before: Pattern, after: Pattern, event: TraceEvent) -> FailureCost:
        """A meeting, if too many stages are doubled; and the step in flight, on average half of it."""
        if wiped_out(before, event.lost):
            return self.checkpoints.cost
        return FailureCost((self.rendezvous_s if self._meets(after) else 0.0) + self.layout.step_s / 2)

    def join(self, before: Pattern, after: Pattern) -> FailureCost:
        """A meeting once there is one pipeline more; else replacements wait. They meet between steps."""
        more = after.live // self.layout.stages > before.live // self.layout.stages
        return FailureCost(self.rendezvous_s if more and not self.shared_batch else 0.0)

    def _meets(self, pattern: Pattern) -> bool:
        return not self.shared_batch and 2 * len(pattern.vacant) > DOUBLED * pattern.live

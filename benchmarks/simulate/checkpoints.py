"""Systems that go back to what they have saved (torchrun with checkpoints, CheckFreq, Elastic Horovod), and torchft."""

from __future__ import annotations

import math
from dataclasses import dataclass

from benchmarks.simulate.engine import FailureCost
from benchmarks.simulate.layout import Layout, Pattern
from benchmarks.simulate.trace import TraceEvent

#: CheckFreq (Mohan et al., FAST 2021) checkpoints as often as costs at most this share of time.
CHECKFREQ_OVERHEAD = 0.035


def young(write_s: float, mtbf_s: float) -> float:
    """Seconds of work between checkpoints that take ``write_s``: ``sqrt(2 C M)`` (Young 1974)."""
    return math.sqrt(2 * write_s * mtbf_s)


@dataclass(frozen=True)
class CheckpointRestart:
    """All workers start again from what was saved.

    Attributes:
        layout: the job's shape.
        interval_s: seconds of work between savings.
        write_s: stall of a saving.
        restart_s: from the failure, or from the moment the place is filled, until all train again.
        overhead: time of a step over that without the system, savings apart.
        elastic: whether it continues with as many whole pipelines as are left; else it waits for the place to be
            filled.
        joins_between: whether an elastic job admits workers without going back.
        name: as in tables.
    """

    layout: Layout
    interval_s: float
    write_s: float
    restart_s: float
    overhead: float = 1.0
    elastic: bool = False
    joins_between: bool = False
    name: str = "checkpoint restart"

    def throughput(self, pattern: Pattern) -> float:
        """Share of time not spent on saving, of the pipelines that are whole."""
        whole = pattern.live // self.layout.stages if self.elastic else self.layout.pipelines * (not pattern.vacant)
        return whole / self.layout.pipelines * self.interval_s / (self.interval_s + self.write_s) / self.overhead

    def failure(self, before: Pattern, after: Pattern, event: TraceEvent) -> FailureCost:
        """A restart and the work since the newest saving that is complete."""
        return FailureCost(self.restart_s, self.interval_s)

    def join(self, before: Pattern, after: Pattern) -> FailureCost:
        """An elastic job starts again to admit the worker; another that has waited starts now."""
        if self.elastic:
            return FailureCost(self.restart_s, None if self.joins_between else self.interval_s)
        return FailureCost() if after.vacant else FailureCost(self.restart_s)


@dataclass(frozen=True)
class TorchFT:
    """torchft: a pipeline with a failed worker is out, its batches with it; the others continue after a new quorum.

    Attributes:
        layout: the job's shape; each pipeline is a replica group.
        quorum_s: stall until the others continue: 10.3 s were measured with the defaults of its nightly of 2026.10.26.
        overhead: time of a step over that without it. Given: its all-reduce through Gloo is said to be slower.
        name: as in tables.
    """

    layout: Layout
    quorum_s: float = 10.3
    overhead: float = 1.0
    name: str = "torchft"

    def throughput(self, pattern: Pattern) -> float:
        """Samples that are learned from: of pipelines without a vacant place."""
        damaged = len({place // self.layout.stages for place in pattern.vacant})
        return (1 - damaged / self.layout.pipelines) / self.overhead

    def failure(self, before: Pattern, after: Pattern, event: TraceEvent) -> FailureCost:
        """A new quorum; with all pipelines gone there is no state to continue from, and no checkpoint is modelled."""
        return FailureCost(self.quorum_s)

    def join(self, before: Pattern, after: Pattern) -> FailureCost:
        """A replacement is healed beside the others, which take no notice."""
        return FailureCost()

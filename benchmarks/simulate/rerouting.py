"""Systems whose survivors continue: this one, ReCycle's ideal, and throughput in proportion to the live workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from benchmarks.simulate.engine import FailureCost
from benchmarks.simulate.layout import (
    Layout,
    Pattern,
    Variant,
    count_stages,
    fault_scaled,
    has_lost_both_ends,
    period,
    rerouted,
    spread,
    wiped_out,
)
from benchmarks.simulate.trace import TraceEvent

#: What follows the name of a job whose data any worker can read: it does not wait for failed ends of a pipeline.
ENDS = ", SharedData"
#: Moves that make a step shorter by less are not made; as in the planner, see ``schedule/normalise.py``.
LEAST_GAIN = 0.02


@dataclass(frozen=True)
class CheckpointInterval:
    """Where a job starts again when the state of a stage is gone.

    Attributes:
        every_s: seconds of work between checkpoints.
        restart_s: from the failure until all train again.
    """

    every_s: float = 3600.0
    restart_s: float = 60.0

    @property
    def cost(self) -> FailureCost:
        """Of going back to the newest one."""
        return FailureCost(self.restart_s, self.every_s)


@dataclass(frozen=True)
class FaultScaled:
    """ReCycle's yardstick: throughput in proportion to the live workers, changes cost nothing."""

    layout: Layout
    name: str = "fault-scaled"

    def throughput(self, pattern: Pattern) -> float:
        """Live workers over all."""
        return fault_scaled(self.layout, pattern.live)

    def failure(self, before: Pattern, after: Pattern, event: TraceEvent) -> FailureCost:
        """Nothing."""
        return FailureCost()

    def join(self, before: Pattern, after: Pattern) -> FailureCost:
        """Nothing."""
        return FailureCost()


@dataclass(frozen=True)
class ReCycle:
    """ReCycle's ideal: the closed form of its re-routed schedule, and no stall while each stage has a live worker.

    That it is stall-free is claimed in the author's talk; what a change costs is not published.
    """

    layout: Layout
    variant: Variant = "staggered"
    checkpoints: CheckpointInterval = CheckpointInterval()
    name: str = "ReCycle, ideal"

    def throughput(self, pattern: Pattern) -> float:
        """Of the re-routed schedule; 0 if there is no worker for some stage."""
        return rerouted(self.layout, pattern.live, self.variant)

    def failure(self, before: Pattern, after: Pattern, event: TraceEvent) -> FailureCost:
        """Nothing, or a restart from the checkpoint when the last replica of a stage is gone."""
        return self.checkpoints.cost if wiped_out(before, event.lost) else FailureCost()

    def join(self, before: Pattern, after: Pattern) -> FailureCost:
        """Nothing."""
        return FailureCost()


@dataclass(frozen=True)
class MeasuredStalls:
    """Times of this system. The defaults were measured on 2 cores with small models (README, docs/benchmarks.md) except
    where it says otherwise; at another scale give your own.

    Attributes:
        overhead: time of a step over that without this system. 1.08: pipelines of 2 stages x 2 with replicas, four
            workers on two cores; data parallelism was at 1.00 to 1.12.
        replace_s: stall of a replacement by a standby, without what it replays of a step: median of ten kills.
        reroute_s: from a failure until re-routed work starts. The design's target; measured were 0.08 to 0.34 s.
        admit_s: stall when a worker is admitted again.
        copy_s: to move the state of a worker to its replacement, while all wait. Given; 0 for small models.
    """

    overhead: float = 1.08
    replace_s: float = 0.18
    reroute_s: float = 0.3
    admit_s: float = 0.42
    copy_s: float = 0.0


@dataclass(frozen=True)
class ThisSystem:
    """This product, by what it does when a worker fails.

    - ``reroute``: peers compute what the failed worker would (staggered optimizer). In the step of the failure what it
      had accumulated is computed again by its peers: on average half of its micro-batches. Where failures are better
      spread over the stages, survivors move when so much time is lost as that costs: copies of state, and a step. If a
      stage has nobody left, all go back to the checkpoint and wait for a replacement. If a pipeline has lost both its
      ends, the step continues, and the next one waits for a replacement of either, which draws its data. Replacements
      are admitted one by one.
    - ``replace``: all wait until the place is filled; then the replacement runs its part of the step, on average half.
    - ``replay``: the same without a replica: the replacement runs all steps since the checkpoint with logged messages,
      alone and so without bubbles, in ``m / (m + S - 1)`` of their time (Swift, arXiv 2302.06173).

    Attributes:
        layout: without failures.
        on_failure: what is done.
        measured: times.
        checkpoints: where it starts again when state or data are gone.
        ends: nobody waits for a pipeline that has lost both ends, because others can read its data (``SharedData``).
    """

    layout: Layout
    on_failure: Literal["reroute", "replace", "replay"] = "reroute"
    measured: MeasuredStalls = MeasuredStalls()
    checkpoints: CheckpointInterval = CheckpointInterval()
    ends: bool = False

    @property
    def name(self) -> str:
        """With the mode."""
        return f"this, {self.on_failure}{ENDS if self.ends else ''}"

    def throughput(self, pattern: Pattern) -> float:
        """Of the re-routed schedule, or all or nothing where failed workers are waited for."""
        if self.on_failure != "reroute":
            share = float(not pattern.vacant)
        elif not self.ends and has_lost_both_ends(pattern):
            share = 0.0
        else:
            share = self.layout.slots / min(self._periods(pattern))
        return share / self.measured.overhead

    def _periods(self, pattern: Pattern) -> tuple[float, float]:
        """Slots of a step where survivors stay, and where they move; the same where they do not move."""
        lost = count_stages(self.layout, pattern.vacant)
        stay = period(self.layout, lost)
        move = period(self.layout, spread(self.layout, len(pattern.vacant)))
        # Who has moved has no state for replacements, so a stage that has lost all its own workers fails.
        pays = max(lost) < self.layout.pipelines and stay - move > LEAST_GAIN * stay
        return stay, move if pays else stay

    def _moves(self, pattern: Pattern) -> int:
        """Survivors that have moved."""
        stay, move = self._periods(pattern)
        if move == stay:
            return 0
        lost, wanted = count_stages(self.layout, pattern.vacant), spread(self.layout, len(pattern.vacant))
        return sum(max(0, now - then) for now, then in zip(lost, wanted, strict=True))

    def _moving_s(self, before: Pattern, after: Pattern) -> float:
        """What moves cost if there are more after a failure: as much is lost before they are made as they take."""
        if self._moves(after) <= self._moves(before):
            return 0.0
        return 2 * (self.measured.copy_s + self._periods(after)[0] * self.layout.slot_s)

    def failure(self, before: Pattern, after: Pattern, event: TraceEvent) -> FailureCost:
        """See the class."""
        if self.on_failure != "replay" and self._must_go_back(before, event):
            return self.checkpoints.cost
        if self.on_failure != "reroute":
            return FailureCost() if after.vacant else self._replacement()
        peers = max(1, self.layout.pipelines - 1 - len(before.vacant) // self.layout.stages)
        again_s = self._share_s / 2 / peers
        moving_s = self._moving_s(before, after)
        return FailureCost(
            self.measured.reroute_s + again_s + moving_s + (self.measured.admit_s if event.joined else 0.0)
        )

    def join(self, before: Pattern, after: Pattern) -> FailureCost:
        """A replacement is admitted; where all wait for it, that is what a failure costs."""
        if self.on_failure == "reroute":
            return FailureCost(self.measured.admit_s)
        return FailureCost() if after.vacant else self._replacement()

    def _must_go_back(self, before: Pattern, event: TraceEvent) -> bool:
        """Whether state that a replacement would need, or data of the step, are gone."""
        now = before.after(event.lost, ())
        gone = any(lost >= self.layout.pipelines for lost in count_stages(self.layout, now.vacant))
        if self.on_failure != "reroute":
            return gone
        # A stage from which workers have moved cannot do without all others in one step.
        return gone or (self._moves(before) > 0 and wiped_out(before, event.lost))

    def _replacement(self) -> FailureCost:
        ready_s = self.measured.replace_s + self.measured.copy_s
        if self.on_failure == "replace":
            return FailureCost(ready_s + self._share_s / 2)
        alone = self.layout.micro_batches / (self.layout.micro_batches + self.layout.stages - 1)
        return FailureCost(ready_s, self.checkpoints.every_s, alone)

    @property
    def _share_s(self) -> float:
        """Seconds that a worker computes in a step."""
        return 3 * self.layout.micro_batches * self.layout.slot_s

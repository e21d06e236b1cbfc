"""What a policy is told at a step boundary, and what it answers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from shared_core.checkpoint.cost import Cost
from shared_core.checkpoint.policy.intervals import young
from shared_core.checkpoint.run_ends import RunEnding

#: A first checkpoint is made after so many steps, to measure its cost (COCI: after 10, CheckFreq: after 5).
PROBE_STEPS = 10


class LossCurve(Protocol):
    """Loss against steps. Only its slope matters, so any unit of loss will do."""

    def loss(self, step: float) -> float:
        """Loss after so many steps."""

    def slope(self, step: float) -> float:
        """Its derivative, in loss a step; negative while it descends."""


@dataclass(frozen=True)
class Exponential:
    """COCI's model of the loss, ``exp(decay k + level)`` over steps ``k``; it falls to 0 if ``decay`` is negative."""

    decay: float
    level: float

    def loss(self, step: float) -> float:
        return math.exp(self.decay * step + self.level)

    def slope(self, step: float) -> float:
        return self.decay * self.loss(step)


@dataclass(frozen=True)
class Situation:
    """A step boundary.

    "Useful" seconds are those of training that count: neither stalls nor work that was done again.

    Attributes:
        useful_s: useful seconds since the job began.
        saved_step: step boundary of the newest checkpoint that was begun and has not failed; 0 for the start.
        saved_s: useful seconds then.
        step_s: useful seconds that a step takes at present.
        hazard: faults a second, with the present number of workers, that roll back to such a checkpoint.
        cost: of a checkpoint; None until one was measured.
        rework_s: the integral of hazard times age since ``saved_s``, kept by :func:`grown`; None takes the present
            hazard for all of it.
        curve: fitted loss over steps; None while there is no fit.
        exponential: COCI's fit of the same.
        ending: when runs end early, and how; None without a history.
        horizon_s: useful seconds after which the job is planned to end; None if nobody knows.
    """

    step: int
    useful_s: float
    saved_step: int
    saved_s: float
    step_s: float
    hazard: float
    cost: Cost | None
    rework_s: float | None = None
    in_flight: int = 0
    curve: LossCurve | None = None
    exponential: Exponential | None = None
    fit_note: str = ""
    ending: RunEnding | None = None
    horizon_s: float | None = None
    workers: int = 1

    @property
    def age_s(self) -> float:
        """Useful seconds that a fault now would cost."""
        return self.useful_s - self.saved_s

    @property
    def expected_rework_s(self) -> float:
        """Expected seconds of work done again because of faults since the last checkpoint."""
        return self.hazard * self.age_s**2 / 2 if self.rework_s is None else self.rework_s

    def step_at(self, useful_s: float) -> float:
        """Steps made by then, at the present speed."""
        return max(0.0, self.step + (useful_s - self.useful_s) / self.step_s)


def grown(rework_s: float, hazard: float, age_s: float, seconds: float) -> float:
    """``rework_s`` after so many more useful seconds, ``age_s`` being the age at their beginning."""
    return rework_s + hazard * seconds * (age_s + seconds / 2)


@dataclass(frozen=True)
class Decision:
    """The answer. ``rule``: text: what the policy follows at present, which may not be the rule of its name; empty
    where no rule decided.
    """

    due: bool
    reason: str
    rule: str = ""

    def __bool__(self) -> bool:
        return self.due


class Policy(Protocol):
    """When to make checkpoints. A pure function of the situation, so a replacement decides the same."""

    @property
    def name(self) -> str:
        """Value of the option that chooses it."""

    def due(self, now: Situation) -> Decision:
        """Whether to make one now. Cheap enough for every step boundary."""


@dataclass(frozen=True)
class Guards:
    """Bounds of every interval that is calculated.

    Attributes:
        max_overhead: largest share of time that checkpoints may take.
        max_in_flight: checkpoints written at the same time; a further one waits.
        longest: largest factor over Young's interval, in case the fit or the hazard misleads.
    """

    max_overhead: float = 0.25
    max_in_flight: int = 1
    longest: float = 4.0

    def shortest_s(self, now: Situation, cost: Cost) -> float:
        """No interval may be shorter: a step, the time until one is durable, and the cap on the overhead. The time to
        be durable delays every checkpoint alike, so it changes no longer interval.
        """
        return max(now.step_s, cost.persist_s / self.max_in_flight, cost.seconds / self.max_overhead)

    def first(self, now: Situation, name: str) -> Decision | None:
        """The answer that does not depend on the policy: one is being written, or the cost is not known yet."""
        if now.step <= now.saved_step:
            return Decision(False, f"{name}: no step since the last checkpoint")
        if now.in_flight >= self.max_in_flight:
            return Decision(False, f"{name}: {now.in_flight} being written")
        if now.cost is None:
            steps = now.step - now.saved_step
            return Decision(steps >= PROBE_STEPS, f"{name}: cost not known yet, measured after {PROBE_STEPS} steps")
        return None

    def by_interval(self, now: Situation, cost: Cost, interval_s: float, name: str) -> Decision:
        """Whether the last one is older than an interval, within the bounds."""
        within = max(min(interval_s, self.longest * young(cost.seconds, now.hazard)), self.shortest_s(now, cost))
        # Half a step early is nearer than half a step late: decisions fall on step boundaries only.
        due = now.age_s + now.step_s / 2 >= within
        return Decision(due, f"{name}: {now.age_s:.1f} of {within:.1f} s")

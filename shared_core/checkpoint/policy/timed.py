"""Policies that look at time only: a fixed number of steps, Young, Daly, the exact optimum, and CheckFreq's cap."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

from shared_core.checkpoint.policy.intervals import daly, exact, young
from shared_core.checkpoint.policy.situation import Decision, Guards, Situation


@dataclass(frozen=True)
class Fixed:
    """Every ``every_steps`` step boundaries, whatever it costs; Lightning's default is once an epoch."""

    every_steps: int
    name: ClassVar[str] = "fixed"

    def due(self, now: Situation) -> Decision:
        due = now.step > now.saved_step and now.step // self.every_steps > now.saved_step // self.every_steps
        return Decision(due, f"fixed: step {now.step}, every {self.every_steps}")


@dataclass(frozen=True)
class Young:
    """``sqrt(2 c / lambda)``, Young 1974; COCI's baseline."""

    guards: Guards = field(default_factory=Guards)
    name: ClassVar[str] = "young"
    #: Useful seconds between checkpoints, given their cost and the hazard.
    interval_s: ClassVar[staticmethod[[float, float], float]] = staticmethod(young)

    def due(self, now: Situation) -> Decision:
        if (answer := self.guards.first(now, self.name)) is not None:
            return answer
        assert now.cost is not None
        return self.guards.by_interval(now, now.cost, self.interval_s(now.cost.seconds, now.hazard), self.name)


class Daly(Young):
    """Daly's higher-order estimate, 2006."""

    name = "daly"
    interval_s = staticmethod(daly)


class Exact(Young):
    """The optimum under failures without memory (Lambert's W)."""

    name = "exact"
    interval_s = staticmethod(exact)


@dataclass(frozen=True)
class CheckFreq:
    """Costs the share ``max_overhead`` of the time (Mohan et al., FAST 2021, section 4.2), whatever fails."""

    max_overhead: float = 0.035
    guards: Guards = field(default_factory=Guards)
    name: ClassVar[str] = "checkfreq"

    def due(self, now: Situation) -> Decision:
        """After the smallest whole number of steps that pays for the last one, and in which it is written."""
        if (answer := self.guards.first(now, self.name)) is not None:
            return answer
        assert now.cost is not None
        enough = max(now.cost.seconds / self.max_overhead, now.cost.persist_s)
        steps = max(1, math.ceil(enough / now.step_s))
        done = now.step - now.saved_step
        return Decision(done >= steps, f"checkfreq: {done} of {steps} steps, for {self.max_overhead:.1%} of the time")

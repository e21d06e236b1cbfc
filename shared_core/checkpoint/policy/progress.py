"""Equal progress between checkpoints: COCI (Li et al., FGCS 164, 2025, 107597), its formulas as they are and put right.

COCI fits ``loss = exp(theta1 t + theta2)`` and checkpoints each time the loss has fallen by ``Pe``. Its code has
``Pe = (1 - e^(theta1 Ts)) (1 / (2 lambda) - 1 / (2 theta1))``. That is not where its own objective is least: with
``L0`` the loss at the start, that is at ``sqrt(2 L0 Pe)``. Both depend on the unit of time, which is the minute.

That is theorem 4.1. For data parallel jobs theorem 4.2 has ``Pe = (1 - e^(xi theta1 gamma Ts)) (1 / (2 lambda) - 1 / (2
xi theta1))``, with ``gamma`` workers at present, ``theta1`` of one worker and ``xi`` the observed speed-up over
``gamma``: a stall costs ``gamma Ts`` of a worker's time. ``xi gamma theta1`` is the decay that is observed with all
workers, so that the speed-up need not be known by itself. ``lambda`` is not scaled by ``gamma``, although a job of more
workers has more faults: the second factor adds a time of the job and one of a worker. So ``coci_literal`` follows the
theorem, and ``coci`` does not: with the decay and the hazard of the present workers theorem 4.1 has all that 4.2 means.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import ClassVar

from shared_core.checkpoint.policy.intervals import young
from shared_core.checkpoint.policy.situation import Decision, Guards, Situation

MINUTE_S = 60.0


def literal_step(decay_per_s: float, cost_s: float, hazard: float, workers: int = 1, speedup: float = 1.0) -> float:
    """COCI's ``Pe`` in units of loss; infinite where nothing fails. Theorem 4.1, which its code has; 4.2 with workers.

    Args:
        decay_per_s: ``theta1`` of one worker, negative.
        cost_s: stall of a checkpoint.
        hazard: faults a second.
        workers: ``gamma``.
        speedup: ``xi``, observed speed over that of ``workers`` times one.
    """
    if hazard <= 0:
        return math.inf
    decay, cost, rate = speedup * decay_per_s * MINUTE_S, workers * cost_s / MINUTE_S, hazard * MINUTE_S
    return -math.expm1(decay * cost) * (1 / (2 * rate) - 1 / (2 * decay))


def corrected_step(start_loss: float, decay_per_s: float, cost_s: float, hazard: float) -> float:
    """The minimum of the objective that COCI writes down: ``sqrt(2 L0 Pe)``."""
    return math.sqrt(2 * start_loss * literal_step(decay_per_s, cost_s, hazard))


@dataclass(frozen=True)
class Coci:
    """COCI with the square root that its formula lacks, and bounded like every other interval."""

    guards: Guards = field(default_factory=Guards)
    name: ClassVar[str] = "coci"

    def due(self, now: Situation) -> Decision:
        """Once the fitted loss has fallen by ``sqrt(2 L0 Pe)``; Young's rule while there is no fit that descends."""
        if (answer := self.guards.first(now, self.name)) is not None:
            return answer
        assert now.cost is not None
        fit, cost = now.exponential, now.cost
        reference = young(cost.seconds, now.hazard)
        if fit is None or fit.decay >= 0:
            why = "coci, no descending fit, Young's rule"
            rule = "Young's rule (coci needs a fit of a failure that descends)"
            return replace(self.guards.by_interval(now, cost, reference, why), rule=rule)
        wanted = corrected_step(fit.loss(0), fit.decay / now.step_s, cost.seconds, now.hazard)
        fallen = fit.loss(now.saved_step) - fit.loss(now.step)
        due = fallen >= wanted or now.age_s >= self.guards.longest * reference
        due = due and now.age_s + now.step_s / 2 >= self.guards.shortest_s(now, cost)
        return Decision(
            due, f"coci: fell by {fallen:.3g} of {wanted:.3g}", "coci's own rule (equal falls of the fitted loss)"
        )


@dataclass(frozen=True)
class CociLiteral:
    """COCI as it is written, for comparison: theorem 4.2, with one worker 4.1. Not bounded: it may never make one."""

    guards: Guards = field(default_factory=Guards)
    name: ClassVar[str] = "coci_literal"

    def due(self, now: Situation) -> Decision:
        """Once the fitted loss has fallen by ``Pe``."""
        if (answer := self.guards.first(now, self.name)) is not None:
            return answer
        fit, cost = now.exponential, now.cost
        assert cost is not None
        if fit is None or fit.decay >= 0:
            return Decision(False, "coci_literal: no descending fit of the loss")
        decay = fit.decay / now.step_s / now.workers  # of one worker, at its speed among the others
        wanted = literal_step(decay, cost.seconds, now.hazard, now.workers)
        fallen = fit.loss(now.saved_step) - fit.loss(now.step)
        return Decision(fallen >= wanted, f"coci_literal: fell by {fallen:.3g} of {wanted:.3g}")

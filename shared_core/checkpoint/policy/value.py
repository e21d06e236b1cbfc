"""Our policy: a checkpoint is due when the utility that is expected to be lost reaches the price of a checkpoint.

Utility ``u`` is minus the loss. With ``t0`` the useful time of the last checkpoint, ``lambda`` the hazard of faults,
``g`` that of an early end (given that the run still lasts), ``q`` the share of those that are abrupt, ``c`` the
effective cost of a checkpoint in seconds and ``kappa`` its price in utility, it is due when

    w (integral of lambda (s - t0) ds) + q (integral of g (u(s) - u(t0)) ds)  >=  c w + kappa.

``w(t) = E[u'(T) | T > t]``, over the time ``T`` at which the run will end, is what a second of delay costs: the run
ends that much lower on the curve. Where every end is graceful and checkpoints have no price, ``w`` cancels: Young's
rule. The density that this rule follows, ``n = sqrt((lambda w + q g u') / (2 (c w + kappa)))``, is the optimum to first
order in delays; see ``docs/checkpoints.md``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

from shared_core.checkpoint.ending import Ending
from shared_core.checkpoint.policy.intervals import exact, young
from shared_core.checkpoint.policy.situation import Decision, Guards, LossCurve, Situation

#: Cells that the future is divided into, and by how much each is longer than the one before.
CELLS, GROWTH = 32, 1.35
#: With an unknown end, one looks ahead until as many runs in e^12 are left.
FAR = 12.0
#: Above this cost over the mean time between faults Young's interval is too long; the exact one is taken.
LARGE_SHARE = 0.05


@dataclass(frozen=True)
class Value:
    """Checkpoints where they pay.

    Attributes:
        price: what a checkpoint costs beyond time (storage, bandwidth, money), in units of the loss.
        guards: bounds of the interval.
    """

    price: float = 0.0
    guards: Guards = field(default_factory=Guards)
    name: ClassVar[str] = "value"

    def due(self, now: Situation) -> Decision:
        """Whether the expected loss has reached the price of a checkpoint."""
        if (answer := self.guards.first(now, self.name)) is not None:
            return answer
        assert now.cost is not None
        cost_s = _cost(now.cost.seconds, now.hazard)
        rework_s = now.expected_rework_s
        abrupt_s, price_s, why = 0.0, 0.0, self._plain(now)
        if not why:
            assert now.curve is not None
            ending = now.ending or unknown_end(now)
            worth = price_of_delay(now.curve, ending, now)
            if worth > 0:
                abrupt_s = abrupt_loss(now.curve, ending, now) / worth
                price_s = self.price / worth
                why = "expected loss"
            else:
                why = "the fitted loss falls no more, Young's rule"
        short = now.age_s + now.step_s / 2 < self.guards.shortest_s(now, now.cost)
        # An accumulator that lags behind a risen hazard must not put the next checkpoint off without bound.
        old = now.age_s >= self.guards.longest * young(cost_s + price_s, now.hazard)
        # At the next batch top the loss would be larger by a step's: half of that early is nearer than half late.
        ahead_s = now.hazard * now.age_s * now.step_s / 2
        due = not short and (old or rework_s + abrupt_s + ahead_s >= cost_s + price_s)
        return Decision(due, f"value, {why}: {rework_s + abrupt_s:.3g} s at risk, price {cost_s + price_s:.3g} s")

    def _plain(self, now: Situation) -> str:
        """Why this is Young's rule; empty where it is not."""
        graceful = now.ending is None or now.ending.abrupt == 0
        if graceful and not self.price:
            if now.ending is None:
                return "no job history and no price, Young's rule"
            return "no run was killed and no price, Young's rule"
        if now.curve is None:
            return f"{now.no_curve or 'no fit of the loss'}, Young's rule"
        return ""


def _cost(cost_s: float, hazard: float) -> float:
    """The cost that makes Young's rule give the exact interval, where the cost is no longer small."""
    if cost_s * hazard <= LARGE_SHARE:
        return cost_s
    return hazard * exact(cost_s, hazard) ** 2 / 2


def unknown_end(now: Situation) -> Ending:
    """Without a history: a run lasts as planned; where nobody has planned, as long again as it has lasted."""
    return Ending.constant(0.0 if now.horizon_s is not None else 1 / max(now.useful_s, now.step_s), 0.0)


def price_of_delay(curve: LossCurve, ending: Ending, now: Situation) -> float:
    """``w = E[u'(T) | T > t]``: utility that a second of delay costs, in loss a second.

    The future is cut into cells that grow with their distance. Within one the slope is taken as its mean, which is
    exact for any curve where the hazard is constant and small over the cell.
    """
    start, horizon = now.useful_s, now.horizon_s
    if horizon is None:
        last = ending.rate(math.inf)
        horizon = max(start, ending.since_s[-1]) + (FAR / last if last > 0 else max(start, now.step_s))
    if horizon <= start:
        return -curve.slope(now.step) / now.step_s
    unit = (horizon - start) / (GROWTH**CELLS - 1)
    gone, total = ending.cumulative(start), 0.0
    alive, before, since = 1.0, curve.loss(now.step), start
    for cell in range(1, CELLS + 1):
        until = start + unit * (GROWTH**cell - 1)
        left, after = math.exp(gone - ending.cumulative(until)), curve.loss(now.step_at(until))
        total += (alive - left) * (before - after) / (until - since)
        alive, before, since = left, after, until
    return total - alive * curve.slope(now.step_at(horizon)) / now.step_s


def abrupt_loss(curve: LossCurve, ending: Ending, now: Situation) -> float:
    """``q (integral of g (u(s) - u(t0)) ds)`` since the last checkpoint, by Simpson's rule on four intervals."""
    if not ending.abrupt or now.age_s <= 0:
        return 0.0
    base, total = curve.loss(now.saved_step), 0.0
    for part, weight in ((0.25, 4), (0.5, 2), (0.75, 4), (1.0, 1)):
        step = now.saved_step + part * (now.step - now.saved_step)
        total += weight * ending.rate(now.saved_s + part * now.age_s) * (base - curve.loss(step))
    return ending.abrupt * max(0.0, total * now.age_s / 12)

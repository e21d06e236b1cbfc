"""Our policy: a checkpoint is due when the utility that is expected to be lost reaches the price of a checkpoint.

Utility ``u`` is minus the loss. With ``t0`` the useful time of the last checkpoint, ``lambda`` the hazard of faults,
``g`` that of an early end (given that the run still lasts), ``q`` the share of those that are abrupt, ``c`` the
effective cost of a checkpoint in seconds and ``kappa`` its price in utility, it is due when

    integral of lambda w (s - t0) ds + q (integral of g (u(s) - u(t0)) ds)  >=  c w + kappa.

``w(t) = E[u'(T) | T > t]``, over the time ``T`` at which the run will end, is what a second of delay costs: the run
ends that much lower on the curve. Where every end is graceful and checkpoints have no price, ``w`` cancels: Young's
rule. The density that this rule follows, ``n = sqrt((lambda w + q g u') / (2 (c w + kappa)))``, is the optimum to first
order in delays; see ``docs/design/checkpoint_policies.md``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

from shared_core.checkpoint.policy.intervals import exact, young
from shared_core.checkpoint.policy.situation import Decision, Guards, LossCurve, Situation
from shared_core.checkpoint.run_ends import RunEnding

#: The future is divided into so many cells, each longer than the one before by this factor.
CELLS, GROWTH = 32, 1.35
_EDGES = [GROWTH**cell - 1 for cell in range(1, CELLS + 1)]
#: With an unknown end, the horizon is where one run in e^12 is left.
FAR = 12.0
#: Above this ratio of cost to mean time between faults, Young's interval is too long; the exact one is taken.
LARGE_SHARE = 0.05


@dataclass(frozen=True)
class Value:
    """Checkpoints where they pay. ``price``: of one, beyond time (storage, money), in units of the loss."""

    price: float = 0.0
    guards: Guards = field(default_factory=Guards)
    name: ClassVar[str] = "value"

    def due(self, now: Situation) -> Decision:
        if (answer := self.guards.first(now, self.name)) is not None:
            return answer
        assert now.cost is not None
        cost_s = _cost(now.cost.seconds, now.hazard)
        at_risk_s, price_s, why = now.expected_rework_s, 0.0, self._plain(now)
        rule = f"Young's rule ({why})" if why else "value's own rule (expected loss against price)"
        if why:
            why += ", Young's rule"
        else:
            assert now.curve is not None
            ending = now.ending or unknown_end(now)
            worth = price_of_delay(now.curve, ending, now)
            if worth > 0:
                at_risk_s = expected_loss(now.curve, ending, worth, now) / worth
                price_s = self.price / worth
                why = f"expected loss{', ' + now.fit_note if now.fit_note else ''}"
            else:
                why = "the fitted loss falls no more, Young's rule"
                rule = "Young's rule (the fitted loss falls no more)"
        shortest_s = self.guards.shortest_s(now, now.cost)
        short = now.age_s + now.step_s / 2 < shortest_s
        # An accumulator that lags behind a risen hazard must not put the next checkpoint off without bound.
        old = now.age_s >= self.guards.longest * young(cost_s + price_s, now.hazard)
        # At the next boundary more is at risk, about as the square of the age: half a step early is nearer than late.
        ahead_s = at_risk_s * now.step_s / max(now.age_s, now.step_s)
        due = not short and (old or at_risk_s + ahead_s >= cost_s + price_s)
        bound = f", not before {shortest_s:.3g} s" if short else ""
        return Decision(due, f"value, {why}: {at_risk_s:.3g} s at risk, price {cost_s + price_s:.3g} s{bound}", rule)

    def _plain(self, now: Situation) -> str:
        """Why this is Young's rule; empty where it is not."""
        graceful = now.ending is None or now.ending.abrupt == 0
        if graceful and not self.price:
            if now.ending is None:
                return "no job history and no price"
            return "no known run was killed, and no price"
        if now.curve is None:
            return f"no fit of the loss ({now.fit_note})" if now.fit_note else "no fit of the loss"
        return ""


def _cost(cost_s: float, hazard: float) -> float:
    """The cost that makes Young's rule give the exact interval, where the cost is no longer small."""
    if cost_s * hazard <= LARGE_SHARE:
        return cost_s
    return hazard * exact(cost_s, hazard) ** 2 / 2


def unknown_end(now: Situation) -> RunEnding:
    """Without a history: a run lasts as planned; without a plan, as long again as it has lasted."""
    return RunEnding.constant(0.0 if now.horizon_s is not None else 1 / max(now.useful_s, now.step_s), 0.0)


def price_of_delay(curve: LossCurve, ending: RunEnding, now: Situation) -> float:
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
    unit = (horizon - start) / _EDGES[-1]
    gone, total = ending.cumulative(start), 0.0
    alive, before, since = 1.0, curve.loss(now.step), start
    for edge in _EDGES:
        until = start + unit * edge
        left, after = math.exp(gone - ending.cumulative(until)), curve.loss(now.step_at(until))
        total += (alive - left) * (before - after) / (until - since)
        alive, before, since = left, after, until
    return total - alive * curve.slope(now.step_at(horizon)) / now.step_s


def expected_loss(curve: LossCurve, ending: RunEnding, worth: float, now: Situation) -> float:
    """Utility expected to be lost since the last checkpoint, by Simpson's rule on four intervals.

    A run that ended on the way counts too, as seen from now: its weight is ``g(s) G(s) / G(t)``. Hence a second of
    delay at an earlier time ``s`` is worth ``w(t)`` and the slope at the ends from ``s`` to ``t``.
    """
    if now.age_s <= 0:
        return 0.0
    steps = [now.saved_step + part / 4 * (now.step - now.saved_step) for part in range(5)]
    losses = [curve.loss(step) for step in steps]
    gone = ending.cumulative(now.useful_s)
    abrupt = delayed = since = 0.0
    for part, weight in ((4, 1), (3, 4), (2, 2), (1, 4)):
        at = now.saved_s + part / 4 * now.age_s
        density = ending.rate(at) * math.exp(min(gone - ending.cumulative(at), FAR))
        abrupt += weight * density * (losses[0] - losses[part])
        delayed += weight * part / 2 * since  # for the integral of twice the age times the extra worth
        between = at - now.age_s / 8
        since += (
            ending.rate(between)
            * math.exp(min(gone - ending.cumulative(between), FAR))
            * (losses[part - 1] - losses[part])
        )
    rework = now.expected_rework_s * (worth + delayed / 12)
    return rework + ending.abrupt * max(0.0, abrupt * now.age_s / 12)

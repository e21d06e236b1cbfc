"""When to make checkpoints: pure functions of what is known at a step boundary. See ``docs/checkpoints.md``."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol

from shared_core.checkpoint.cost import Cost
from shared_core.checkpoint.history import RunEnding
from shared_core.errors import ConfigError

# -- intervals in closed form -----------------------------------------------------------------------------------------
#
# In seconds of useful work; `cost_s` is what a checkpoint costs, `hazard` the faults a second that roll back to one.


def young(cost_s: float, hazard: float) -> float:
    """``sqrt(2 c / lambda)`` (Young 1974): stall and rework are equal. Infinite where nothing fails."""
    return math.sqrt(2 * cost_s / hazard) if hazard > 0 else math.inf


def daly(cost_s: float, hazard: float) -> float:
    """Daly 2006, equation 37: ``sqrt(2 c M) (1 + sqrt(c / 2M) / 3 + c / 18M) - c`` below ``c = 2M``, else ``M``."""
    if hazard <= 0:
        return math.inf
    share = cost_s * hazard / 2
    if share >= 1:
        return 1 / hazard
    return young(cost_s, hazard) * (1 + math.sqrt(share) / 3 + share / 9) - cost_s


def exact(cost_s: float, hazard: float) -> float:
    """The interval of least expected time under failures without memory: ``(1 + W0(-e^(-lambda c - 1))) / lambda``.

    With ``x = lambda tau`` it solves ``x = 1 - e^-(x + lambda c)``. That is convex and Young's interval lies above the
    root, so Newton's steps descend to it.
    """
    if hazard <= 0:
        return math.inf
    share = hazard * cost_s
    x = math.sqrt(2 * share)
    for _ in range(60):
        slope = -math.expm1(-(x + share))
        step = (x + math.expm1(-(x + share))) / slope if slope > 0 else 0.0
        x -= step
        if abs(step) <= 1e-15 * x:
            break
    return x / hazard


# -- what a policy is told, and what it answers -----------------------------------------------------------------------


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


# -- policies that look at time only ----------------------------------------------------------------------------------


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


# -- equal progress between checkpoints: COCI (Li et al., FGCS 164, 2025, 107597), as it is and put right -------------
#
# COCI fits `loss = exp(theta1 t + theta2)` and checkpoints each time the loss has fallen by `Pe`. Its code has
# `Pe = (1 - e^(theta1 Ts)) (1 / (2 lambda) - 1 / (2 theta1))`. That is not where its own objective is least: with `L0`
# the loss at the start, that is at `sqrt(2 L0 Pe)`. Both depend on the unit of time, which is the minute.
#
# That is theorem 4.1. For data parallel jobs theorem 4.2 has `Pe = (1 - e^(xi theta1 gamma Ts)) (1 / (2 lambda) -
# 1 / (2 xi theta1))`, with `gamma` workers at present, `theta1` of one worker and `xi` the observed speed-up over
# `gamma`: a stall costs `gamma Ts` of a worker's time. `xi gamma theta1` is the decay that is observed with all
# workers, so that the speed-up need not be known by itself. `lambda` is not scaled by `gamma`, although a job of more
# workers has more faults: the second factor adds a time of the job and one of a worker. So `coci_literal` follows the
# theorem, and `coci` does not: with the decay and the hazard of the present workers theorem 4.1 has all that 4.2 means.


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


# -- ours: due when the utility that is expected to be lost reaches the price of a checkpoint -------------------------
#
# Utility `u` is minus the loss. With `t0` the useful time of the last checkpoint, `lambda` the hazard of faults, `g`
# that of an early end (given that the run still lasts), `q` the share of those that are abrupt, `c` the effective cost
# of a checkpoint in seconds and `kappa` its price in utility, it is due when
#
#     integral of lambda w (s - t0) ds + q (integral of g (u(s) - u(t0)) ds)  >=  c w + kappa.
#
# `w(t) = E[u'(T) | T > t]`, over the time `T` at which the run will end, is what a second of delay costs: the run ends
# that much lower on the curve. Where every end is graceful and checkpoints have no price, `w` cancels: Young's rule.
# The density that this rule follows, `n = sqrt((lambda w + q g u') / (2 (c w + kappa)))`, is the optimum to first order
# in delays; see `docs/design/checkpoint_policies.md`.


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


# -- by name ----------------------------------------------------------------------------------------------------------


#: Policies by the name of the option's value.
POLICIES: Mapping[str, Callable[..., Policy]] = {
    "value": Value,
    "fixed": Fixed,
    "young": Young,
    "daly": Daly,
    "exact": Exact,
    "checkfreq": CheckFreq,
    "coci": Coci,
    "coci_literal": CociLiteral,
}


def make_policy(name: str, **options: Any) -> Policy:
    """The policy of this name; ``fixed`` needs ``every_steps``. Raises ConfigError for an unknown policy or option."""
    if name not in POLICIES:
        raise ConfigError(f"unknown checkpoint policy {name!r}: choose from {', '.join(POLICIES)}")
    try:
        return POLICIES[name](**options)
    except TypeError as error:
        raise ConfigError(f"checkpoint policy {name!r}: {error}") from error

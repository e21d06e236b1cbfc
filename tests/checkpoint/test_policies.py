"""When to make checkpoints: closed forms, special cases and guards."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from scipy.special import lambertw

from shared_core.checkpoint.cost import Cost
from shared_core.checkpoint.curve import Curve
from shared_core.checkpoint.history import RunEnding
from shared_core.checkpoint.policy import (
    POLICIES,
    CheckFreq,
    Coci,
    CociLiteral,
    Daly,
    Exact,
    Exponential,
    Fixed,
    Guards,
    Policy,
    Situation,
    Value,
    Young,
    corrected_step,
    daly,
    exact,
    grown,
    literal_step,
    make_policy,
    young,
)
from shared_core.errors import ConfigError

FREE = Guards(max_overhead=1e9)


def interval_of(policy: Policy, saved_s: float = 0.0, **known: object) -> float:
    """Useful seconds after which the policy makes a checkpoint; a step takes a hundredth of a second."""
    step_s = 0.01

    def due(steps: int) -> bool:
        saved = round(saved_s / step_s)
        values = {"hazard": 1e-4, "cost": Cost(0.5)} | known
        now = Situation(
            step=saved + steps,
            useful_s=(saved + steps) * step_s,
            saved_step=saved,
            saved_s=saved * step_s,
            step_s=step_s,
            **values,  # type: ignore[arg-type]
        )
        return policy.due(now).due

    low, high = 0, 1
    while not due(high):
        low, high = high, 2 * high
        assert high < 1 << 40, "it never makes one"
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if due(middle) else (middle, high)
    return high * step_s


def waste(interval_s: float, cost_s: float, hazard: float) -> float:
    """Expected time over useful time, less 1, under failures without memory (Daly 2006)."""
    return math.expm1(hazard * (interval_s + cost_s)) / (hazard * interval_s) - 1


class Falling:
    """``e^(-rate t)`` with steps of a hundredth of a second."""

    def __init__(self, rate: float) -> None:
        self.rate = rate / 100

    def loss(self, step: float) -> float:
        return math.exp(-self.rate * step)

    def slope(self, step: float) -> float:
        return -self.rate * self.loss(step)


def test_closed_forms_against_published_values() -> None:
    """Research section 2: for a cost of a hundredth and a tenth of the mean time between faults."""
    assert young(0.01, 1) == pytest.approx(0.14142, abs=1e-5)
    assert daly(0.01, 1) == pytest.approx(0.134833, abs=1e-6)
    assert exact(0.01, 1) == pytest.approx(0.134835, abs=1e-6)
    assert (daly(0.1, 1), exact(0.1, 1)) == (pytest.approx(0.38303, abs=1e-5), pytest.approx(0.38318, abs=1e-5))
    assert daly(3.0, 1) == 1.0
    assert all(math.isinf(form(1.0, 0.0)) for form in (young, daly, exact))


@pytest.mark.parametrize("share", [1e-8, 1e-4, 0.01, 0.3, 2.0, 20.0])
def test_the_exact_interval_is_lambert_s_and_the_best(share: float) -> None:
    hazard = 1 / 3600
    found = exact(share / hazard, hazard)
    if share > 1e-6:  # nearer to its branch point W is not to be had from doubles
        wanted = (1 + lambertw(-math.exp(-share - 1), 0).real) / hazard
        assert found == pytest.approx(wanted, rel=1e-6)
    least = waste(found, share / hazard, hazard)
    assert least <= min(waste(found * factor, share / hazard, hazard) for factor in (0.9, 0.99, 1.01, 1.1))
    for other in (daly, young):
        assert least <= waste(other(share / hazard, hazard), share / hazard, hazard) * (1 + 1e-12)
    if share <= 0.1:
        assert waste(young(share / hazard, hazard), share / hazard, hazard) <= 1.013 * least


def test_without_a_history_and_a_price_value_is_young_s_rule_and_says_so() -> None:
    for cost, hazard in ((0.5, 1e-4), (2.0, 1e-3), (0.1, 1e-6)):
        for curve in (None, Falling(0.01), Curve(0.1, 2.0, 0.5)):
            wanted = interval_of(Young(FREE), cost=Cost(cost), hazard=hazard)
            assert wanted == pytest.approx(young(cost, hazard), abs=0.011)
            known = {"cost": Cost(cost), "hazard": hazard, "curve": curve}
            assert interval_of(Value(guards=FREE), **known) == pytest.approx(wanted, abs=0.011)
            graceful = RunEnding.constant(1e-3, 0.0)
            assert interval_of(Value(guards=FREE), ending=graceful, **known) == pytest.approx(wanted, abs=0.011)
    now = Situation(100, 100.0, 0, 0.0, 1.0, 1e-4, Cost(1.0))
    assert "no job history and no price, Young's rule" in Value().due(now).reason
    assert "no known run was killed" in Value().due(replace(now, ending=RunEnding.constant(1e-3, 0.0))).reason
    missing = replace(now, ending=RunEnding.constant(1e-3, 1.0), fit_note="fitting the loss needs NumPy: pip install x")
    assert "needs NumPy: pip install x), Young's rule" in Value().due(missing).reason
    assert all(each.rule.startswith("Young's rule (") for each in map(Value().due, (now, missing)))
    falls = replace(missing, fit_note="", curve=Curve(0.1, 2.0, 0.5))
    assert Value().due(falls).rule.startswith("value's own rule") and not Young().due(now).rule


@pytest.mark.parametrize("abrupt", [0.3, 1.0])
def test_a_falling_exponential_with_abrupt_ends_is_spaced_evenly(abrupt: float) -> None:
    """Research 3.2: ``sqrt(2 c / (lambda + q (mu + a)))`` at every time; measured in the middle of small intervals."""
    fall, ends, hazard, cost = 2e-4, 1e-4, 1e-4, 0.05
    wanted = math.sqrt(2 * cost / (hazard + abrupt * (ends + fall)))
    for saved_s in (0.0, 2_000.0, 9_000.0):
        found = interval_of(
            Value(guards=FREE),
            saved_s,
            cost=Cost(cost),
            hazard=hazard,
            curve=Falling(fall),
            ending=RunEnding.constant(ends, abrupt),
        )
        assert found == pytest.approx(wanted, rel=0.01)


def test_risk_is_kept_when_the_hazard_changes() -> None:
    """100 s at 1e-4, then 10 times as much: the expected rework adds up, and the policy looks at the sum."""
    rework = grown(grown(0.0, 1e-4, 0.0, 100.0), 1e-3, 100.0, 50.0)
    assert rework == pytest.approx(1e-4 * 100**2 / 2 + 1e-3 * 50 * 125)
    now = Situation(150, 150.0, 0, 0.0, 1.0, 1e-3, Cost(rework + 0.04), rework)
    assert now.expected_rework_s == rework and Value(guards=FREE).due(now).due
    assert not Value(guards=FREE).due(replace(now, cost=Cost(rework + 0.2))).due
    assert replace(now, rework_s=None).expected_rework_s == 1e-3 * 150**2 / 2


def test_with_a_large_cost_the_exact_interval_is_taken() -> None:
    hazard, cost = 1e-3, 300.0
    found = interval_of(Value(guards=FREE), hazard=hazard, cost=Cost(cost))
    assert found == pytest.approx(exact(cost, hazard), rel=1e-3) and found < 0.8 * young(cost, hazard)


def test_guards() -> None:
    slow = Cost(0.5, persist_s=300.0)
    assert interval_of(Young(), cost=slow) == pytest.approx(300.0, abs=0.02), "no sooner than the last one is durable"
    assert interval_of(Young(Guards(max_in_flight=2)), cost=slow) == pytest.approx(150.0, abs=0.02)
    assert interval_of(Value(), cost=Cost(5.0), hazard=1.0) == pytest.approx(20.0, abs=0.02), "a quarter of the time"
    lagging = Situation(500, 500.0, 0, 0.0, 1.0, 1e-4, Cost(0.5), rework_s=0.0)
    assert Value().due(lagging).due and not Value().due(replace(lagging, step=300, useful_s=300.0)).due
    for policy in (Young(), Daly(), Exact(), CheckFreq(), Coci(), CociLiteral(), Value()):
        old = Situation(10**6, 1e6, 0, 0.0, 1.0, 1e-2, Cost(0.5), in_flight=1)
        assert not policy.due(old).due and "being written" in policy.due(old).reason
        assert not policy.due(Situation(7, 7.0, 7, 7.0, 1.0, 1e-2, Cost(0.5))).due
        unknown = Situation(9, 9.0, 0, 0.0, 1.0, 1e-4, None)
        assert not policy.due(unknown).due and policy.due(replace(unknown, step=10)).due, "to measure the cost"


def test_fixed_and_checkfreq() -> None:
    fixed = Fixed(100)
    made = [step for step in range(1, 350) if fixed.due(Situation(step, step, step - 1, step - 1, 1.0, 1e-4, None)).due]
    assert made == [100, 200, 300]
    assert interval_of(CheckFreq(0.05), cost=Cost(1.0, 1.0)) == pytest.approx(40.0, abs=0.02)
    assert interval_of(CheckFreq(0.05), cost=Cost(0.1, persist_s=90.0)) == pytest.approx(90.0, abs=0.02)


def test_coci_s_formula_lacks_a_square_root() -> None:
    """Research 1.5, in minutes: theorem 4.1 gives .00065 and the least value of COCI's own objective is at .0357."""
    decay, cost, hazard = -0.05 / 60, 1e-4 * 60, 0.00417 / 60
    assert literal_step(decay, cost, hazard) == pytest.approx(0.00065, abs=5e-6)
    assert corrected_step(1.0, decay, cost, hazard) == pytest.approx(0.0360, abs=5e-5)

    def objective(fall: float) -> float:
        """COCI's, loss from 1 to 0: stalls, and rollback with its density in time taken over the loss."""
        count, power = int(1 / fall), 0.00417 / 0.05
        stall = sum(-math.expm1(-0.05 * 1e-4) * (1 - i * fall) for i in range(count))

        def upto(p: float, since: float) -> float:
            return 0.00417 * (p ** (power + 2) / (power + 2) - since * p ** (power + 1) / (power + 1))

        return stall + sum(upto((i + 1) * fall, i * fall) - upto(i * fall, i * fall) for i in range(count))

    best = min(range(1, 200), key=lambda count: objective(1 / count - 1e-15))
    assert 1 / best == pytest.approx(0.0357, abs=1e-4)
    assert objective(0.00065) > 20 * objective(1 / best - 1e-15)


def test_coci_s_theorem_for_data_parallel_jobs() -> None:
    """Theorem 4.2 by hand, in minutes, and what it is in terms of the decay that all workers are seen to make."""
    theta, cost, rate = -0.05, 0.01, 0.00417
    for workers, speedup in ((1, 1.0), (4, 1.0), (8, 0.8)):
        wanted = (1 - math.exp(speedup * theta * workers * cost)) * (1 / (2 * rate) - 1 / (2 * speedup * theta))
        found = literal_step(theta / 60, cost * 60, rate / 60, workers, speedup)
        assert found == pytest.approx(wanted, rel=1e-12)
        observed = speedup * workers * theta / 60
        assert literal_step(observed / workers, cost * 60, rate / 60, workers) == pytest.approx(wanted, rel=1e-12)
    assert literal_step(theta / 60, cost * 60, 0.0, 4) == math.inf


def test_coci_makes_checkpoints_at_equal_progress() -> None:
    fit = Exponential(-1e-5, 0.0)  # of a step of 0.01 s: -1e-3 a second
    known = {"exponential": fit, "hazard": 1e-3, "cost": Cost(0.05)}
    step = corrected_step(1.0, -1e-3, 0.05, 1e-3)
    policy = Coci(Guards(longest=1e9))
    saved = 0.0
    for _ in range(3):
        found = interval_of(policy, saved, **known)
        assert fit.loss(saved * 100) - fit.loss((saved + found) * 100) == pytest.approx(step, rel=1e-3)
        saved += found
    assert interval_of(Coci(), **(known | {"exponential": None})) == pytest.approx(10.0, abs=0.02), "Young's rule"
    assert interval_of(Coci(), **(known | {"exponential": Exponential(0.0, 1.0)})) == pytest.approx(10.0, abs=0.02)


def test_policies_by_name() -> None:
    for name in POLICIES:
        assert make_policy(name, **({"every_steps": 5} if name == "fixed" else {})).name == name
    with pytest.raises(ConfigError, match="unknown checkpoint policy 'magic': choose from value, fixed"):
        make_policy("magic")
    with pytest.raises(ConfigError, match="'fixed'.*every_steps"):
        make_policy("fixed")


def test_no_situation_breaks_a_policy() -> None:
    """Random situations, absurd ones among them: an answer, without an exception, and the same one again."""
    draw = random.Random(5)
    for _ in range(400):
        step = draw.randrange(0, 10**6)
        saved = draw.randrange(0, step + 1)
        step_s = 10 ** draw.uniform(-3, 2)
        now = Situation(
            step,
            step * step_s,
            saved,
            saved * step_s,
            step_s,
            draw.choice([0.0, 10 ** draw.uniform(-9, 0)]),
            draw.choice([None, Cost(10 ** draw.uniform(-4, 3), persist_s=draw.choice([0.0, 100.0]))]),
            curve=draw.choice([None, Curve(0.0, 1.0, 0.5), Curve(1.0, 0.0, 0.5), Falling(0.1)]),
            exponential=draw.choice([None, Exponential(-1e-3, 0.1), Exponential(0.1, 0.1)]),
            ending=draw.choice([None, RunEnding.constant(0.0, 0.0), RunEnding((0.0, 50.0), (0.0, 1e-3), 0.7)]),
            horizon_s=draw.choice([None, 10.0, 1e7]),
        )
        for name in POLICIES:
            policy = make_policy(name, **({"every_steps": 7} if name == "fixed" else {}))
            assert policy.due(now) == policy.due(now)
        Value(price=0.1).due(now)

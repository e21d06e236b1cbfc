"""The dynamic programmes against brute force, and policies against them."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
from best_placement import (
    PlacementProblem,
    before_a_kill,
    cheapest,
    cost_of,
    makespan_costs,
    price_of_delay,
    segment_costs,
)

from shared_core.checkpoint.cost import Cost
from shared_core.checkpoint.history import RunEnding
from shared_core.checkpoint.policy import Guards, Policy, Situation, Value, Young, exact, grown

Array = npt.NDArray[np.float64]
LENGTH = 240.0


@dataclass(frozen=True)
class Power:
    """``(1 + t / t0)^-p``, in steps of the grid."""

    power: float
    shift: float
    step: float

    def loss(self, step: float) -> float:
        return float((1 + step * self.step / self.shift) ** -self.power)

    def slope(self, step: float) -> float:
        return float(-self.power / self.shift * self.step * (1 + step * self.step / self.shift) ** (-self.power - 1))


@dataclass(frozen=True)
class Case:
    """A random problem of research sections 3.3 and 3.5, in minutes."""

    power: float
    shift: float
    ends: float
    faults: float
    weibull: float
    abrupt: float
    cost: float
    price: float

    @classmethod
    def draw(cls, seed: int) -> Case:
        random = np.random.default_rng(seed)
        return cls(
            *(float(random.uniform(*bounds)) for bounds in ((0.3, 1.2), (3, 60), (0.002, 0.02), (0.002, 0.02))),
            float(random.choice([1.0, 0.6, 1.8])),
            float(random.choice([0.0, 0.5, 1.0])),
            float(random.choice([0.05, 0.3, 1.0])),
            float(random.choice([0.0, 1e-4, 1e-3])),
        )

    def hazard(self, t: Array) -> Array:
        age = np.maximum(t * self.faults, 1e-3)
        return np.asarray(self.weibull * self.faults * age ** (self.weibull - 1))

    def on(self, size: int) -> PlacementProblem:
        t = np.linspace(0, LENGTH, size)
        u = 1 - (1 + t / self.shift) ** -self.power
        du = self.power / self.shift * (1 + t / self.shift) ** (-self.power - 1)
        g = self.ends * np.exp(-self.ends * t)
        w = price_of_delay(t, g, du, math.exp(-self.ends * LENGTH))
        return PlacementProblem(t, self.hazard(t), w, u, du, g, g / self.ends, self.abrupt, self.cost, self.price)

    def asked(self, policy: Policy, size: int) -> list[int]:
        """Places on the grid at which the policy makes checkpoints."""
        step = LENGTH / (size - 1)
        curve, ending = Power(self.power, self.shift, step), RunEnding.constant(self.ends, self.abrupt)
        hazards = self.hazard(np.linspace(0, LENGTH, size))
        found, saved, rework = [], 0, 0.0
        for place in range(1, size - 1):
            hazard = float(hazards[place - 1] + hazards[place]) / 2
            rework = grown(rework, hazard, (place - 1 - saved) * step, step)
            now = Situation(
                step=place,
                useful_s=place * step,
                saved_step=saved,
                saved_s=saved * step,
                step_s=step,
                hazard=float(hazards[place]) if isinstance(policy, Value) else float(hazards.mean()),
                cost=Cost(self.cost),
                rework_s=rework,
                curve=curve,
                ending=ending,
                horizon_s=LENGTH,
            )
            if policy.due(now):
                found.append(place)
                saved, rework = place, 0.0
        return found


def brute(costs: Array) -> tuple[float, list[int]]:
    inner = range(1, len(costs) - 1)
    every = (list(chosen) for count in range(len(costs) - 1) for chosen in itertools.combinations(inner, count))
    return min(((cost_of(costs, places), places) for places in every), key=lambda pair: pair[0])


@pytest.mark.parametrize("seed", range(6))
def test_the_programme_finds_what_brute_force_finds(seed: int) -> None:
    for size in (3, 8, 13):
        costs = segment_costs(Case.draw(seed).on(size))
        value, places = cheapest(costs)
        best, wanted = brute(costs)
        assert value == pytest.approx(best, abs=1e-12) and places == wanted
        assert cost_of(costs, places) == pytest.approx(value, abs=1e-12)


def within(seeds: range, size: int) -> tuple[list[float], list[float]]:
    """What ``value`` and Young cost over the best placement on the same grid."""
    ours, youngs = [], []
    for seed in seeds:
        case = Case.draw(seed)
        costs = segment_costs(case.on(size))
        best, _ = cheapest(costs)
        free = Guards(max_overhead=1e9, longest=1e9)
        ours.append(cost_of(costs, case.asked(Value(case.price, free), size)) / best)
        youngs.append(cost_of(costs, case.asked(Young(free), size)) / best)
    return ours, youngs


def test_value_is_within_three_per_cent_of_the_best_placement() -> None:
    ours, youngs = within(range(5), 1201)
    assert min(ours) >= 1 and max(ours) < 1.03, ours
    assert sum(youngs) / len(youngs) > 1.15 and max(youngs) > 1.4, youngs


def test_young_is_the_best_placement_where_all_ends_are_graceful() -> None:
    case = Case(0.7, 10.0, 0.01, 0.01, 1.0, 0.0, 0.3, 0.0)
    costs = segment_costs(case.on(1201))
    assert cost_of(costs, case.asked(Young(), 1201)) / cheapest(costs)[0] < 1.01
    assert case.asked(Young(), 1201) == case.asked(Value(), 1201)


def test_the_shortest_makespan_has_the_exact_interval() -> None:
    """Toueg and Babaoglu: failures without memory and equal costs make the segments equal, at Lambert's interval."""
    cost, hazard = 4.0, 0.01
    t = np.linspace(0, 10 * exact(cost, hazard), 401)
    _, places = cheapest(makespan_costs(t, cost, hazard, restart=3.0))
    gaps = np.diff(t[[0, *places]])
    assert len(places) == 9 and gaps.std() < 0.05 * gaps.mean()
    assert gaps.mean() == pytest.approx(exact(cost, hazard), rel=0.05)
    small = makespan_costs(t[::40], cost, hazard)
    assert cheapest(small)[0] == pytest.approx(brute(small)[0])


def test_placement_before_a_kill() -> None:
    """Against brute force; then the intervals: ``sqrt(2 c / (mu + a))``, not ``sqrt(2 c / mu)``."""

    def gain(places: tuple[int, ...], t: Array, u: Array, cost: float) -> float:
        total, before = 0.0, 0
        for made, place in enumerate(places):
            total += (u[place] - u[before]) * math.exp(-0.02 * (t[place] + (made + 1) * cost))
            before = place
        return total

    t = np.linspace(0, 60, 11)
    for u in (1 - np.exp(-0.05 * t), 1 - (1 + t / 10) ** -0.7):
        value, places = before_a_kill(t, u, lambda at: np.asarray(np.exp(-0.02 * at)), 0.7)
        every = (c for count in range(len(t)) for c in itertools.combinations(range(1, len(t)), count))
        best = max(every, key=lambda chosen: gain(chosen, t, u, 0.7))
        assert value == pytest.approx(gain(best, t, u, 0.7)) and tuple(places) == best
    t = np.linspace(0, 60, 301)
    _, places = before_a_kill(t, 1 - np.exp(-0.05 * t), lambda at: np.asarray(np.exp(-0.02 * at)), 0.1)
    gaps = np.diff(t[[0, *places]])[:15]
    assert gaps.mean() == pytest.approx(math.sqrt(2 * 0.1 / 0.07), rel=0.08)

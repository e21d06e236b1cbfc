"""The best places for checkpoints of a job whose length, hazards and loss curve are known: the reference of policies.

Dynamic programmes over a grid of possible places, O(N^2) for N of them. Needs NumPy.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class PlacementProblem:
    """A job on a grid of useful times; arrays are of the grid's length, in seconds or whatever unit it has.

    Attributes:
        t: the grid, ascending.
        hazard: of faults that roll back.
        w: price of delay, :func:`price_of_delay`.
        u: utility; ``du`` its derivative.
        g: density of an early end, not given survival.
        survival: probability of not having ended early.
        du: derivative of ``u``.
        abrupt: share of early ends after which only a checkpoint is left.
        cost: effective cost of a checkpoint, in time.
        price: in utility. A run that has ended pays no more, so it counts with ``survival``.
    """

    t: Array
    hazard: Array
    w: Array
    u: Array
    du: Array
    g: Array
    survival: Array
    abrupt: float
    cost: float
    price: float = 0.0


def price_of_delay(t: Array, g: Array, du: Array, survival: float) -> Array:
    """``w(t) = E[u'(T); T > t]``; ``survival`` is the probability of lasting to the grid's end."""
    y = g * du
    cells = (y[1:] + y[:-1]) / 2 * np.diff(t)
    return np.asarray(np.append(np.cumsum(cells[::-1])[::-1], 0.0) + survival * du[-1])


def density(problem: PlacementProblem) -> Array:
    """Checkpoints a unit of useful time, best to first order: ``sqrt((lambda w + q g u') / (2 (c w + kappa G)))``."""
    rate = problem.hazard * problem.w + problem.abrupt * problem.g * problem.du
    return np.asarray(np.sqrt(rate / (2 * _of_one(problem))))


def _of_one(problem: PlacementProblem) -> Array:
    return problem.cost * problem.w + problem.price * problem.survival


def segment_costs(problem: PlacementProblem) -> Array:
    """``K[i, j]``: expected utility lost between checkpoints at places i and j, and by the one at j (there is none at
    the end): the integral of ``lambda w (s - ti) + q g (u(s) - u(ti))``, plus ``c w(tj) + kappa G(tj)``.
    """
    t, size = problem.t, len(problem.t)
    costs, one = np.full((size, size), np.inf), _of_one(problem)
    for i in range(size - 1):
        y = problem.hazard[i:] * problem.w[i:] * (t[i:] - t[i])
        y += problem.abrupt * problem.g[i:] * (problem.u[i:] - problem.u[i])
        lost = np.cumsum((y[1:] + y[:-1]) / 2 * np.diff(t[i:]))
        costs[i, i + 1 :] = lost + one[i + 1 :]
    costs[:-1, -1] -= one[-1]
    return costs


def cheapest(costs: Array) -> tuple[float, list[int]]:
    """The cheapest way from the first place to the last, and the places on it between the two."""
    size = len(costs)
    best, previous = np.full(size, np.inf), np.zeros(size, dtype=int)
    best[0] = 0
    for j in range(1, size):
        reached = best[:j] + costs[:j, j]
        previous[j] = reached.argmin()
        best[j] = reached[previous[j]]
    path, j = [], size - 1
    while j:
        j = int(previous[j])
        path.append(j)
    return float(best[-1]), path[::-1][1:]


def cost_of(costs: Array, places: list[int]) -> float:
    """Of given places."""
    path = [0, *places, len(costs) - 1]
    return float(sum(costs[i, j] for i, j in zip(path[:-1], path[1:], strict=True)))


def makespan_costs(t: Array, cost: float, hazard: float, restart: float = 0.0) -> Array:
    """``K[i, j]``: expected time from the checkpoint at place i to the one at j under failures without memory
    (Toueg and Babaoglu 1984): ``e^(lambda R) (e^(lambda (tau + c)) - 1) / lambda``. At the end there is no checkpoint.
    """
    work = t[None, :] - t[:, None]
    paid = np.where(np.arange(len(t)) == len(t) - 1, 0.0, cost)[None, :]
    spent = np.exp(hazard * restart) * np.expm1(hazard * np.maximum(work + paid, 0.0)) / hazard
    return np.where(work > 0, spent, np.inf)


def before_a_kill(t: Array, u: Array, survival: Callable[[Array], Array], cost: float) -> tuple[float, list[int]]:
    """The places that make the expected utility of the last checkpoint largest, where nothing fails and the run is
    killed at a random time; delays are exact. ``V(k, i) = max(0, max_j (uj - ui) G(tj + (k + 1) c) + V(k + 1, j))``
    with k checkpoints made so far. O(N^3).

    Args:
        t: the grid of useful times.
        u: utility on it.
        survival: probability of still running at given wall times.
        cost: of a checkpoint.

    Returns:
        The gain over the utility at the grid's beginning, and the places.
    """
    size = len(t)
    value = np.zeros((size + 1, size))
    choice = np.full((size + 1, size), -1)
    for made in range(size - 1, -1, -1):
        alive = survival(t + (made + 1) * cost)
        for i in range(size - 1):
            gains = (u[i + 1 :] - u[i]) * alive[i + 1 :] + value[made + 1, i + 1 :]
            j = int(gains.argmax())
            if gains[j] > 0:
                value[made, i], choice[made, i] = gains[j], i + 1 + j
    path: list[int] = []
    made = i = 0
    while choice[made, i] >= 0:
        i = int(choice[made, i])
        path.append(i)
        made += 1
    return float(value[0, 0]), path


def waste(interval_s: float, cost_s: float, hazard: float) -> float:
    """Expected time over useful time, less 1, under failures without memory (Daly 2006): ``(e^(lambda (tau +
    c)) - 1) / (lambda tau) - 1``.
    """
    return math.expm1(hazard * (interval_s + cost_s)) / (hazard * interval_s) - 1

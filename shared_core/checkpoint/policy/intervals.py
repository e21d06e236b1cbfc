"""Intervals between checkpoints in closed form; all in seconds of useful work.

``cost_s`` is what a checkpoint costs, ``hazard`` the faults a second that roll back to one.
"""

from __future__ import annotations

import math


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

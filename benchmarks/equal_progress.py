"""Checkpoints at equal falls of the true loss, with the best fall there is: what COCI's way can reach at most."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from shared_core.checkpoint.policy import Decision, Situation


def best_fall(mean_square_slope: float, cost_s: float, hazard: float) -> float:
    """The best that equal progress can do, a stall and a rollback both counted in progress: with a fall of ``P``
    between checkpoints they cost ``c / P`` times the integral of the squared slope, and ``lambda P / 2`` a second.
    Hence ``sqrt(2 c s / lambda)``, ``s`` the mean over the job of the squared slope, in loss^2 a second^2.
    """
    return math.sqrt(2 * cost_s * mean_square_slope / hazard)


@dataclass(frozen=True)
class EqualProgress:
    """Each time the fitted loss has fallen by a given amount.

    Attributes:
        fall: that amount.
    """

    fall: float
    name: ClassVar[str] = "equal-progress"

    def due(self, now: Situation) -> Decision:
        """Once the loss has fallen far enough since the last one."""
        model = now.curve or now.exponential
        if model is None or now.step <= now.saved_step:
            return Decision(
                False, "equal-progress: no fit of the loss" if model is None else "equal-progress: just saved"
            )
        fallen = model.loss(now.saved_step) - model.loss(now.step)
        return Decision(fallen >= self.fall, f"equal-progress: fell by {fallen:.3g} of {self.fall:.3g}")

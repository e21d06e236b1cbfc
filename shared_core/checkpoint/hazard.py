"""How often a job goes back to a checkpoint: a Gamma posterior over the faults that really did."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from shared_core.checkpoint.history import Run

#: Where a job may go back to: memory of the same machine, of another, and storage. One that a replica mends is none.
TIERS = ("memory", "peer", "storage")
#: The prior is a tenth of a fault, at one in 1,000 worker-hours: after three real faults it hardly counts.
PRIOR_FAULTS, PRIOR_MTBF_S = 0.1, 1000 * 3600.0
#: A Weibull hazard of a shape below 1 is infinite at a start; this share of the mean is as near as one looks.
_NEAREST = 1e-3


@dataclass(frozen=True)
class Hazard:
    """Posterior of the faults of one tier.

    The posterior's mean is the best single value: expected overhead is linear in the hazard.

    Attributes:
        faults: seen so far.
        worker_s: seconds of work that they were seen in, over all workers.
        prior_faults: weight of the prior.
        prior_mtbf_s: mean time between faults of one worker that the prior stands for.
        shape: of a Weibull law of the time since a restart; 1 is without memory.
    """

    faults: float = 0.0
    worker_s: float = 0.0
    prior_faults: float = PRIOR_FAULTS
    prior_mtbf_s: float = PRIOR_MTBF_S
    shape: float = 1.0

    def __post_init__(self) -> None:
        if self.prior_faults <= 0 or self.prior_mtbf_s <= 0 or self.shape <= 0:
            raise ValueError("prior_faults, prior_mtbf_s and shape must be above 0")

    def seen(self, faults: int, worker_s: float) -> Hazard:
        """After so many more faults in so many more worker-seconds."""
        return replace(self, faults=self.faults + faults, worker_s=self.worker_s + worker_s)

    def mean(self, workers: int) -> float:
        """Faults a second of so many workers, on average."""
        return workers * (self.prior_faults + self.faults) / (self.prior_faults * self.prior_mtbf_s + self.worker_s)

    def rate(self, workers: int, since_restart_s: float | None = None) -> float:
        """Faults a second of so many workers now: ``(k / eta) (t / eta)^(k - 1)`` with a Weibull shape ``k``."""
        mean = self.mean(workers)
        if self.shape == 1 or since_restart_s is None:
            return mean
        scale = 1 / (mean * math.gamma(1 + 1 / self.shape))
        return self.shape / scale * (max(since_restart_s, _NEAREST / mean) / scale) ** (self.shape - 1)


def by_tier(runs: Iterable[Run], prior: Hazard | None = None) -> dict[str, Hazard]:
    """What earlier runs tell of each tier, on top of ``prior``."""
    found = dict.fromkeys(TIERS, prior or Hazard())
    for run in runs:
        for tier in TIERS:
            found[tier] = found[tier].seen(run.rolled_back.get(tier, 0), run.worker_s)
    return found

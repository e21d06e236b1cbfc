"""How often a job goes back to a checkpoint: a Gamma posterior over the faults that really did."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

#: Weights and mean times between faults of one worker, in hours, of the prior's mixture; each counts as one fault.
#: Together one fault in some 280 worker-hours; a few real ones tell which of the scales holds.
PRIOR = ((0.001, 1.0), (0.01, 10.0), (0.1, 100.0), (0.5, 1e3), (0.3, 1e4), (0.089, 1e5))


@dataclass(frozen=True)
class Hazard:
    """Posterior of the faults that roll back: a mixture of Gamma distributions.

    Its mean is the best single value: expected overhead is linear in the hazard.

    Attributes:
        worker_s: seconds of work in which they were seen, summed over all workers.
        prior: pairs of weight and mean time between faults of one worker, in hours.
    """

    faults: int = 0
    worker_s: float = 0.0
    prior: tuple[tuple[float, float], ...] = PRIOR

    def __post_init__(self) -> None:
        if not self.prior or any(weight <= 0 or hours <= 0 for weight, hours in self.prior):
            raise ValueError(f"weights and hours must be above 0, got {self.prior}")

    def seen(self, faults: int, worker_s: float) -> Hazard:
        return replace(self, faults=self.faults + faults, worker_s=self.worker_s + worker_s)

    def mean(self, workers: int) -> float:
        """Expected faults a second of ``workers``: each scale's ``(1 + n) / (M + E)``, weighted by its likelihood of
        ``n`` faults in a time ``E``.
        """
        scales = [(math.log(weight), hours * 3600) for weight, hours in self.prior]
        likely = [log + math.log(m) - (self.faults + 1) * math.log(m + self.worker_s) for log, m in scales]
        most = max(likely)
        weights = [math.exp(each - most) for each in likely]
        rates = [(1 + self.faults) / (m + self.worker_s) for _, m in scales]
        return workers * sum(w * rate for w, rate in zip(weights, rates, strict=True)) / sum(weights)

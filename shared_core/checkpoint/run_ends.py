"""When runs end before their planned end, and how many of them without a chance to save."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from shared_core.checkpoint.history import Run

#: With fewer early ends than this in a bin, a hazard is not divided further.
ENDS_A_BIN = 10
MOST_BINS = 8
#: Weight of the priors: of a hazard, in ends; of the share of abrupt ends, in graceful ends.
PRIOR_ENDS, PRIOR_GRACEFUL = 0.5, 2.0


@dataclass(frozen=True)
class RunEnding:
    """Hazard of ending early, constant between given times, and the share of abrupt ends among those.

    Attributes:
        since_s: where each rate begins, in useful seconds of a run; the first is 0.
        rates: early ends a second from there on.
        abrupt: share of them after which only a durable checkpoint is left.

    Raises:
        ValueError: for values out of range.
    """

    since_s: tuple[float, ...]
    rates: tuple[float, ...]
    abrupt: float

    _sums: tuple[float, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if len(self.since_s) != len(self.rates) or not self.rates or self.since_s[0] != 0:
            raise ValueError(f"rates must begin at 0 and each have a beginning, got {self.since_s} and {self.rates}")
        if list(self.since_s) != sorted(set(self.since_s)):
            raise ValueError(f"beginnings must ascend, got {self.since_s}")
        if not 0 <= self.abrupt <= 1 or min(self.rates) < 0:
            raise ValueError(f"abrupt must be between 0 and 1 and rates at least 0, got {self.abrupt} and {self.rates}")
        pieces = zip(itertools.pairwise(self.since_s), self.rates[:-1], strict=True)
        sums = itertools.accumulate((rate * (until - since) for (since, until), rate in pieces), initial=0.0)
        object.__setattr__(self, "_sums", tuple(sums))

    @classmethod
    def constant(cls, rate: float, abrupt: float) -> RunEnding:
        return cls((0.0,), (rate,), abrupt)

    def rate(self, useful_s: float) -> float:
        """Early ends a second, at this time of a run."""
        return self.rates[bisect.bisect_right(self.since_s, useful_s) - 1]

    def cumulative(self, useful_s: float) -> float:
        """The hazard's integral from 0."""
        piece = bisect.bisect_right(self.since_s, useful_s) - 1
        return self._sums[piece] + self.rates[piece] * (useful_s - self.since_s[piece])


def from_history(runs: Sequence[Run]) -> RunEnding | None:
    """The estimate from how earlier runs ended; None without any.

    Hazard: Gamma posterior, in up to 8 bins between quantiles of the early ends, at least 10 ends each; prior half an
    end at the overall rate (overall: at one end a mean run). Share of abrupt ends: posterior mean with two graceful
    ends as prior, which is 0 where no run was killed.
    """
    lengths = [run.useful_s for run in runs if run.useful_s > 0]
    if not lengths:
        return None
    early = sorted(run.useful_s for run in runs if run.end in ("stopped", "killed") and run.useful_s > 0)
    exposure = sum(lengths)
    overall = (PRIOR_ENDS + len(early)) / (PRIOR_ENDS * exposure / len(lengths) + exposure)
    bins = max(1, min(MOST_BINS, len(early) // ENDS_A_BIN))
    inner = sorted({early[len(early) * each // bins] for each in range(1, bins)})
    since, rates = (0.0, *inner), []
    for low, high in itertools.pairwise((*since, math.inf)):
        ends = sum(low <= end < high for end in early)
        at_risk = sum(min(length, high) - low for length in lengths if length > low)
        rates.append((PRIOR_ENDS + ends) / (PRIOR_ENDS / overall + at_risk))
    killed = sum(run.end == "killed" and run.useful_s > 0 for run in runs)
    return RunEnding(since, tuple(rates), killed / (len(early) + PRIOR_GRACEFUL))

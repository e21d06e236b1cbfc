"""Which ranks are slow for a reason of their own, from the time that each computes in its last steps. Pure.

Waits for others are not in these times: who waits for a slow rank is not slow. A rank is compared with the median of
the others step by step, and judged by the median of those steps, so that neither one slow step nor one odd rank counts.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

#: Parts of a step. ``data`` is all that is none of the others; a script without DDP has that and ``update``.
PARTS = ("data", "forward", "backward", "update")
#: So many steps are looked at.
STEPS = 10
#: A rank is slow that computes so many times as long as the others, and at least so many seconds longer.
FACTOR, LEAST_S = 1.5, 0.02

#: Seconds of the steps of one rank in each of :data:`PARTS`, by number of the step boundary that ends them.
Steps = Mapping[int, Sequence[float]]


@dataclass(frozen=True)
class Slow:
    """A rank that is slow.

    Attributes:
        own_s: that it computes in a step.
        others_s: median of the others.
        factor: how many times as long as the others.
        part: of the step, in which most of the difference is.
        step: the newest that was looked at.
    """

    rank: int
    own_s: float
    others_s: float
    factor: float
    part: str
    step: int

    @property
    def text(self) -> str:
        return (
            f"computes {self.own_s:.3f} s in a step, the others {self.others_s:.3f} s ({self.factor:.1f} times), "
            f"most of the difference in {self.part}"
        )


def slow(found: Mapping[int, Steps]) -> list[Slow]:
    """Who is slow; empty before all ranks have made :data:`STEPS` steps. ``found``: by rank."""
    common = set.intersection(*(set(steps) for steps in found.values())) if len(found) > 1 else set()
    if len(common) < STEPS - 1:  # ranks are up to one step boundary apart
        return []
    slow = []
    for rank, steps in sorted(found.items()):
        own, others, factors = [], [], []
        for step in common:
            rest = statistics.median(sum(each[step]) for other, each in found.items() if other != rank)
            own.append(sum(steps[step]))
            others.append(rest)
            factors.append(own[-1] / max(rest, 1e-9))
        own_s, others_s = statistics.median(own), statistics.median(others)
        if statistics.median(factors) >= FACTOR and own_s - others_s >= LEAST_S:
            slow.append(
                Slow(rank, own_s, others_s, statistics.median(factors), _part(rank, found, common), max(common))
            )
    return slow


def _part(rank: int, found: Mapping[int, Steps], common: set[int]) -> str:
    others = [steps for other, steps in found.items() if other != rank]

    def longer(part: int) -> float:
        more = (found[rank][step][part] - statistics.median(each[step][part] for each in others) for step in common)
        return statistics.median(more)

    return max(PARTS, key=lambda name: longer(PARTS.index(name)))

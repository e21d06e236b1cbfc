"""Which ranks compute more slowly than the others, from the times of their last steps. Pure.

Waits for others are not in these times: who waits for a slow rank is not slow. A rank is compared with the median of
the others step by step, and judged by the median of those steps, so that neither one slow step nor one odd rank counts.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
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


def slow(found: Mapping[int, Steps], whom: Collection[int]) -> list[Slow]:
    """Who of ``whom`` is slow; empty before all ranks have made :data:`STEPS` steps. ``found``: by rank."""
    common = set.intersection(*(set(steps) for steps in found.values())) if len(found) > 1 else set()
    if len(common) < STEPS - 1:  # ranks are up to one step boundary apart
        return []
    whole = {step: sorted(sum(steps[step]) for steps in found.values()) for step in common}
    slow = []
    for rank in sorted(found.keys() & set(whom)):
        own = [sum(found[rank][step]) for step in common]
        others = [_median_without(mine, whole[step]) for mine, step in zip(own, common, strict=True)]
        factor = statistics.median(mine / max(rest, 1e-9) for mine, rest in zip(own, others, strict=True))
        own_s, others_s = statistics.median(own), statistics.median(others)
        if factor >= FACTOR and own_s - others_s >= LEAST_S:
            slow.append(Slow(rank, own_s, others_s, factor, _part(rank, found, common), max(common)))
    return slow


def _median_without(one: float, all_sorted: Sequence[float]) -> float:
    """The median of the others: one of a thousand ranks does not go through all of them."""
    place, rest = bisect_left(all_sorted, one), len(all_sorted) - 1
    low, high = ((at if at < place else at + 1) for at in ((rest - 1) // 2, rest // 2))
    return (all_sorted[low] + all_sorted[high]) / 2


def _part(rank: int, found: Mapping[int, Steps], common: set[int]) -> str:
    others = [steps for other, steps in found.items() if other != rank]

    def longer(part: int) -> float:
        more = (found[rank][step][part] - statistics.median(each[step][part] for each in others) for step in common)
        return statistics.median(more)

    return max(PARTS, key=lambda name: longer(PARTS.index(name)))

"""Where a new piece of the loss curve begins: the learning rate jumps, or updates take another number of batches.

Schedules that change the rate all the time (warm-up, cosine, decay at each step) must not cut the curve into pieces:
the fit follows their losses. A jump is a change by more than a factor of 1.5 of a rate that was steady before: a decay
by milestones, a warm restart, a rate set by hand.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

#: A rate is steady if it has stayed within this factor for so many step boundaries; a change beyond it is a jump.
FACTOR, STEADY = 1.5, 20


class Pieces:
    """Watches one job, step boundary by step boundary. Pure: no clock, no files."""

    def __init__(self) -> None:
        self._rates: deque[tuple[float, ...]] = deque(maxlen=STEADY)
        self._version = -1
        self._since = 0
        self._windows: tuple[int, int] = (0, 0)  # batches of the last two updates
        self._batches = 0

    def at_boundary(self, boundary: int, version: int, rates: Sequence[float]) -> str:
        """Why a new piece begins with the batch after this boundary; empty where none does. ``version`` counts updates;
        ``rates`` are the learning rates of all parameter groups.
        """
        batches = self._accumulation(boundary, version)
        return self._jump(tuple(rates)) or batches

    def _jump(self, rates: tuple[float, ...]) -> str:
        before = self._rates
        why = ""
        if before and rates != before[-1]:
            if len(rates) != len(before[-1]):
                why = f"{len(rates)} parameter groups instead of {len(before[-1])}"
            elif len(before) == STEADY:
                for old, new, *earlier in zip(before[-1], rates, *before, strict=True):
                    if not why and _apart(old, new) and not _apart(min(earlier), max(earlier)):
                        why = f"the learning rate is {new:g} after {old:g}"
        if why:
            before.clear()
        before.append(rates)
        return why

    def _accumulation(self, boundary: int, version: int) -> str:
        """Two updates in a row after another number of batches than before: one alone may end an epoch."""
        if self._version < 0:
            self._version, self._since = version, boundary
        if version <= self._version:
            return ""
        self._windows = (self._windows[1], boundary - self._since)
        self._version, self._since = version, boundary
        first, second = self._windows
        if first != second or second == self._batches:
            return ""
        before, self._batches = self._batches, second
        return f"an update takes {second} batches instead of {before}" if before else ""


def _apart(one: float, other: float) -> bool:
    low, high = sorted((one, other))
    return high > low * FACTOR

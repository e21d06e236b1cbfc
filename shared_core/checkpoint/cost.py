"""What a checkpoint costs: the stall, and the throughput that is lost while it is written."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass

#: A normal step takes the median of so many steps outside of a write; a checkpoint costs the median of so many.
STEPS, SAVES = 101, 5
#: Fewer steps outside of a write than this are not used.
ENOUGH = 5


@dataclass(frozen=True)
class Cost:
    """Of one checkpoint, in seconds.

    Attributes:
        stall_s: training stands still.
        slowdown_s: the steps take longer in all while it is written.
        persist_s: from its begin until it is durable.
    """

    stall_s: float
    slowdown_s: float = 0.0
    persist_s: float = 0.0

    @property
    def seconds(self) -> float:
        """The effective cost: time by which training is later."""
        return self.stall_s + self.slowdown_s


@dataclass
class _Write:
    stall_s: float
    steps: float = 0.0
    seconds: float = 0.0


class CostMeter:
    """Measures the cost from step times: their median outside of writes, and the sum of what exceeds it inside. Medians
    over several checkpoints: one that coincides with a validation epoch does not count.
    """

    def __init__(self) -> None:
        self._outside: deque[float] = deque(maxlen=STEPS)
        self._writes: dict[int, _Write] = {}
        self._found: deque[Cost] = deque(maxlen=SAVES)

    def step(self, seconds: float) -> None:
        """A step took so long, without a checkpoint's stall. Several writes at once share its slowdown equally."""
        if not self._writes:
            self._outside.append(seconds)
            return
        for write in self._writes.values():
            write.steps += 1 / len(self._writes)
            write.seconds += seconds / len(self._writes)

    def begun(self, step: int, stall_s: float) -> None:
        """The checkpoint of ``step`` has stalled training for so long; its write continues."""
        self._writes[step] = _Write(stall_s)

    def durable(self, step: int, persist_s: float) -> None:
        """It is durable, so many seconds after it was begun."""
        write = self._writes.pop(step, None)
        if write is None:
            return
        slowdown = write.seconds - write.steps * self.step_s if len(self._outside) >= ENOUGH else 0.0
        self._found.append(Cost(write.stall_s, max(0.0, slowdown), persist_s))

    def failed(self, step: int) -> None:
        self._writes.pop(step, None)

    @property
    def step_s(self) -> float:
        """Median duration of a step in seconds; 0 before the first."""
        return statistics.median(self._outside) if self._outside else 0.0

    @property
    def cost(self) -> Cost | None:
        """Medians over the last checkpoints; None before the first is durable."""
        if not self._found:
            return None
        return Cost(
            statistics.median(each.stall_s for each in self._found),
            statistics.median(each.slowdown_s for each in self._found),
            statistics.median(each.persist_s for each in self._found),
        )

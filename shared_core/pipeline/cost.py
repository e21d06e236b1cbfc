"""When it pays that survivors compute a part of what replacements replay (Swift's parallel recovery): pure functions.

Replacements of neighboring stages are a line, which pipelines its own share of a step's micro-batches. A helper
computes all stages of the line for its share, one micro-batch after the other.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ReplayCost:
    """One replayed step of a line of stages whose neighbors' messages are all in logs.

    Attributes:
        stage_s: seconds of forward and backward of one micro-batch, at each stage of the line.
        stage_bytes: of the parameters of all its stages; their gradients have as many.
        message_bytes: of one micro-batch that is lent: what goes to the helper and comes back, but parameters and
            their gradients.
        bytes_per_s: between a replacement and another worker; all transfers share the replacements' one link.
        ordered: gradients of each micro-batch are moved and added in order, so that the result is bitwise the same;
            else each worker adds its own.
    """

    micro_batches: int
    stage_s: tuple[float, ...]
    stage_bytes: int
    message_bytes: int
    bytes_per_s: float
    ordered: bool = True

    def seconds(self, copies: int) -> float:
        """Seconds of the step on so many copies of the line, itself among them.

        Parameters go out to each helper, inputs out and results back for each micro-batch lent; gradients come back for
        each micro-batch (``ordered``) or each helper.
        """
        own, *others = shares(self.micro_batches, copies, self.stage_s)
        helpers, lent = copies - 1, self.micro_batches - own
        gradients = lent if self.ordered else min(helpers, lent)
        moved = (helpers + gradients) * self.stage_bytes + lent * self.message_bytes
        line_s = sum(self.stage_s) + (own - 1) * max(self.stage_s) if own else 0.0
        return max(line_s, max(others, default=0) * sum(self.stage_s)) + moved / self.bytes_per_s

    def best(self, most: int) -> int:
        """Number of copies with which the step is fastest, of at most ``most``; the fewest of equally good ones."""
        return min(range(1, min(most, self.micro_batches) + 1), key=lambda copies: (self.seconds(copies), copies))


def shares(micro_batches: int, copies: int, stage_s: Sequence[float] = (1.0,)) -> list[int]:
    """Micro-batches of each of ``copies`` copies of a line; the line itself comes first.

    Each micro-batch goes to the copy that finishes it first. The line has the transfers to do, so of equally fast ones
    others get more. ``stage_s`` are seconds of one micro-batch at each stage of the line.
    """
    alone, slowest = sum(stage_s), max(stage_s)
    found = [0] * copies
    through = [(alone, copies if place == 0 else place, place) for place in range(copies)]  # with one more each
    heapq.heapify(through)
    for _ in range(micro_batches):
        end, after, place = through[0]
        found[place] += 1
        heapq.heapreplace(through, (end + (alone if place else slowest), after, place))
    return found

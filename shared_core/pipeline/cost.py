"""When it pays that survivors compute a part of what a newcomer replays (Swift's parallel recovery): pure functions."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class ReplayCost:
    """One replayed step of a stage whose neighbours' messages are all in logs.

    Attributes:
        micro_batches: of the step.
        micro_s: forward and backward of one, in seconds.
        stage_bytes: of the stage's parameters, as many as of its gradients.
        message_bytes: of one micro-batch: activations and gradients, in and out of the stage.
        bytes_per_s: between the newcomer and another worker; all transfers pass through the newcomer.
        ordered: gradients of each micro-batch are moved and added in order, so that the result is bitwise the same;
            else each worker adds its own.
    """

    micro_batches: int
    micro_s: float
    stage_bytes: int
    message_bytes: int
    bytes_per_s: float
    ordered: bool = True

    def seconds(self, workers: int) -> float:
        """Seconds of the step on so many workers, the newcomer among them.

        Parameters go out to each helper, inputs out and results back for each micro-batch lent; gradients come back
        for each micro-batch (``ordered``) or each helper.
        """
        helpers = workers - 1
        lent = self.micro_batches - shares(self.micro_batches, workers)[0]
        gradients = lent if self.ordered else min(helpers, lent)
        moved = (helpers + gradients) * self.stage_bytes + lent * self.message_bytes
        return math.ceil(self.micro_batches / workers) * self.micro_s + moved / self.bytes_per_s

    def best(self, most: int) -> int:
        """Number of workers with which the step is fastest, of at most ``most``; the fewest of equally good ones."""
        return min(range(1, min(most, self.micro_batches) + 1), key=lambda workers: (self.seconds(workers), workers))


def shares(micro_batches: int, workers: int) -> list[int]:
    """Micro-batches of each worker; the newcomer, who has the transfers to do, comes first and has the fewest."""
    return [(micro_batches + place) // workers for place in range(workers)]

"""``log.budget_bytes``: how the ranks share what their logs may take on disk, and when that calls for a checkpoint.

Each rank holds a lease, and its files never take more. At each step boundary every rank keeps a part of its lease,
tells the others how much, and gives the rest back; what all have given back is then dealt out in equal parts. So the
leases never exceed the budget, whichever rank is ahead of another, and the room goes to those that log most.

A checkpoint frees what lies before the one before it, and not before it is written. So a third of the budget is meant
for each of the two intervals that are kept, and a third for what is logged while a checkpoint is written.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

#: Parts of the budget, one of which the logs of one interval between checkpoints may take.
PARTS = 3
#: A checkpoint comes two updates after the decision, and takes time to be written: with fewer batches in an interval
#: a budget cannot be kept by making checkpoints.
FEWEST_BATCHES = 4
#: A file is dropped as a whole, so it is at most one such part of what a rank has on average.
FILES = 8


class Advice(enum.Enum):
    NOTHING = "nothing"
    CHECKPOINT = "a checkpoint"
    MORE = "a larger budget"


def kept(lease: int, used: int) -> int:
    """Bytes that a rank keeps of its lease: what it uses, and half of the rest for the batch that begins."""
    return used + max(0, lease - used) // 2


def leases(kept_bytes: Sequence[int], budget: int) -> list[int]:
    """The leases of all ranks, in bytes, from what each has kept. ``budget`` is that of all logs together."""
    free = max(0, budget - sum(kept_bytes))
    return [each + free // len(kept_bytes) for each in kept_bytes]


def advice(logged: int, batches: int, budget: int) -> Advice:
    """What to do about the ``logged`` bytes, of all ranks together, since the last checkpoint was due, so many batches
    ago. ``budget`` is that of all logs together; 0 is no limit.
    """
    if not budget or logged * PARTS < budget:
        return Advice.NOTHING
    return Advice.CHECKPOINT if batches >= FEWEST_BATCHES else Advice.MORE


def segment_bytes(wanted: int, budget: int, ranks: int) -> int:
    """Size of a file of one of ``ranks`` logs: ``wanted``, or less with a budget for all together (0: none)."""
    return min(wanted, max(1, budget // (FILES * ranks))) if budget else wanted

"""Where a job whose number of workers changes is cut: the step boundary from which it continues. Pure.

Workers that stay publish what they have (:class:`Offer`); nobody continues meanwhile. The cut is the newest step
boundary that all of them have published. What lies behind it is undone: rank-local state is that of the publication,
and who has published nothing newer can put parameters and optimizer state back to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shared_core.codec import Count, FramedRecord
from shared_core.errors import RecoveryFailed


@dataclass(frozen=True)
class Offer(FramedRecord):
    """What one worker that stays has.

    Attributes:
        slot: place of its machine.
        boundaries: index, version and kind of each step boundary it has published, oldest first.
        version: optimizer steps its state contains; None if it is a replacement that has no state yet.
    """

    rank: Count
    slot: Count
    boundaries: tuple[tuple[Count, Count, str], ...]
    version: Count | None


@dataclass(frozen=True)
class Cut:
    """Where the job continues.

    Attributes:
        boundary: index of the step boundary; 0 if nobody has published one: then it starts from scratch.
        version: optimizer steps of the state there.
        donors: by machine's place, the rank that gives the replicated state.
    """

    boundary: int
    version: int
    donors: dict[int, int]


def choose_cut(offers: Mapping[int, Offer]) -> Cut:
    """The cut for the workers that stay, at least one; raises RecoveryFailed if there is none or its state is gone."""
    if all(not offer.boundaries for offer in offers.values()):
        return Cut(0, 0, {})
    common = set.intersection(*({boundary[0] for boundary in offer.boundaries} for offer in offers.values()))
    newest = min(offer.boundaries[-1][0] if offer.boundaries else 0 for offer in offers.values())
    if newest not in common:
        have = {rank: [boundary[0] for boundary in offer.boundaries] for rank, offer in offers.items()}
        raise RecoveryFailed(f"the workers that stay have no step boundary in common: {have}")
    _, version, kind = next(boundary for boundary in next(iter(offers.values())).boundaries if boundary[0] == newest)
    if kind == "end":
        raise RecoveryFailed(
            "the workers have just finished a call of the trainer, and none can leave between two calls"
        )
    donors: dict[int, int] = {}
    for rank, offer in sorted(offers.items(), reverse=True):
        # Who has published nothing newer has not committed the updates since.
        if offer.version is not None and offer.boundaries[-1][0] == newest and offer.version >= version:
            donors[offer.slot] = rank
    if not donors:
        raise RecoveryFailed(f"no worker that stays has the state of step boundary {newest}")
    return Cut(newest, version, donors)

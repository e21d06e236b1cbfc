"""Where a job whose number of workers changes is cut: the batch top from which it goes on, as a pure function.

Workers that stay say what they have (:class:`Offer`); nobody goes on meanwhile. The cut is the newest batch top that
all of them have published. What lies behind it is undone: rank-local state is that of the publication, and whoever has
published nothing newer can put parameters and optimizer state back to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shared_core.errors import RecoveryFailed
from shared_core.protocol.codec import Count, Record


@dataclass(frozen=True)
class Offer(Record):
    """What one worker that stays has.

    Attributes:
        rank: its logical rank.
        slot: place of its machine.
        tops: index, version and kind of each batch top it has published, oldest first.
        version: optimizer steps its state contains; None if it is a replacement that has no state yet.
    """

    rank: Count
    slot: Count
    tops: tuple[tuple[Count, Count, str], ...]
    version: Count | None


@dataclass(frozen=True)
class Cut:
    """Where the job continues.

    Attributes:
        top: index of the batch top; 0 if nobody has published one, which means from the beginning.
        version: optimizer steps of the state there.
        donors: by machine's place, the rank that hands the replicated state on.
    """

    top: int
    version: int
    donors: dict[int, int]


def choose_cut(offers: Mapping[int, Offer]) -> Cut:
    """The cut for these workers.

    Args:
        offers: of every worker that stays, by rank; at least one.

    Raises:
        RecoveryFailed: if there is no such top, or nobody has its state.
    """
    if all(not offer.tops for offer in offers.values()):
        return Cut(0, 0, {})
    common = set.intersection(*({top[0] for top in offer.tops} for offer in offers.values()))
    newest = min(offer.tops[-1][0] if offer.tops else 0 for offer in offers.values())
    if newest not in common:
        have = {rank: [top[0] for top in offer.tops] for rank, offer in offers.items()}
        raise RecoveryFailed(f"the workers that stay have no batch top in common: {have}")
    _, version, kind = next(top for top in next(iter(offers.values())).tops if top[0] == newest)
    if kind == "end":
        raise RecoveryFailed(
            "the workers have just finished a call of the trainer, and none can leave between two calls"
        )
    donors: dict[int, int] = {}
    for rank, offer in sorted(offers.items(), reverse=True):
        # Whoever has published nothing newer has not committed the updates since.
        if offer.version is not None and offer.tops[-1][0] == newest and offer.version >= version:
            donors[offer.slot] = rank
    if not donors:
        raise RecoveryFailed(f"no worker that stays has the state of batch top {newest}")
    return Cut(newest, version, donors)

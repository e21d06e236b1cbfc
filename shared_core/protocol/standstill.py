"""Whether waiting ranks wait for each other, so that none can ever continue. Pure, from what each has reported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shared_core.codec import Count, FramedRecord
from shared_core.waiting import ranks_text

#: Ranks that do nothing but wait for each other are ended after so many seconds.
STUCK_S = 5.0
#: Of a message that may come from any rank of the group.
ANY_SOURCE = -1
#: Calls in which all members must give the same shapes.
_ALIKE = ("all_reduce", "broadcast", "barrier")


@dataclass(frozen=True)
class WaitStatus(FramedRecord):
    """Where a rank is that waits, or has finished.

    Attributes:
        look: number of this report; a rank makes one every few seconds while it waits.
        waited_s: seconds of the wait so far.
        limit_s: seconds after which its wait ends by itself.
        call: what it waits in, as text; empty if it has finished.
        group: name of the group of this call; empty for a wait outside of the program's groups.
        members: ranks of the group; of a wait outside, those that are waited for.
        number: sequence number of the call in its group, or of the message in its channel.
        channel: of a message that is waited for; empty for a collective.
        source: rank that sends it, or :data:`ANY_SOURCE`; -1 for a collective.
        issued: per group, how many collectives the rank has issued.
        pending: per group and sequence number, those that are not finished.
        sent: per group and channel, how many messages it has sent.
        idle: nothing else in its process computes or has ever called a collective: what it waits for is all it does.
    """

    rank: Count
    generation: int
    look: Count
    waited_s: float = 0.0
    limit_s: float = 0.0
    call: str = ""
    group: str = ""
    called: str = ""
    members: tuple[int, ...] = ()
    number: int = -1
    channel: str = ""
    source: int = ANY_SOURCE
    issued: dict[str, int] = field(default_factory=dict)
    pending: dict[str, dict[str, str]] = field(default_factory=dict)
    sent: dict[str, dict[str, int]] = field(default_factory=dict)
    idle: bool = False

    @property
    def finished(self) -> bool:
        return not self.call

    @property
    def from_any(self) -> bool:
        """Whether any rank of the group may send what it waits for."""
        return bool(self.channel) and self.source == ANY_SOURCE

    @property
    def place(self) -> tuple[str, str, int, str]:
        """Equal as long as the rank waits for the same."""
        return self.call, self.group, self.number, self.channel

    @property
    def where(self) -> str:
        """``all_reduce(float32[4]) (#12 of the default group)``."""
        if self.channel:
            source = "any rank" if self.from_any else f"rank {self.source}"
            return f"recv (message {self.number} from {source} in {self.called})"
        return f"{self.call} (#{self.number} of {self.called})" if self.group else self.call


def lacks(one: WaitStatus, other: WaitStatus) -> bool:
    """Whether ``one`` waits for something that ``other`` has not done yet."""
    if one.finished or other.rank == one.rank:
        return False
    if one.channel:
        return other.rank == one.source and other.sent.get(one.group, {}).get(one.channel, 0) <= one.number
    if not one.group or other.rank not in one.members:
        return False
    if other.issued.get(one.group, 0) <= one.number:
        return True
    there = other.pending.get(one.group, {}).get(str(one.number))
    return there is not None and not _matches(one.call, there)


def _matches(one: str, other: str) -> bool:
    name = one.partition("(")[0]
    return one == other if name in _ALIKE else name == other.partition("(")[0]


def stuck(statuses: Mapping[int, WaitStatus]) -> dict[int, tuple[int, ...]]:
    """Ranks of which none can continue, each with those it waits for: these wait themselves, or have finished. Ranks
    not in ``statuses`` may be computing, and block nobody for ever.
    """
    left = dict(statuses)
    while True:
        held = {
            rank: _any_of(one, left) if one.from_any else tuple(o for o in sorted(left) if lacks(one, left[o]))
            for rank, one in left.items()
            if not one.finished
        }
        free = [rank for rank, others in held.items() if not others]
        if not free:
            return dict(sorted(held.items()))
        for rank in free:
            del left[rank]


def _any_of(one: WaitStatus, left: Mapping[int, WaitStatus]) -> tuple[int, ...]:
    """Those that ``one`` waits for, any of which may send: all of them, or nobody while one may be computing."""
    others = _others(one)
    return others if all(other in left for other in others) else ()


def _others(one: WaitStatus) -> tuple[int, ...]:
    return tuple(rank for rank in one.members if rank != one.rank)


def lasts(held: Mapping[int, tuple[int, ...]], before: Mapping[int, WaitStatus], now: Mapping[int, WaitStatus]) -> bool:
    """Whether the same ranks were stuck before: each of them waited for the same at least two reports ago."""
    involved = {*held, *(other for whom in held.values() for other in whom)}
    return bool(held) and all(
        rank in before
        and before[rank].place == now[rank].place
        and (now[rank].finished or before[rank].look + 2 <= now[rank].look)
        for rank in involved
    )


def left_s(held: Mapping[int, tuple[int, ...]], now: Mapping[int, WaitStatus], limit_s: float) -> float:
    """How long ranks that are stuck may still wait, in seconds. ``held`` is from :func:`stuck` and :func:`lasts`;
    ``limit_s`` bounds the longest wait where something else may still happen in one of them.
    """
    waits = [now[rank] for rank in held]
    left = limit_s - max(each.waited_s for each in waits)
    if all(each.idle for each in waits):
        left = min(left, STUCK_S - min(each.waited_s for each in waits))
    return left


def awaited(one: WaitStatus, statuses: Mapping[int, WaitStatus]) -> tuple[int, ...]:
    if one.channel and not one.from_any:
        return (one.source,)
    if one.from_any or not one.group:
        return _others(one)
    return tuple(rank for rank in _others(one) if rank not in statuses or lacks(one, statuses[rank]))


def describe(statuses: Mapping[int, WaitStatus], waits: Mapping[int, tuple[int, ...]]) -> str:
    """``ranks 0, 2 wait for rank 1 in barrier() (#3 of the default group)``, for all in ``waits``."""
    alike: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for rank, whom in waits.items():
        alike.setdefault((statuses[rank].where, whom), []).append(rank)
    parts = []
    for (where, whom), ranks in alike.items():
        ended = [rank for rank in whom if rank in statuses and statuses[rank].finished]
        verb = "waits" if len(ranks) == 1 else "wait"
        why = f", though the program of {ranks_text(ended)} has ended" if ended else ""
        parts.append(f"{ranks_text(ranks)} {verb} for {ranks_text(whom)} in {where}{why}")
    return "; ".join(parts)

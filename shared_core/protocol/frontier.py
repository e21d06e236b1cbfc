"""Frontiers: what each rank has finished, as plain data that travels as JSON (DESIGN section 4)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated

from shared_core.codec import Count, Form, FramedRecord, damaged
from shared_core.protocol.members import Members, members_of, wrong_members

#: A larger difference between ranks, in collectives of a group or in messages, is refused as damage.
_MOST_APART = 10_000_000


class Done:
    """A set of sequence numbers, kept as everything below ``upto`` plus a few above it. Collectives finish nearly in
    order, so the few above stay few.
    """

    __slots__ = ("extra", "upto")

    def __init__(self, upto: int = 0, extra: Iterable[int] = ()) -> None:
        self.upto = upto
        self.extra = set(extra)

    def add(self, seq: int) -> None:
        if seq < self.upto:
            return
        self.extra.add(seq)
        while self.upto in self.extra:
            self.extra.remove(self.upto)
            self.upto += 1

    def __contains__(self, seq: int) -> bool:
        return seq < self.upto or seq in self.extra

    def covers(self, bound: int) -> bool:
        """Whether every number below ``bound`` is a member."""
        return self.upto >= bound or all(s in self.extra for s in range(self.upto, bound))

    def to_json(self) -> list[int]:
        """``[upto, extra...]``."""
        return [self.upto, *sorted(self.extra)]

    @classmethod
    def from_json(cls, raw: list[int]) -> Done:
        return cls(raw[0], raw[1:])


#: A point-to-point channel of a group: (source, destination, tag), ranks within the group.
Channel = tuple[int, int, int]


#: Number of messages of each channel, by :func:`channel_key`.
PerChannel = dict[Annotated[str, Form(r"\d{1,9},\d{1,9},-?\d{1,19}", "a channel")], Count]


def channel_key(channel: Channel) -> str:
    return ",".join(map(str, channel))


@dataclass(frozen=True)
class StepBoundary:
    """A published step boundary: where a replacement can start.

    Attributes:
        index: number of the boundary in the life of the logical rank, from 1.
        version: optimizer steps the state contains there.
        entry: number of the entry call (fit, validate, ...) it lies in, -1 outside any.
        kind: ``batch``, ``eval`` (start of a stand-alone evaluation) or ``end`` (an entry call has ended).
        groups: next sequence number of each group, by name.
        received: per group and channel, messages received before the boundary.
        sent: per group and channel, messages sent before the boundary.
        members: of each group, as in :mod:`shared_core.protocol.members`.
        replicas: ranks that hold the same parameters and optimizer state, this one among them; empty: all.
        saved: a checkpoint has parameters and optimizer state of this boundary, so no donor is needed.
        own: the rank has published them itself, as its shard, so no donor is needed.
    """

    index: Count
    version: Count
    entry: int
    kind: str
    groups: dict[str, Count]
    received: dict[str, PerChannel] = field(default_factory=dict)
    sent: dict[str, PerChannel] = field(default_factory=dict)
    members: dict[str, Members] = field(default_factory=dict)
    replicas: list[Count] = field(default_factory=list)
    saved: bool = False
    own: bool = False


@dataclass(frozen=True)
class GroupFrontier:
    """One group as one rank knows it.

    Attributes:
        ranks: its members, as in :mod:`shared_core.protocol.members`.
        next: sequence number the next collective will get.
        done: finished collectives, as :meth:`Done.to_json`.
        log: sequence numbers whose result this rank can send to others.
        exclusive: sequence numbers, still held, of collectives whose result differs by rank; all members take part in
            them again.
        held: per channel, number of the first message that can be sent again.
        over: its program has destroyed the group, and waits for nothing in it.
    """

    ranks: Members
    next: Count
    done: list[Count]
    log: list[Count]
    exclusive: list[Count]
    received: PerChannel = field(default_factory=dict)
    sent: PerChannel = field(default_factory=dict)
    held: PerChannel = field(default_factory=dict)
    over: bool = False


@dataclass(frozen=True)
class Frontier(FramedRecord):
    """What one rank publishes when a generation is formed.

    Attributes:
        replacement: whether it has yet to take over the failed worker's place.
        version: optimizer steps its state contains.
        boundaries: step boundaries it has published (a replacement: the failed worker's), newest last.
        groups: its groups by name (empty for a replacement).
        together: ranks that start again together, this one among them: messages between them are not on disk.
        boundary: number of the newest step boundary that this survivor has published.
        kept: step boundaries whose parameters and optimizer state it can still give.
        outside: its script changes these outside updates: a newer state serves no older step boundary.
    """

    rank: Count
    incarnation: Count
    replacement: bool
    version: Count
    boundaries: tuple[StepBoundary, ...]
    groups: dict[str, GroupFrontier] = field(default_factory=dict)
    together: list[Count] = field(default_factory=list)
    boundary: Count = 0
    kept: list[Count] = field(default_factory=list)
    outside: bool = False


def read_frontiers(raws: Mapping[int, bytes], keys: Mapping[int, str], world_size: int) -> dict[int, Frontier]:
    """Decode and check the frontiers of some ranks; raises DamagedRecord. ``keys``: where they were, for messages."""
    frontiers: dict[int, Frontier] = {}
    alike: dict[bytes, Frontier] = {}  # most differ only in the rank, which comes first; decoding takes the time
    for rank, raw in raws.items():
        first, _, rest = bytes(raw).partition(b",")
        regular = first == b'{"rank":%d' % rank
        if regular and rest in alike:
            frontiers[rank] = replace(alike[rest], rank=rank)
            continue
        frontiers[rank] = Frontier.from_json(raw, keys[rank])
        if regular:
            alike[rest] = frontiers[rank]
    for rank, front in frontiers.items():
        if wrong := _wrong_in(rank, front, world_size):
            raise damaged(keys[rank], wrong)
    for name in {name for front in frontiers.values() for name in front.groups}:
        made = {rank: front.groups[name].next for rank, front in frontiers.items() if name in front.groups}
        most, least = max(made, key=lambda rank: made[rank]), min(made.values())
        if made[most] - least > _MOST_APART:
            raise damaged(keys[most], f"groups.{name}.next is {made[most]}, another rank's is {least}")
    return frontiers


def _wrong_in(rank: int, front: Frontier, world_size: int) -> str:
    """What is wrong in a frontier of the right shape; empty if nothing is."""
    if front.rank != rank:
        return f"its rank is {front.rank}"
    channels: list[tuple[str, Members, tuple[dict[str, int], ...]]]
    channels = [(name, group.ranks, (group.received, group.sent, group.held)) for name, group in front.groups.items()]
    for boundary in front.boundaries:
        for name, ranks in boundary.members.items():
            channels.append((name, ranks, (boundary.received.get(name, {}), boundary.sent.get(name, {}))))
    for name, ranks, counts in channels:
        if wrong := wrong_members(ranks, world_size):
            return f"the members of group {name!r} are {wrong}"
        size = len(members_of(ranks))
        ends = (int(end) for each in counts for key in each for end in key.split(",")[:2])
        if any(end >= size for end in ends):
            return f"group {name!r} of {size} ranks has a channel of another"
    for name, group in front.groups.items():
        if not group.done or max(group.done) - group.next > _MOST_APART:
            return f"groups.{name}.done is {group.done!r:.80}, not numbers up to {group.next}"
    return ""

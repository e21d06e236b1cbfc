"""Who recovers how: the plan of one generation, computed from the frontiers of all ranks. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypedDict

from shared_core.codec import Count, Record, damaged, decode
from shared_core.errors import RecoveryFailed
from shared_core.protocol.frontier import Done, Frontier, GroupFrontier, PerChannel, StepBoundary
from shared_core.protocol.members import Members, members_of, wrong_members


@dataclass(frozen=True)
class Transfer:
    """Logged results that ``source`` sends to ``destination``: per group, sequence numbers."""

    source: Count
    destination: Count
    entries: dict[str, list[Count]]


@dataclass(frozen=True)
class Plan(Record):
    """What all ranks do in one generation.

    Attributes:
        boundaries: the boundary each replacement starts from; None: from the beginning of the script, with every
            operation replayed.
        donors: the survivor whose replicated state each replacement copies; none where a checkpoint holds it, or a
            publication: of a shard, or at the end of an entry call.
        transfers: logged results to move, in the order in which they are moved.
        redo: per group, finished rank-specific collectives that all members run again, because some member needs them.
        received: per group and channel, how many messages the receiver has; the sender sends those above again.
        leave: survivors that have to start again together with a replacement; if there are any, nothing else is done.
        copies: replacements have their donors' rank-local state too.
        newest: optimizer steps of the survivor that has made most; 0 without survivors.
        oldest: those of the one that has made fewest.
        logged: survivors keep their messages on disk.
    """

    boundaries: dict[Count, StepBoundary | None]
    donors: dict[Count, Count]
    transfers: tuple[Transfer, ...]
    redo: dict[str, set[Count]]
    received: dict[str, PerChannel] = field(default_factory=dict)
    leave: frozenset[Count] = frozenset()
    copies: bool = False
    newest: Count = 0
    oldest: Count = 0
    logged: bool = False

    @property
    def replacements(self) -> tuple[int, ...]:
        return tuple(sorted(self.boundaries))


class Totals(TypedDict):
    newest: int
    oldest: int
    logged: bool


class _PlannedGroup:
    """One group as the survivors see it.

    Attributes:
        ranks: global ranks of the members, in group order.
        here: the survivors among them that have made the group.
        done: what each of these has finished.
        finished: replicated results that some survivor has in its log.
    """

    def __init__(self, name: str, ranks: tuple[int, ...], here: dict[int, GroupFrontier]) -> None:
        self.name, self.ranks, self.here = name, ranks, here
        self.done = {rank: Done.from_json(group.done) for rank, group in here.items()}
        self.exclusive = {rank: set(group.exclusive) for rank, group in here.items()}
        logged = {seq for group in here.values() for seq in group.log}
        self.finished = logged.difference(*self.exclusive.values())

    def base(self, boundary: StepBoundary | None) -> int:
        """First collective that a replacement issues when it starts from ``boundary``."""
        return 0 if boundary is None else boundary.groups.get(self.name, 0)

    def run(self, boundaries: Mapping[int, StepBoundary | None]) -> Iterator[tuple[int, dict[int, int]]]:
        """Collectives that some member needs and no log has, with each replacement's first collective."""
        bases = {rank: self.base(boundaries[rank]) for rank in self.ranks if rank in boundaries}
        low = min([*bases.values(), *(done.upto for done in self.done.values())], default=0)
        for seq in range(low, max([*bases.values(), *(g.next for g in self.here.values())], default=0)):
            if seq in self.finished:
                continue
            if any(base <= seq for base in bases.values()) or any(seq not in done for done in self.done.values()):
                yield seq, bases

    def channels(self, boundaries: Mapping[int, StepBoundary | None]) -> Iterator[tuple[str, int, int]]:
        """(key, global source, global destination) of every channel that any rank knows."""
        keys = {key for g in self.here.values() for key in (*g.sent, *g.received)}
        for boundary in boundaries.values():
            if boundary is not None:
                keys |= {*boundary.sent.get(self.name, {}), *boundary.received.get(self.name, {})}
        for key in sorted(keys):
            source, destination, _ = key.split(",")
            yield key, self.ranks[int(source)], self.ranks[int(destination)]

    def has(self, key: str, receiver: int, boundaries: Mapping[int, StepBoundary | None]) -> int:
        """How many messages of a channel the receiver will have."""
        if receiver in boundaries:
            boundary = boundaries[receiver]
            return 0 if boundary is None else boundary.received.get(self.name, {}).get(key, 0)
        return self.here[receiver].received.get(key, 0) if receiver in self.here else 0


def decide(frontiers: Mapping[int, Frontier]) -> Plan:
    """The plan for a generation with these frontiers (every rank's, replacements included).

    Each replacement starts from the newest of its step boundaries, published or in a checkpoint, from which all that
    any rank still needs is available: every collective's result is in some log, or all members can run it again; every
    message is at its sender or at its receiver. A start that is too late for others stays too late when others start
    earlier, so lowering one at a time finds the newest starts.

    Raises RecoveryFailed if a replacement cannot be served.
    """
    survivors = {rank: f for rank, f in frontiers.items() if not f.replacement}
    replacements = {rank: f for rank, f in frontiers.items() if f.replacement}
    if replacements and not survivors:
        raise RecoveryFailed("no survivor is left")
    groups = _groups(frontiers, survivors)
    # The beginning of the script is the oldest start, while logs reach back so far.
    starts: dict[int, list[StepBoundary | None]] = {
        rank: [None, *f.boundaries] for rank, f in sorted(replacements.items())
    }
    donors: dict[int, int] = {}
    while True:
        boundaries = {rank: left[-1] for rank, left in starts.items()}
        too_late = _without_donor(boundaries, survivors, donors)
        for group in groups:
            too_late = too_late if too_late is not None else _too_late(group, boundaries)
        if too_late is None:
            break
        starts[too_late].pop()
        if not starts[too_late]:
            raise RecoveryFailed(
                f"rank {too_late} cannot be rebuilt: others need what it did before each of its "
                f"{len(replacements[too_late].boundaries)} published step boundaries, and that was lost with it. All "
                "workers start again"
            )
    redo: dict[str, set[int]] = {}
    received: dict[str, dict[str, int]] = {}
    leave: set[int] = set()
    for group in groups:
        leave.update(_without_messages(group, boundaries, survivors))
        if again := _redo(group, boundaries):
            redo[group.name] = again
        if counts := {key: group.has(key, receiver, boundaries) for key, _, receiver in group.channels(boundaries)}:
            received[group.name] = counts
    return Plan(
        **totals(survivors),
        leave=frozenset(leave),
        boundaries=boundaries,
        donors=donors,
        transfers=_transfers(groups, boundaries),
        redo=redo,
        received=received,
    )


def totals(survivors: Mapping[int, Frontier]) -> Totals:
    versions = [front.version for front in survivors.values()] or [0]
    logged = any(front.together for front in survivors.values())
    return {"newest": max(versions), "oldest": min(versions), "logged": logged}


def _groups(frontiers: Mapping[int, Frontier], survivors: Mapping[int, Frontier]) -> list[_PlannedGroup]:
    members: dict[str, Members] = {}
    for frontier in frontiers.values():
        for boundary in frontier.boundaries:  # a group without survivors is known from its failed members' boundaries
            members |= boundary.members
        members |= {name: group.ranks for name, group in frontier.groups.items()}
    groups = []
    for name, text in sorted(members.items()):
        ranks = members_of(text)
        here = {
            rank: survivors[rank].groups[name] for rank in ranks if rank in survivors and name in survivors[rank].groups
        }
        groups.append(_PlannedGroup(name, ranks, here))
    return groups


def _without_donor(
    boundaries: Mapping[int, StepBoundary | None], survivors: Mapping[int, Frontier], donors: dict[int, int]
) -> int | None:
    """Fill ``donors``; returns a replacement whose boundary no survivor reaches by itself, or None."""
    # Who exchanges messages may have to wait for one before its next update, which no frontier shows.
    messages = any(boundary.sent or boundary.received for boundary in boundaries.values() if boundary is not None)
    messages = messages or any(group.sent or group.received for f in survivors.values() for group in f.groups.values())
    for rank, boundary in boundaries.items():
        donors.pop(rank, None)
        if boundary is not None and (boundary.saved or boundary.own or boundary.kind == "end"):
            continue
        able = [
            donor
            for donor in sorted(survivors)
            if boundary is None or (_replica(donor, boundary) and _serves(survivors[donor], boundary, messages))
        ]
        if not able:
            return rank
        # One that is there already need not be waited for.
        donors[rank] = next(
            (donor for donor in able if boundary is None or _is_there(survivors[donor], boundary)), able[0]
        )
    return None


def _replica(donor: int, boundary: StepBoundary) -> bool:
    return not boundary.replicas or donor in boundary.replicas


def _serves(survivor: Frontier, boundary: StepBoundary, messages: bool) -> bool:
    if boundary.index in survivor.kept:
        return True
    if survivor.outside:  # it keeps the state of a boundary when it gets there
        return survivor.boundary < boundary.index and not messages and _passes(survivor, boundary)
    return _reaches(survivor, boundary, messages)


def _is_there(survivor: Frontier, boundary: StepBoundary) -> bool:
    return boundary.index in survivor.kept or (not survivor.outside and survivor.version >= boundary.version)


def _reaches(survivor: Frontier, boundary: StepBoundary, messages: bool) -> bool:
    """Whether the survivor's state gets to the boundary's version without help."""
    if survivor.version >= boundary.version:
        return True
    return not messages and _passes(survivor, boundary)


def _passes(survivor: Frontier, boundary: StepBoundary) -> bool:
    # In a group without the replacement, it may have to wait as well.
    return all(
        group.over or (name in boundary.groups and Done.from_json(group.done).covers(boundary.groups[name]))
        for name, group in survivor.groups.items()
    )


def _too_late(group: _PlannedGroup, boundaries: Mapping[int, StepBoundary | None]) -> int | None:
    """A replacement that starts after something that others need from it, or None."""
    for seq, bases in group.run(boundaries):
        for rank, base in bases.items():
            if base > seq:
                return rank
    for key, source, destination in group.channels(boundaries):
        boundary = boundaries.get(source)
        if boundary is not None and boundary.sent.get(group.name, {}).get(key, 0) > group.has(
            key, destination, boundaries
        ):
            return source
    return None


def _without_messages(
    group: _PlannedGroup, boundaries: Mapping[int, StepBoundary | None], survivors: Mapping[int, Frontier]
) -> Iterator[int]:
    """Survivors that start again together with a replacement, because they do not keep messages that it needs. Raises
    RecoveryFailed if they cannot: they do not belong together.
    """
    for key, source, destination in group.channels(boundaries):
        has = group.has(key, destination, boundaries)
        if source in group.here and group.here[source].held.get(key, 0) > has:
            if destination in boundaries and destination in survivors[source].together:
                yield source
                continue
            raise RecoveryFailed(
                f"rank {destination} needs message {has} that rank {source} sent it in group {group.name!r}, but "
                f"rank {source} no longer keeps it. All workers start again"
            )


def _redo(group: _PlannedGroup, boundaries: Mapping[int, StepBoundary | None]) -> set[int]:
    """Finished rank-specific collectives to run again. Raises RecoveryFailed if an input was dropped."""
    redo = set()
    for seq, _ in group.run(boundaries):
        for rank, done in group.done.items():
            if seq not in done:
                continue
            if seq not in group.exclusive[rank]:
                raise RecoveryFailed(
                    f"collective {seq} of group {group.name!r} is needed by {_who(group, seq, boundaries)}, but rank "
                    f"{rank}, which has finished it, no longer keeps it. All workers start again"
                )
            redo.add(seq)
    return redo


def _who(group: _PlannedGroup, seq: int, boundaries: Mapping[int, StepBoundary | None]) -> str:
    ranks = [
        rank
        for rank in group.ranks
        if (rank in boundaries and group.base(boundaries[rank]) <= seq)
        or (rank in group.here and seq not in group.done[rank])
    ]
    return "rank " + ", ".join(map(str, ranks))


def _transfers(groups: list[_PlannedGroup], boundaries: Mapping[int, StepBoundary | None]) -> tuple[Transfer, ...]:
    moves: dict[tuple[int, int], dict[str, list[int]]] = {}
    for group in groups:
        holders = {rank: set(here.log) for rank, here in group.here.items()}
        for rank in group.ranks:
            if rank in boundaries:
                base = group.base(boundaries[rank])
                needs = {seq for seq in group.finished if seq >= base}
            elif rank in holders:
                # Also what it has not issued yet but another has finished: it gets the result when it issues it.
                needs = {seq for seq in group.finished - holders[rank] if seq not in group.done[rank]}
            else:
                continue
            for seq in sorted(needs):
                source = min(r for r, log in holders.items() if seq in log)
                moves.setdefault((source, rank), {}).setdefault(group.name, []).append(seq)
    return tuple(Transfer(source, destination, entries) for (source, destination), entries in sorted(moves.items()))


@dataclass(frozen=True)
class Agreed(Record):
    """What was decided for one generation: a plan, or ``failed``, why there is none."""

    plan: Plan | None
    failed: str = ""

    def plan_or_fail(self) -> Plan:
        """Raises RecoveryFailed if there is no plan."""
        if self.plan is None:
            raise RecoveryFailed(self.failed)
        return self.plan

    @classmethod
    def from_json(cls, raw: bytes | str, key: str, world_size: int) -> Agreed:
        """Inverse of :meth:`to_json`; raises DamagedRecord. ``key``: where it was in the store, for the message."""
        found: Agreed = decode(raw, cls, key)
        if (found.plan is None) != bool(found.failed):
            raise damaged(key, "it is not either a plan or why there is none")
        if found.plan is not None and (wrong := _wrong_in(found.plan, world_size)):
            raise damaged(key, wrong)
        return found


def _wrong_in(plan: Plan, world_size: int) -> str:
    """What is wrong in a plan of the right shape; empty if nothing is."""
    if most := [rank for rank in _ranks(plan) if rank >= world_size]:
        return f"plan names rank {max(most)}, and there are {world_size}"
    for boundary in plan.boundaries.values():
        for name, ranks in boundary.members.items() if boundary is not None else ():
            if wrong := wrong_members(ranks, world_size):
                return f"the members of group {name!r} are {wrong}"
    return ""


def _ranks(plan: Plan) -> Iterator[int]:
    yield from (*plan.boundaries, *plan.donors, *plan.donors.values(), *plan.leave)
    for each in plan.transfers:
        yield from (each.source, each.destination)

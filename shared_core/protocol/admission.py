"""How replacements take their places beside survivors that have continued without them. Pure.

All survivors stand at the same place after the same step boundary: at the boundary itself, or with nothing but the step
made since. Nothing is under way, so nothing is replayed: a replacement is a copy of a replica, as it was at the
boundary, with the newest state; of each group and channel it takes over the counts of its peers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from shared_core.errors import RecoveryFailed
from shared_core.protocol.frontier import Done, Frontier, GroupFrontier, StepBoundary
from shared_core.protocol.members import Members, members_of
from shared_core.protocol.plan import Plan, totals


def admit(frontiers: Mapping[int, Frontier], late: Collection[int] = ()) -> Plan:
    """The plan by which replacements join at the step boundary at which all survivors stand.

    Args:
        frontiers: of survivors and of those that are admitted; who stays away has none. A survivor's ``boundaries``
            ends with the step boundary that it has passed last.
        late: ranks that were absent when the generation began. They give their state only if no other can: the others
            may have copied theirs to replacements since.

    Raises:
        RecoveryFailed: if survivors stand at different places, an operation is under way or was made since the
            boundary, or a replacement has no replica.
    """
    survivors = {rank: front for rank, front in sorted(frontiers.items()) if not front.replacement}
    replacements = sorted(rank for rank, front in frontiers.items() if front.replacement)
    if not survivors:
        raise RecoveryFailed("no survivor is left")
    places = {rank: _place(front) for rank, front in survivors.items()}
    if len(set(places.values())) != 1:
        raise RecoveryFailed(
            f"survivors stand at different places (boundary, its version, entry, kind, version): {places}"
        )
    groups = _groups(survivors)
    for name, here in groups.items():
        _check_quiet(name, here)
        _check_unused(name, here, survivors)
    donors: dict[int, int] = {}
    boundaries: dict[int, StepBoundary | None] = {}
    for rank in replacements:
        able = [donor for donor, front in survivors.items() if rank in (front.boundaries[-1].replicas or replacements)]
        if not able:
            raise RecoveryFailed(f"rank {rank} has no replica left that it could copy")
        donors[rank] = min(able, key=lambda donor: (donor in late, donor))
        boundaries[rank] = _boundary(rank, survivors[donors[rank]].boundaries[-1], groups)
    received: dict[str, dict[str, int]] = {}
    for name, here in groups.items():
        ranks = _ranks(here)
        for key, _, receiver in _channels(here):
            boundary = boundaries.get(ranks[receiver])
            if boundary is None and ranks[receiver] not in here:
                continue  # it stays away
            counts = boundary.received.get(name, {}) if boundary is not None else here[ranks[receiver]].received
            received.setdefault(name, {})[key] = counts.get(key, 0)
    return Plan(
        boundaries=boundaries,
        donors=donors,
        transfers=(),
        redo={},
        received=received,
        copies=True,
        **totals(survivors),
    )


def _place(front: Frontier) -> tuple[int, int, int, str, int]:
    if not front.boundaries or front.version not in (front.boundaries[-1].version, front.boundaries[-1].version + 1):
        raise RecoveryFailed(f"rank {front.rank} admits replacements more than a step after a step boundary")
    boundary = front.boundaries[-1]
    return boundary.index, boundary.version, boundary.entry, boundary.kind, front.version


def _groups(survivors: Mapping[int, Frontier]) -> dict[str, dict[int, GroupFrontier]]:
    groups: dict[str, dict[int, GroupFrontier]] = {}
    for rank, front in survivors.items():
        for name, group in front.groups.items():
            groups.setdefault(name, {})[rank] = group
    return groups


def _ranks(here: Mapping[int, GroupFrontier]) -> tuple[int, ...]:
    return members_of(next(iter(here.values())).ranks)


def _check_quiet(name: str, here: Mapping[int, GroupFrontier]) -> None:
    """Raises RecoveryFailed if a collective of the group is under way."""
    issued = {rank: group.next for rank, group in here.items()}
    open_at = [rank for rank, group in here.items() if not Done.from_json(group.done).covers(group.next)]
    if len(set(issued.values())) != 1 or open_at:
        raise RecoveryFailed(
            f"a collective of group {name!r} is under way while a replacement is admitted (issued: {issued}, "
            f"unfinished at ranks {open_at}): wait for what was called with async_op=True before the next batch"
        )


def _check_unused(name: str, here: Mapping[int, GroupFrontier], survivors: Mapping[int, Frontier]) -> None:
    """Raises RecoveryFailed if the group was used since the boundary, from which a replacement continues alone."""
    for rank, group in here.items():
        boundary = survivors[rank].boundaries[-1]
        if group.next != boundary.groups.get(name, 0):
            raise RecoveryFailed(
                f"since the last step boundary, where a replacement begins, rank {rank} has made "
                f"{group.next - boundary.groups.get(name, 0)} collectives in group {name!r}, which need all ranks"
            )


def _channels(here: Mapping[int, GroupFrontier]) -> Iterator[tuple[str, int, int]]:
    """(key, source, destination), ranks within the group, of every channel that a surviving member knows."""
    for key in sorted({key for group in here.values() for key in (*group.sent, *group.received)}):
        source, destination, _ = key.split(",")
        yield key, int(source), int(destination)


def _boundary(rank: int, donor: StepBoundary, groups: Mapping[str, Mapping[int, GroupFrontier]]) -> StepBoundary:
    """The donor's step boundary with the counts of ``rank``'s own groups and channels, which its peers know."""
    counts: dict[str, int] = {}
    sent: dict[str, dict[str, int]] = {}
    received: dict[str, dict[str, int]] = {}
    members: dict[str, Members] = {}
    for name, here in groups.items():
        ranks = _ranks(here)
        if rank not in ranks:
            continue
        members[name] = next(iter(here.values())).ranks
        counts[name] = next(iter(here.values())).next
        for key, source, destination in _channels(here):
            if ranks[source] == rank and ranks[destination] in here:
                sent.setdefault(name, {})[key] = here[ranks[destination]].received.get(key, 0)
            elif ranks[destination] == rank and ranks[source] in here:
                received.setdefault(name, {})[key] = here[ranks[source]].sent.get(key, 0)
    return replace(donor, groups=counts, sent=sent, received=received, members=members, saved=False)

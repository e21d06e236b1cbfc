"""Who recovers how: the plan of one generation, computed alike by every rank from the same frontiers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shared_core.consistency.frontier import Done, Frontier, Top
from shared_core.errors import RecoveryFailed


@dataclass(frozen=True)
class Transfer:
    """Logged results that ``source`` sends to ``destination``: per group, sequence numbers."""

    source: int
    destination: int
    entries: dict[str, list[int]]


@dataclass(frozen=True)
class Plan:
    """What all ranks do in one generation.

    Attributes:
        tops: the top each newcomer starts from; None: from the beginning of the script, with every operation replayed.
        donors: the survivor whose replicated state each newcomer copies.
        transfers: logged results to move, in the order in which they are moved.
        finished: per group, collectives with a result somebody has; nobody runs them again.
        redo: per group, lowest sequence number from which rank-specific collectives are run again, by everyone.
        received: per group and channel, how many messages the receiver has; the sender sends those above again.
    """

    tops: dict[int, Top | None]
    donors: dict[int, int]
    transfers: tuple[Transfer, ...]
    finished: dict[str, set[int]]
    redo: dict[str, int]
    received: dict[str, dict[str, int]] = field(default_factory=dict)

    @property
    def newcomers(self) -> tuple[int, ...]:
        """Ranks that join in this generation."""
        return tuple(sorted(self.tops))


def choose_top(newcomer: Frontier, survivors: Mapping[int, Frontier]) -> tuple[Top | None, int | None]:
    """The newest top from which ``newcomer`` can start, and the survivor that can serve it.

    A top is good if one survivor has finished every collective before it: then nothing before the top is owed to
        anybody, and that survivor
    reaches the top's version by itself. Without any top the newcomer starts from the beginning.

    Raises:
        RecoveryFailed: if the predecessor had published tops and none is good.
    """
    if not newcomer.tops:
        return None, min(survivors) if survivors else None
    for top in reversed(newcomer.tops):
        for rank in sorted(survivors):
            groups = survivors[rank].groups
            if all(
                name not in groups or Done.from_json(groups[name].done).covers(seq) for name, seq in top.groups.items()
            ):
                return top, rank
    raise RecoveryFailed(
        f"rank {newcomer.rank} cannot be rebuilt: no survivor has finished what was before any of its "
        f"{len(newcomer.tops)} "
        "published batch tops. The job goes back to its newest checkpoint."
    )


def decide(frontiers: Mapping[int, Frontier]) -> Plan:
    """The plan for a generation with these frontiers (every rank's, newcomers included).

    Raises:
        RecoveryFailed: if a newcomer cannot be served by anybody.
    """
    survivors = {rank: f for rank, f in frontiers.items() if not f.newcomer}
    newcomers = {rank: f for rank, f in frontiers.items() if f.newcomer}
    if newcomers and not survivors:
        raise RecoveryFailed("no survivor is left; the job goes back to its newest checkpoint")
    tops: dict[int, Top | None] = {}
    donors: dict[int, int] = {}
    for rank, frontier in sorted(newcomers.items()):
        tops[rank], donor = choose_top(frontier, survivors)
        if donor is not None:
            donors[rank] = donor

    members = _members(frontiers)
    for name in {n for top in tops.values() if top is not None for n in top.groups}:
        # The whole job's group is known to everyone; a group that no survivor is in had only lost members.
        members.setdefault(name, ())
    finished: dict[str, set[int]] = {}
    redo: dict[str, int] = {}
    for name, ranks in members.items():
        here = {
            rank: survivors[rank].groups[name] for rank in ranks if rank in survivors and name in survivors[rank].groups
        }
        bases = [_base(tops[rank], name) for rank in ranks if rank in tops]
        floor = min([*bases, *(Done.from_json(g.done).upto for g in here.values())], default=0)
        exclusive = {seq for g in here.values() for seq in g.exclusive}
        done = {seq for g in here.values() for seq in g.log}
        if bases:
            redo[name] = min(bases)
        else:
            # Nobody new is in the group: rank-specific collectives are run again only from the first that some member
            # lacks.
            redo[name] = min((Done.from_json(g.done).upto for g in here.values()), default=0)
        finished[name] = {seq for seq in done - exclusive if seq >= floor}
        for rank in (r for r in ranks if r in tops):
            missing = _unserved(here, _base(tops[rank], name), finished[name], exclusive)
            if missing is not None:
                raise RecoveryFailed(
                    f"rank {rank} needs the result of collective {missing} of group {name!r}, which no survivor "
                    "holds any more. "
                    "The job goes back to its newest checkpoint."
                )
    return Plan(
        tops=tops,
        donors=donors,
        transfers=_transfers(frontiers, members, tops, finished),
        finished=finished,
        redo=redo,
        received=_received(frontiers, members, tops),
    )


def _members(frontiers: Mapping[int, Frontier]) -> dict[str, tuple[int, ...]]:
    members: dict[str, tuple[int, ...]] = {}
    for frontier in frontiers.values():
        for name, group in frontier.groups.items():
            members[name] = group.ranks
    return members


def _base(top: Top | None, name: str) -> int:
    return 0 if top is None else top.groups.get(name, 0)


def _unserved(here: Mapping[int, object], base: int, finished: set[int], exclusive: set[int]) -> int | None:
    """A collective from ``base`` on that every survivor of the group has finished but none holds; None if there is
    none.
    """
    if not here:
        return None
    common: set[int] | None = None
    for group in here.values():
        done = Done.from_json(group.done).above(base)  # type: ignore[attr-defined]
        common = done if common is None else common & done
    for seq in sorted(common or ()):
        if seq not in finished and seq not in exclusive:
            return seq
    return None


def _transfers(
    frontiers: Mapping[int, Frontier],
    members: Mapping[str, tuple[int, ...]],
    tops: Mapping[int, Top | None],
    finished: Mapping[str, set[int]],
) -> tuple[Transfer, ...]:
    moves: dict[tuple[int, int], dict[str, list[int]]] = {}
    for name, ranks in sorted(members.items()):
        holders = {
            r: set(frontiers[r].groups[name].log) for r in ranks if r in frontiers and name in frontiers[r].groups
        }
        for rank in ranks:
            if rank in tops:
                base = _base(tops[rank], name)
                needs = {seq for seq in finished[name] if seq >= base}
            elif rank in holders:
                done = Done.from_json(frontiers[rank].groups[name].done)
                needs = {s for s in finished[name] if s not in done and s < frontiers[rank].groups[name].next}
                # What it has not issued yet but another has finished will be served when it gets there.
                needs |= {s for s in finished[name] if s >= frontiers[rank].groups[name].next}
            else:
                continue
            for seq in sorted(needs):
                source = min(r for r, log in holders.items() if seq in log)
                moves.setdefault((source, rank), {}).setdefault(name, []).append(seq)
    return tuple(Transfer(source, destination, entries) for (source, destination), entries in sorted(moves.items()))


def _received(
    frontiers: Mapping[int, Frontier], members: Mapping[str, tuple[int, ...]], tops: Mapping[int, Top | None]
) -> dict[str, dict[str, int]]:
    out: dict[str, dict[str, int]] = {}
    for name, ranks in members.items():
        channels: dict[str, int] = {}
        keys = {
            key
            for f in frontiers.values()
            if name in f.groups
            for key in (*f.groups[name].sent, *f.groups[name].received)
        }
        for top in (t for t in tops.values() if t is not None):
            keys |= {*top.sent.get(name, {}), *top.received.get(name, {})}
        for key in keys:
            receiver = ranks[int(key.split(",")[1])]
            if receiver in tops:
                start = tops[receiver]
                channels[key] = 0 if start is None else start.received.get(name, {}).get(key, 0)
            elif receiver in frontiers and name in frontiers[receiver].groups:
                channels[key] = frontiers[receiver].groups[name].received.get(key, 0)
        out[name] = channels
    return out

"""How replacements join survivors that have continued without them, for frontiers written down by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shared_core.errors import RecoveryFailed
from shared_core.protocol.admission import admit
from shared_core.protocol.frontier import Frontier, GroupFrontier, StepBoundary
from shared_core.protocol.plan import Agreed, Plan

#: Four ranks: 0 and 2 hold one stage, 1 and 3 another.
STAGES = {0: [0, 2], 1: [1, 3], 2: [0, 2], 3: [1, 3]}


def world(seq: int = 5, **kw: Any) -> GroupFrontier:
    return GroupFrontier("0-3", seq, [seq], [], [], **kw)


def survivor(rank: int, *, index: int = 7, version: int = 6, boundary: int = 6, **groups: GroupFrontier) -> Frontier:
    groups = groups or {"w": world()}
    at = StepBoundary(
        index, boundary, 0, "batch", {name: group.next for name, group in groups.items()}, replicas=STAGES[rank]
    )
    return Frontier(rank, 0, False, version, (at,), groups=groups)


def replacement(rank: int) -> Frontier:
    return Frontier(rank, 1, True, 0, ())


def plan(*frontiers: Frontier) -> Plan:
    """The plan, which must not depend on the order of the frontiers or on who computes it."""
    found = admit({front.rank: front for front in frontiers})
    assert found == admit({f.rank: Frontier.from_json(f.to_json()) for f in reversed(frontiers)})
    assert Agreed.from_json(Agreed(found).to_json(), "plan", 4).plan == found
    return found


def test_a_replacement_is_a_copy_of_a_replica_at_the_others_boundary() -> None:
    found = plan(survivor(0), replacement(1), survivor(2), survivor(3))
    boundary = found.boundaries[1]
    assert boundary is not None and (boundary.index, boundary.version, boundary.groups, boundary.replicas) == (
        7,
        6,
        {"w": 5},
        [1, 3],
    )
    assert found.donors == {1: 3} and found.copies and not found.transfers


def test_the_step_after_the_boundary_may_have_been_made() -> None:
    """The replacement begins at the boundary, where its donor's parameters are newer."""
    found = plan(survivor(0, version=7), replacement(1), survivor(2, version=7), survivor(3, version=7))
    boundary = found.boundaries[1]
    assert boundary is not None and (boundary.index, boundary.version) == (7, 6)


def test_it_counts_only_in_its_own_groups() -> None:
    """A pair that it is in, one that it is not in, and a group whose members are all new."""
    pair = GroupFrontier("1,3", 9, [9], [], [])
    other = GroupFrontier("0,2", 4, [4], [], [])
    found = plan(
        survivor(0, w=world(), other=other),
        replacement(1),
        survivor(2, w=world(), other=other),
        survivor(3, w=world(), pair=pair),
    )
    boundary = found.boundaries[1]
    assert boundary is not None and boundary.groups == {"w": 5, "pair": 9} and boundary.members["pair"] == "1,3"


def test_channels_continue_where_the_peers_are() -> None:
    """What was sent to the failed worker is not sent again, what the failed worker sent is not awaited again."""
    found = plan(
        survivor(0, w=world(sent={"0,1,0": 8, "0,2,0": 3}, received={"1,0,0": 6})),
        replacement(1),
        survivor(2, w=world(received={"0,2,0": 2})),
        survivor(3),
    )
    boundary = found.boundaries[1]
    assert boundary is not None and boundary.received == {"w": {"0,1,0": 8}} and boundary.sent == {"w": {"1,0,0": 6}}
    assert found.received["w"] == {"0,1,0": 8, "0,2,0": 2, "1,0,0": 6}


def test_two_replacements_have_donors_of_their_own() -> None:
    assert plan(replacement(0), replacement(1), survivor(2), survivor(3)).donors == {0: 2, 1: 3}


@pytest.mark.parametrize(
    ("frontiers", "message"),
    [
        ([replacement(0), survivor(1), replacement(2), survivor(3)], "rank 0 has no replica left"),
        ([survivor(0), replacement(1), survivor(2), survivor(3, index=8)], "survivors stand at different places"),
        ([survivor(0), replacement(1), survivor(2), survivor(3, version=7)], "survivors stand at different places"),
        (
            [survivor(0), replacement(1), survivor(2), survivor(3, version=8)],
            "rank 3 admits replacements more than a step",
        ),
        (
            [
                replace(front, groups={"w": world(7)}) if not front.replacement else front
                for front in (survivor(0), replacement(1), survivor(2), survivor(3))
            ],
            "since the last step boundary, where a replacement begins, rank 0 has made 2 collectives in group 'w'",
        ),
        ([survivor(0), replacement(1), survivor(2), survivor(3, w=world(6))], "a collective of group 'w' is under way"),
        (
            [survivor(0), replacement(1), survivor(2), survivor(3, w=replace(world(), done=[4]))],
            r"under way while a replacement is admitted .*unfinished at ranks \[3\]",
        ),
        ([replacement(0), replacement(1)], "no survivor is left"),
    ],
)
def test_what_cannot_be(frontiers: list[Frontier], message: str) -> None:
    with pytest.raises(RecoveryFailed, match=message):
        plan(*frontiers)

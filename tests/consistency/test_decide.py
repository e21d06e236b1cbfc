"""Who recovers how, case by case: what a plan must say for frontiers written down by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shared_core.errors import RecoveryFailed
from shared_core.protocol.frontier import Frontier, GroupFrontier, StepBoundary
from shared_core.protocol.plan import Agreed, Plan, Transfer, decide


def boundary(index: int, version: int = 0, sent: int = 0, received: int = 0, **groups: int) -> StepBoundary:
    """A step boundary of a job of two or three ranks; messages go from rank 0 to rank 1."""
    return StepBoundary(
        index,
        version,
        0,
        "batch",
        groups or {"w": 0},
        {"w": {"0,1,0": received}} if received else {},
        {"w": {"0,1,0": sent}} if sent else {},
        dict.fromkeys(groups or {"w": 0}, "0-2"),
    )


def group(done: int, log: Any = (), exclusive: Any = (), after: int | None = None, extra: Any = (), **kw: Any) -> Any:
    """A group of three as a survivor knows it, with everything below ``done`` finished."""
    following = max([done, *(n + 1 for n in extra)]) if after is None else after
    return GroupFrontier("0-2", following, [done, *extra], list(log), list(exclusive), **kw)


def survivor(rank: int, version: int = 0, **groups: GroupFrontier) -> Frontier:
    return Frontier(rank, 0, False, version, (), groups=groups)


def replacement(rank: int, *boundaries: StepBoundary) -> Frontier:
    return Frontier(rank, 1, True, 0, boundaries)


def plan(*frontiers: Frontier) -> Plan:
    """The plan, which must not depend on the order of the frontiers or on who computes it."""
    found = decide({front.rank: front for front in frontiers})
    again = decide({f.rank: Frontier.from_json(f.to_json()) for f in reversed(frontiers)})
    assert found == again
    assert Agreed.from_json(Agreed(found).to_json(), "plan", 3).plan == found
    return found


def test_without_replacements_only_what_is_behind_is_moved() -> None:
    found = plan(
        survivor(0, w=group(5, log=[3, 4])), survivor(1, w=group(4, log=[3], after=5)), survivor(2, w=group(5, log=[4]))
    )
    assert found.boundaries == {} and found.donors == {} and found.redo == {}
    assert found.transfers == (Transfer(0, 1, {"w": [4]}),)


def test_the_newest_boundary_is_taken_and_its_batch_replayed() -> None:
    boundaries = (boundary(1, 0, w=2), boundary(2, 1, w=4))
    found = plan(
        replacement(0, *boundaries), survivor(1, 1, w=group(6, log=range(2, 6))), survivor(2, 1, w=group(5, log=[4]))
    )
    assert found.boundaries == {0: boundaries[1]} and found.donors == {0: 1}
    assert found.transfers == (Transfer(1, 0, {"w": [4, 5]}), Transfer(1, 2, {"w": [5]}))


def test_a_donor_that_is_already_there_is_preferred() -> None:
    late = survivor(1, 1, w=group(4, log=[3]))
    there = survivor(2, 2, w=group(4, log=[3]))
    assert plan(replacement(0, boundary(2, 2, w=4)), late, there).donors == {0: 2}


def test_a_shard_of_its_own_needs_no_donor() -> None:
    """Although no survivor gets to its version by itself, and none is a replica."""
    at = replace(boundary(2, 5, w=4), own=True)
    found = plan(replacement(0, at), *(survivor(rank, 4, w=group(5, exclusive=[4])) for rank in (1, 2)))
    assert found.boundaries == {0: at} and found.donors == {} and found.redo == {"w": {4}}


def test_a_donor_that_still_waits_for_messages_is_none() -> None:
    older, newer = boundary(1, 0, w=4), boundary(2, 1, w=4)
    reads = survivor(1, 0, w=group(4, received={"2,1,0": 3}, sent={}))
    assert plan(replacement(0, older, newer), survivor(2, 0, w=group(4)), reads).boundaries == {0: older}
    quiet = survivor(1, 0, w=group(4))
    assert plan(replacement(0, older, newer), survivor(2, 0, w=group(4)), quiet).boundaries == {0: newer}


def test_a_root_that_ran_ahead_goes_back_to_where_the_others_are() -> None:
    """Rank 0 had broadcast 3 and continued to its next boundary; nobody else has received it."""
    boundaries = (boundary(1, 0, w=2), boundary(2, 0, w=4))
    found = plan(
        replacement(0, *boundaries),
        survivor(1, w=group(3, log=[2], after=4)),
        survivor(2, w=group(3, log=[2], after=4)),
    )
    assert found.boundaries == {0: boundaries[0]}
    assert found.transfers == (Transfer(1, 0, {"w": [2]}),)


def test_a_root_that_failed_at_its_first_boundary_starts_from_the_beginning() -> None:
    behind = group(1, log=[0], after=2)
    found = plan(replacement(0, boundary(1, 0, w=2)), survivor(1, w=behind), survivor(2, w=behind))
    assert found.boundaries == {0: None} and found.transfers == (Transfer(1, 0, {"w": [0]}),)


def test_rank_specific_operations_are_run_again_by_all() -> None:
    done = group(6, log=[4], exclusive=[3, 5])
    found = plan(replacement(0, boundary(1, 0, w=3)), survivor(1, w=done), survivor(2, w=done))
    assert found.redo == {"w": {3, 5}} and found.transfers == (Transfer(1, 0, {"w": [4]}),)


def test_rank_specific_operations_that_all_have_are_left_alone() -> None:
    done = group(6, log=[4], exclusive=[3, 5])
    behind = group(5, log=[4], exclusive=[3], after=6)
    assert plan(survivor(0, w=done), survivor(1, w=done), survivor(2, w=behind)).redo == {"w": {5}}


def test_two_replacements_start_where_both_can_take_part() -> None:
    """Rank 1 starts two operations later than rank 0; the rank-specific one between needs both."""
    done = group(6, log=[5], exclusive=[3, 4])
    early, late = boundary(1, 0, w=3), boundary(2, 0, w=5)
    found = plan(replacement(0, early), replacement(1, early, late), survivor(2, w=done))
    assert found.boundaries == {0: early, 1: early} and found.redo == {"w": {3, 4}}
    with pytest.raises(RecoveryFailed, match="is needed by rank 0, 1, but rank 2, which has finished it"):
        # Rank 1 has no older boundary, and the beginning's operations are no longer held.
        plan(replacement(0, early), replacement(1, late), survivor(2, w=group(3)))


def test_two_replacements_with_only_replicated_results_between_keep_their_boundaries() -> None:
    early, late = boundary(1, 0, w=3), boundary(2, 0, w=5)
    found = plan(replacement(0, early), replacement(1, early, late), survivor(2, w=group(5, log=[3, 4])))
    assert found.boundaries == {0: early, 1: late}


def test_a_message_lost_with_its_sender_is_sent_again_from_an_older_boundary() -> None:
    older, newer = boundary(1, 0, sent=1, w=2), boundary(2, 0, sent=3, w=2)
    got = group(2, received={"0,1,0": 2})
    found = plan(replacement(0, older, newer), survivor(1, w=got), survivor(2, w=group(2)))
    assert found.boundaries == {0: older} and found.received["w"] == {"0,1,0": 2}
    got_all = group(2, received={"0,1,0": 3})
    assert plan(replacement(0, older, newer), survivor(1, w=got_all), survivor(2, w=group(2))).boundaries == {0: newer}


def test_a_message_that_nobody_keeps_ends_the_recovery() -> None:
    sender = group(2, sent={"0,1,0": 5}, held={"0,1,0": 4})
    receiver = replacement(1, boundary(1, 0, received=3, w=2))
    with pytest.raises(RecoveryFailed, match="rank 1 needs message 3 that rank 0 sent it"):
        plan(survivor(0, w=sender), receiver, survivor(2, w=group(2)))


def test_a_dropped_result_ends_the_recovery_and_is_named() -> None:
    with pytest.raises(RecoveryFailed, match="collective 2 of group 'w' is needed by rank 0, but rank 1"):
        plan(replacement(0, boundary(1, 0, w=2)), survivor(1, w=group(4, log=[3])), survivor(2, w=group(4, log=[3])))


def test_a_group_whose_members_are_all_failed() -> None:
    """Nobody left knows who was in it but their boundaries."""
    early, late = (
        StepBoundary(
            n,
            0,
            0,
            "batch",
            {"w": 2, "sub": at},
            {"sub": {"0,1,0": at}},
            {"sub": {"0,1,0": at}},
            {"w": "0-2", "sub": "0,1"},
        )
        for n, at in ((1, 3), (2, 5))
    )
    found = plan(replacement(0, early, late), replacement(1, early), survivor(2, w=group(2)))
    assert found.boundaries == {0: early, 1: early}


def test_nobody_left() -> None:
    with pytest.raises(RecoveryFailed, match="no survivor is left"):
        plan(replacement(0), replacement(1))


def test_only_a_replica_of_the_stage_is_a_donor() -> None:
    mine = replace(boundary(2, 1, w=4), replicas=[0, 2])
    frontiers = survivor(1, 2, w=group(4)), survivor(2, 1, w=group(4))
    assert plan(replacement(0, mine), *frontiers).donors == {0: 2}
    alone = replace(mine, replicas=[0])
    with pytest.raises(RecoveryFailed, match="rank 0 cannot be rebuilt|no longer keeps it"):
        plan(replacement(0, alone), *frontiers)


def test_without_a_replica_the_newest_checkpoint_serves_and_needs_no_donor() -> None:
    saved = [replace(boundary(n, n - 1, w=n), replicas=[0], saved=True) for n in (3, 6)]
    newer = replace(boundary(8, 7, w=8), replicas=[0])
    frontiers = survivor(1, 8, w=group(9, log=range(3, 9))), survivor(2, 7, w=group(9, log=[8]))
    found = plan(replacement(0, *saved, newer), *frontiers)
    assert found.boundaries == {0: saved[1]} and found.donors == {}
    assert found.transfers == (Transfer(1, 0, {"w": [6, 7, 8]}),)


def test_what_was_published_at_the_end_of_a_call_needs_no_donor() -> None:
    """The others are in the next call already, where they train something else."""
    ended = replace(boundary(3, 2, w=4), kind="end", replicas=[0])
    found = plan(replacement(0, boundary(2, 1, w=2), ended), survivor(1, w=group(5, log=[4])), survivor(2, w=group(5)))
    assert found.boundaries == {0: ended} and found.donors == {}


def test_the_older_checkpoint_serves_where_a_message_of_the_newer_is_lost_with_its_sender() -> None:
    older, newer = (replace(boundary(n, n, sent=n, w=2), replicas=[0], saved=True) for n in (3, 6))
    found = plan(
        replacement(0, older, newer), survivor(1, 6, w=group(2, received={"0,1,0": 5})), survivor(2, w=group(2))
    )
    assert found.boundaries == {0: older}


def test_who_shares_a_group_with_a_replacement_starts_again_with_it() -> None:
    saved = replace(boundary(3, 2, received=3, w=2), replicas=[1], saved=True)
    sender = group(2, sent={"0,1,0": 9}, held={"0,1,0": 8})
    others = replacement(1, saved), survivor(2, w=group(2))
    found = plan(replace(survivor(0, w=sender), together=[0, 1]), *others)
    assert found.leave == {0} and found.boundaries == {1: saved}
    with pytest.raises(RecoveryFailed, match="rank 1 needs message 3 that rank 0 sent it"):
        plan(replace(survivor(0, w=sender), together=[0]), *others)

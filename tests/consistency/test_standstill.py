"""Ranks that wait for each other are told from ranks that wait for one that computes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shared_core.protocol.standstill import ANY_SOURCE, STUCK_S, WaitStatus, awaited, describe, lasts, left_s, stuck

WORLD = {"group": "0", "called": "the default group", "members": (0, 1, 2)}
SIDE = {"group": "1", "called": "group '1' of ranks 0, 1", "members": (0, 1)}


def at(rank: int, call: str, number: int, group: dict[str, Any], **fields: Any) -> WaitStatus:
    """A rank that waits in its newest collective, and has made all those before."""
    issued = {"0": 12, "1": 3} | {group["group"]: number + 1}
    pending = {group["group"]: {str(number): call}}
    return WaitStatus(rank, 1, 7, call=call, number=number, **group, **{"issued": issued, "pending": pending} | fields)


def all_of(*statuses: WaitStatus) -> dict[int, WaitStatus]:
    return {each.rank: each for each in statuses}


def test_ranks_in_different_groups_stand_still() -> None:
    found = all_of(
        at(0, "all_reduce(float32[4])", 12, WORLD),
        at(1, "barrier()", 3, SIDE),
        at(2, "all_reduce(float32[4])", 12, WORLD),
    )
    assert stuck(found) == {0: (1,), 1: (0,), 2: (1,)}
    assert describe(found, stuck(found)) == (
        "ranks 0, 2 wait for rank 1 in all_reduce(float32[4]) (#12 of the default group); "
        "rank 1 waits for rank 0 in barrier() (#3 of group '1' of ranks 0, 1)"
    )


def test_a_rank_that_computes_holds_nobody_up_for_ever() -> None:
    found = all_of(at(0, "barrier()", 12, WORLD), at(2, "barrier()", 12, WORLD))
    assert stuck(found) == {}
    assert awaited(found[2], found) == (1,)


def test_who_waits_for_one_that_waits_for_one_that_computes_is_free() -> None:
    behind = at(1, "barrier()", 3, SIDE | {"members": (1, 3)})
    assert stuck(all_of(at(0, "barrier()", 12, WORLD), behind, at(2, "barrier()", 12, WORLD))) == {}


def test_a_collective_that_all_are_in_is_under_way() -> None:
    found = all_of(*(at(rank, "broadcast(float32[4])", 12, WORLD) for rank in range(3)))
    assert stuck(found) == {} and awaited(found[0], found) == ()


def test_a_broadcast_that_its_root_has_left_is_under_way() -> None:
    root = at(0, "barrier()", 13, WORLD)
    found = all_of(root, *(at(rank, "broadcast(float32[4])", 12, WORLD) for rank in (1, 2)))
    assert stuck(found) == {}, "the root waits for the others, which wait for nobody"


def test_other_calls_at_the_same_place_stand_still() -> None:
    found = all_of(*(at(rank, call, 12, WORLD) for rank, call in enumerate(["barrier()", "gather(float32[4])"])))
    assert stuck(found) == {0: (1,), 1: (0,)}
    shapes = all_of(*(at(rank, f"all_reduce(float32[{rank}])", 12, WORLD) for rank in range(2)))
    assert stuck(shapes) == {0: (1,), 1: (0,)}
    pieces = all_of(*(at(rank, f"gather(float32[{rank}])", 12, WORLD) for rank in range(2)))
    assert stuck(pieces) == {}


def test_a_message_is_waited_for_until_it_is_sent() -> None:
    waits = at(1, "recv", 5, WORLD, channel="0,1,0", source=0)
    for sent, held in ((5, True), (6, False)):
        sender = at(0, "barrier()", 12, WORLD, sent={"0": {"0,1,0": sent}})
        assert (1 in stuck(all_of(sender, waits))) is held
    assert waits.where == "recv (message 5 from rank 0 in the default group)"


def test_a_message_from_any_rank_is_waited_for_while_one_of_them_may_send() -> None:
    waits = at(1, "recv", 5, WORLD, channel="-1,1,0", source=ANY_SOURCE)
    peers = at(0, "barrier()", 12, WORLD), at(2, "barrier()", 12, WORLD)
    assert stuck(all_of(peers[0], waits)) == {}, "rank 2 may be computing"
    assert awaited(waits, all_of(waits)) == (0, 2)
    assert stuck(all_of(*peers, waits)) == {0: (1,), 1: (0, 2), 2: (1,)}
    assert waits.where == "recv (message 5 from any rank in the default group)"


def test_a_program_that_has_ended_comes_no_more() -> None:
    found = all_of(at(0, "barrier()", 12, WORLD), WaitStatus(1, 0, 3, issued={"0": 12}))
    assert stuck(found) == {0: (1,)}
    assert describe(found, stuck(found)).endswith(", though the program of rank 1 has ended")
    done = all_of(at(0, "broadcast(float32[4])", 11, WORLD), WaitStatus(1, 0, 3, issued={"0": 12}))
    assert stuck(done) == {}, "it has taken part in that one"


def test_a_wait_outside_of_the_programs_groups_is_free() -> None:
    outside = WaitStatus(1, 1, 7, call="a message of the training step", members=(0,))
    assert stuck(all_of(at(0, "barrier()", 12, WORLD), outside)) == {}
    assert awaited(outside, {}) == (0,)


def test_a_report_travels_as_json() -> None:
    one = at(1, "recv", 5, WORLD, channel="0,1,0", source=0, sent={"0": {"0,1,0": 2}})
    assert WaitStatus.from_json(one.to_json()) == one


def _waiting(look: int, waited_s: float, *, idle: bool = True) -> dict[int, WaitStatus]:
    one, two = at(0, "barrier()", 12, WORLD | {"members": (0, 1)}), at(1, "barrier()", 3, SIDE)
    return all_of(*(replace(each, look=look, waited_s=waited_s, idle=idle) for each in (one, two)))


def test_a_deadlock_is_seen_in_two_looks_of_each() -> None:
    now = _waiting(9, 6.0)
    assert lasts(stuck(now), _waiting(7, 5.0), now)
    assert not lasts(stuck(now), _waiting(8, 5.5), now), "one of them may have waited in between"
    assert not lasts(stuck(now), {0: now[0]}, now)
    assert not lasts({}, now, now)


def test_a_deadlock_of_ranks_that_do_nothing_else_ends_soon() -> None:
    late = _waiting(9, 2.0) | {0: _waiting(9, 100.0)[0]}
    assert left_s(stuck(late), late, 1800.0) == STUCK_S - 2.0, "it began when the last of them came"
    busy = _waiting(9, 100.0, idle=False)
    assert left_s(stuck(busy), busy, 1800.0) == 1700.0
    short = _waiting(9, 2.0)
    assert left_s(stuck(short), short, 4.0) == 2.0

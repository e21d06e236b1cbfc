"""Sets of finished operations, and frontiers as JSON."""

from __future__ import annotations

import json
import random

from shared_core.protocol.frontier import Done, Frontier, GroupFrontier, StepBoundary


def test_done_is_a_set_of_numbers() -> None:
    for seed in range(20):
        rng = random.Random(seed)
        numbers = list(range(60))
        rng.shuffle(numbers)
        done, expected = Done(), set[int]()
        for number in numbers[:45]:
            done.add(number)
            done.add(rng.choice(numbers[:5]) if rng.random() < 0.2 else number)  # again, in any order, changes nothing
            expected |= {number, *(n for n in numbers[:5] if n in done)}
            assert [n for n in range(60) if n in done] == sorted(expected)
            for floor in (0, 10, 50):
                assert done.covers(floor) == all(n in expected for n in range(floor))
            copy = Done.from_json(json.loads(json.dumps(done.to_json())))
            assert (copy.upto, copy.extra) == (done.upto, done.extra)
        assert done.upto == next(n for n in range(61) if n not in expected)
        assert all(n > done.upto for n in done.extra), "what is in order is not kept one by one"


def test_a_frontier_survives_json() -> None:
    boundary = StepBoundary(4, 3, 1, "batch", {"0": 7}, {"0": {"1,0,5": 2}}, {"0": {"0,1,5": 3}}, {"0": "0,1"})
    group = GroupFrontier("0,1", 9, [7, 8], [5, 6], [8], {"1,0,5": 2}, {"0,1,5": 3}, {"0,1,5": 1})
    for frontier in (
        Frontier(1, 2, True, 0, (boundary,)),
        Frontier(0, 0, False, 3, (), groups={"0": group}),
        Frontier(0, 0, False, 0, ()),
    ):
        assert Frontier.from_json(frontier.to_json()) == frontier

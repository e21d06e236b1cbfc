"""Members of groups as a short text."""

from __future__ import annotations

import random

import pytest

from shared_core.protocol.codec import decode
from shared_core.protocol.members import Members, members_of, members_text, wrong_members


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        (range(4096), "0-4095"),
        (range(3, 4096, 8), "3-4091:8"),
        ((7,), "7"),
        ((0, 1), "0,1"),
        ((2, 1, 0), "2,1,0"),
        ((0, 1, 2, 8, 9, 10), "0-2,8-10"),
        ((0, 4, 5, 6), "0,4-6"),
    ],
)
def test_regular_groups_are_short(ranks: tuple[int, ...], text: str) -> None:
    assert members_text(ranks) == text and members_of(text) == tuple(ranks)


def test_any_order_comes_back() -> None:
    rng = random.Random(1)
    for size in range(1, 60):
        ranks = tuple(rng.sample(range(rng.choice((size, 2 * size, 5000))), size))
        text = decode(f'"{members_text(ranks)}"', Members, "members")
        assert members_of(text) == ranks and not wrong_members(text, 5000)


@pytest.mark.parametrize("text", ["0-4", "0-999999999", "3-1", "0-3:0", "0-3:00", "0,0", "1,0-2", "0-3,0-3"])
def test_what_cannot_be_members_of_four_is_refused(text: str) -> None:
    assert wrong_members(decode(f'"{text}"', Members, "members"), 4)

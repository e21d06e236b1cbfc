"""Checksums of tensors: what they see, and that neither place in memory nor cutting changes them."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from shared_core.worker.state.checksums import BLOCK, RunningSums, checksum, parts

#: Three blocks of 64 times 64 words, and some bytes more.
WORDS = 3 * BLOCK // 8 + 5


def words() -> torch.Tensor:
    return torch.randint(-(1 << 62), 1 << 62, (WORDS,), generator=torch.Generator().manual_seed(1))


def swapped(first: slice, second: slice) -> Callable[[torch.Tensor], None]:
    def change(data: torch.Tensor) -> None:
        kept = data[first].clone()
        data[first] = data[second]
        data[second] = kept

    return change


BLOCK_WORDS = BLOCK // 8
CHANGES: dict[str, Callable[[torch.Tensor], None]] = {
    "neighbours in a row": swapped(slice(70, 71), slice(71, 72)),
    "words of a column": swapped(slice(70, 71), slice(134, 135)),
    "rows of a block": swapped(slice(64, 128), slice(640, 704)),
    "rows of two blocks": swapped(slice(64, 128), slice(BLOCK_WORDS + 64, BLOCK_WORDS + 128)),
    "blocks": swapped(slice(0, BLOCK_WORDS), slice(2 * BLOCK_WORDS, 3 * BLOCK_WORDS)),
    "words after the last block": swapped(slice(WORDS - 2, WORDS - 1), slice(WORDS - 1, WORDS)),
    "from one word to the next": lambda data: data[5:7].add_(torch.tensor([1, -1])),
    "from one row to the next": lambda data: data[5:70:64].add_(torch.tensor([1, -1])),
    "one place further": lambda data: data.copy_(data.roll(1)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_order_counts(name: str) -> None:
    data = words()
    before = checksum(data)
    CHANGES[name](data)
    assert checksum(data) != before


def test_floats_that_differ_in_high_bits_only_do_not_swap_unseen() -> None:
    data = torch.zeros(WORDS)
    data[1], data[129] = 1.0, 2.0
    before = checksum(data)
    data[1], data[129] = 2.0, 1.0
    assert checksum(data) != before


def test_every_bit_counts() -> None:
    data, rng = words(), random.Random(3)
    before = checksum(data)
    places = [0, WORDS - 1, BLOCK_WORDS - 1, BLOCK_WORDS, *(rng.randrange(WORDS) for _ in range(60))]
    for at, bit in [(each, rng.randrange(63)) for each in places] + [(7, bit) for bit in range(63)]:
        data[at] ^= 1 << bit
        assert checksum(data) != before, (at, bit)
        data[at] ^= 1 << bit
    assert checksum(data) == before


def test_only_values_count() -> None:
    data = torch.randn(WORDS)
    elsewhere = torch.empty(WORDS + 1)[1:].copy_(data)  # no multiple of eight bytes into its storage
    assert checksum(elsewhere) == checksum(data)
    matrix = torch.randn(200, 300)
    assert checksum(matrix.t().contiguous().t()) == checksum(matrix), "however it lies in memory"
    assert len({checksum(torch.zeros(count)) for count in (0, 1, 2, BLOCK // 4, BLOCK // 2)}) == 5
    assert checksum(torch.tensor(1.0)) != checksum(torch.tensor(2.0))


def test_parts_are_about_equal_and_leave_nothing_out() -> None:
    rng = random.Random(5)
    for _ in range(200):
        sizes = [
            rng.choice([0, 4, 100, BLOCK, BLOCK + 1, rng.randrange(1, 40 * BLOCK)]) for _ in range(rng.randrange(9))
        ]
        found = parts(sizes, least=BLOCK)
        covered = [(each.tensor, each.start, each.stop) for part in found for each in part]
        for place, size in enumerate(sizes):
            ends = [0, *(stop for tensor, _, stop in covered if tensor == place)]
            assert ends[-1] == size and [start for tensor, start, _ in covered if tensor == place] == ends[:-1]
        assert len(found) <= 8
        assert max(sum(each.size for each in part) for part in found) < max(2 * BLOCK, sum(sizes) / 8) + BLOCK + 1
    assert len(parts([1 << 20] * 3)) == 1, "a small state is summed at once"


def test_sums_made_part_by_part_are_those_of_the_whole() -> None:
    tensors = [torch.randn(size) for size in (3_000_000, 5, 0, 900_001)]
    running = RunningSums([each.nbytes for each in tensors])
    calls = 0
    while running.complete is None:
        running.add_part(tensors)
        calls += 1
    assert running.complete == [checksum(each) for each in tensors] and calls > 2

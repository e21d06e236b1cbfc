"""Sums in the order of gloo's all-reduce have the bits of gloo's own."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
from torch import Tensor
from torch.distributed import HashStore, ProcessGroupGloo

from shared_core.reroute.summing import add_as_gloo

#: Sizes around one segment of a megabyte for each rank, and several.
LONG = 1 << 18


def by_gloo(tensors: list[Tensor], store: HashStore) -> list[Tensor]:
    """The sum at each rank; the ranks are threads."""

    def rank(number: int) -> Tensor:
        group = ProcessGroupGloo(store, number, len(tensors), timedelta(seconds=60))
        total = tensors[number].clone()
        group.allreduce([total]).wait()
        return total

    with ThreadPoolExecutor(len(tensors)) as pool:
        return list(pool.map(rank, range(len(tensors))))


@pytest.mark.nightly
def test_it_is_a_ring() -> None:
    ranks = 3
    draw = random.Random(ranks)
    edges = [LONG * ranks, 2 * LONG * ranks - 1, 2 * LONG * ranks, 2 * LONG * ranks + 1]
    for size in [*range(1, 20), *edges, *(draw.randrange(20, 4000) for _ in range(20))]:
        for dtype in (torch.float32, torch.bfloat16):
            held = [torch.randn(size, generator=torch.Generator().manual_seed(r)).to(dtype) for r in range(ranks)]
            cut = size // 3  # a worker may sum any part
            head, tail = [each[:cut] for each in held], [each[cut:] for each in held]
            ours = torch.cat([add_as_gloo(head, 0, size), add_as_gloo(tail, cut, size)])
            for theirs in by_gloo(held, HashStore()):
                assert torch.equal(ours, theirs), (size, dtype)

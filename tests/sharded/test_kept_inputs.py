"""What a sharded job keeps of its operations: each input once, and only while it is needed."""

from __future__ import annotations

import weakref
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from harness import Jobs

from shared_core.worker.comm.compat import ProcessGroupGloo
from shared_core.worker.comm.results import KeptInputs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [0, 1, 7, 100_000])
def test_the_same_bits_are_kept_once(size: int, dtype: torch.dtype) -> None:
    inputs, tensor = KeptInputs(), torch.randn(size, dtype=dtype)
    first, new = inputs.keep(tensor)
    again, also_new = inputs.keep(tensor.clone())
    assert again is first and new and not also_new
    assert torch.equal(first, tensor) and (size == 0 or first.data_ptr() != tensor.data_ptr())


@pytest.mark.parametrize("place", [0, 12_345, 99_999])
def test_other_bits_are_kept_apart(place: int) -> None:
    """Also where a checksum of a sample does not see the difference, and where the values are equal."""
    inputs, tensor = KeptInputs(), torch.zeros(100_000)
    first, _ = inputs.keep(tensor)
    tensor[place] = -0.0
    second, new = inputs.keep(tensor)
    assert new and torch.signbit(second[place]) and not torch.signbit(first[place])


def test_nothing_is_kept_that_nobody_holds() -> None:
    inputs = KeptInputs()
    kept = weakref.ref(inputs.keep(torch.ones(10))[0])
    assert kept() is None


def test_gloo_leaves_the_input_of_a_reduction_as_it_is() -> None:
    """It is kept, without a copy, for when the reduction runs again."""
    store, timeout = dist.HashStore(), timedelta(seconds=30)
    with ThreadPoolExecutor(2) as pool:
        groups = list(pool.map(lambda rank: ProcessGroupGloo(store, rank, 2, timeout), range(2)))
    inputs = [torch.randn(1 << 16) for _ in groups]
    before, outputs = [each.clone() for each in inputs], [torch.empty(1 << 15) for _ in groups]
    works = [
        group._reduce_scatter_base(out, each, dist.ReduceScatterOptions())
        for group, out, each in zip(groups, outputs, inputs, strict=True)
    ]
    for work in works:
        work.wait()
    assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True))
    assert torch.equal(torch.cat(outputs), inputs[0] + inputs[1])


@pytest.mark.nightly
def test_what_was_gathered_is_let_go_of(jobs: Jobs) -> None:
    """The log knows how to gather again, and keeps nothing else: forty evaluations hold one shard."""
    result = jobs.run("gathers.py")
    assert result.status == 0, result.tail()
    grown = [report["extra"]["grown"] for report in result.reports.values()]
    assert len(grown) == 2 and max(grown) < 20, grown  # in whole models

"""The log of a group: dropped by step boundary, spilled to disk and read back, buffers used again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from shared_core.worker.comm.op import input_checksum, signature
from shared_core.worker.messages.group_log import BufferPool, GroupLog, LogEntry


def entry(
    value: float, boundary: int, size: int = 8, dtype: torch.dtype = torch.float32, pool: BufferPool | None = None
) -> LogEntry:
    like = torch.full((size,), value, dtype=dtype)
    results = [pool.take(like)] if pool is not None else [like]
    results[0].copy_(like)
    return LogEntry(signature("all_reduce", results), boundary, results, pooled=pool is not None)


def test_entries_go_with_their_step_boundary_and_buffers_come_back() -> None:
    pool = BufferPool()
    log = GroupLog(pool)
    for seq in range(6):
        log.put(seq, entry(seq, boundary=seq // 2, pool=pool))
    first = log.entries[0].results[0].data_ptr()  # type: ignore[index]
    assert log.nbytes == 6 * 32
    log.drop_before(1)
    assert sorted(log.entries) == [2, 3, 4, 5] and log.nbytes == 4 * 32
    taken = {pool.take(torch.empty(2, 4)).data_ptr() for _ in range(2)}
    assert first in taken, "a buffer serves any shape of its size"
    assert pool.take(torch.empty(8, dtype=torch.float64)).dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_spilled_results_come_back_bit_for_bit(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    pool = BufferPool()
    log = GroupLog(pool)
    for seq in range(5):
        log.put(seq, entry(seq, boundary=seq, dtype=dtype, pool=pool if seq % 2 else None))
    log.put(5, LogEntry(signature("all_gather", []), 5, [torch.randn(3, 2), torch.empty(0, 4)]))
    expected = {seq: [t.clone() for t in log.results(seq)] for seq in range(6)}
    kept = log.entries[5].nbytes + log.entries[4].nbytes
    assert log.spill(kept) == sum(log.entries[0].nbytes or t.numel() * t.element_size() for t in expected[0]) * 4
    assert log.nbytes == kept, "the oldest go first, and no more than must"
    assert not list(tmp_path.iterdir()), "the file has no name, so that it cannot be left behind"
    for _ in range(2):
        for seq, tensors in expected.items():
            for got, want in zip(log.results(seq), tensors, strict=True):
                assert got.dtype == want.dtype and torch.equal(got, want)
    log.spill(0)
    assert log.nbytes == 0
    assert torch.equal(log.results(5)[0], expected[5][0]) and log.results(5)[1].shape == (0, 4)
    log.drop_before(6)
    assert not log.entries and on_disk(tmp_path) == (0, 0)


def on_disk(folder: Path) -> tuple[int, int]:
    """How many files without a name this process has open in a folder, and the bytes that they take there."""
    links = [path for path in Path("/proc/self/fd").iterdir() if os.path.islink(path)]
    found = [os.stat(path) for path in links if os.readlink(path).startswith(str(folder))]
    return len(found), sum(each.st_blocks * 512 for each in found)


def test_input_checksums_see_shape_order_and_every_element_of_small_inputs() -> None:
    x = torch.randn(300)
    base = input_checksum([x])
    for place in (0, 150, 299):
        y = x.clone()
        y[place] += 1
        assert input_checksum([y]) != base
    assert input_checksum([x[:100], x[100:]]) == base, "only the bytes count; shapes are compared apart"
    assert input_checksum([x.flip(0)]) != base
    assert input_checksum([]) and input_checksum([torch.empty(0)])
    large = torch.randn(10_000)
    other = large.clone()
    other *= 1.0001
    assert input_checksum([large]) != input_checksum([other])
    assert input_checksum([torch.randn(4, 4).t()]) and input_checksum([torch.tensor([True])])

"""How the ranks share ``log.budget_bytes``, and what a log does that has used its part."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from archives import flush
from harness import until

from shared_core.worker.messages import log_budget
from shared_core.worker.messages.archive import Archive, Key
from shared_core.worker.messages.log_budget import Advice


def test_leases_never_exceed_the_budget() -> None:
    """Ranks that log and drop as they like pass step boundaries at their own pace: one is at most waiting for the next
    collective while others have not yet heard of the last.
    """
    for seed in range(20):
        rng = random.Random(seed)
        ranks, budget = rng.randint(1, 6), rng.randint(10, 10_000)
        lease, used, boundaries = [budget // ranks] * ranks, [0] * ranks, [0] * ranks
        said: list[dict[int, int]] = [{}]  # of each step boundary, what each rank has kept
        for _ in range(2000):
            rank = rng.randrange(ranks)
            if rng.random() < 0.5:  # log, within the lease, or drop
                used[rank] = rng.randint(used[rank] if rng.random() < 0.8 else 0, max(lease[rank], used[rank]))
            else:
                before = said[boundaries[rank]]
                if boundaries[rank] and len(before) < ranks:
                    continue  # others have not come to the boundary before
                if boundaries[rank]:
                    lease[rank] = log_budget.leases([before[each] for each in range(ranks)], budget)[rank]
                boundaries[rank] += 1
                said += [{} for _ in range(boundaries[rank] - len(said) + 1)]
                lease[rank] = said[boundaries[rank]][rank] = log_budget.kept(lease[rank], used[rank])
            assert sum(lease) <= budget and all(use <= most for use, most in zip(used, lease, strict=True))
        assert min(boundaries) > 10


def test_who_logs_gets_the_room() -> None:
    """One rank of four logs 10 bytes a batch, the others nothing: most of the budget goes to it."""
    lease, used = [100] * 4, [0] * 4
    while used[0] + 10 <= lease[0]:
        used[0] += 10
        lease = log_budget.leases([log_budget.kept(*each) for each in zip(lease, used, strict=True)], 400)
    assert used[0] >= 320


def test_what_the_logs_call_for() -> None:
    assert log_budget.advice(10**12, 100, 0) is Advice.NOTHING
    assert log_budget.advice(99, 10, 300) is Advice.NOTHING
    assert log_budget.advice(100, 10, 300) is Advice.CHECKPOINT
    assert log_budget.advice(100, 3, 300) is Advice.MORE, "no checkpoint can be written so soon"
    assert log_budget.segment_bytes(1 << 26, 0, 4) == 1 << 26
    assert log_budget.segment_bytes(1 << 26, 16 << 20, 4) == 1 << 19
    assert log_budget.segment_bytes(1000, 16 << 20, 4) == 1000


def put(archive: Archive, index: int, boundary: int) -> None:
    archive.put(Key("a", index, boundary), [torch.full((250,), index, dtype=torch.float32)])


def taken(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.log"))


def test_what_has_no_room_waits_for_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    archive = Archive(tmp_path, segment_bytes=2500, ring_bytes=5000, owner="rank 1")
    archive.lease(5500)
    for index in range(8):
        put(archive, index, boundary=index)
    until(
        lambda: archive._out_of_room() and archive.stats.bytes_on_disk == taken(tmp_path),
        lambda: f"{archive.stats}, and {taken(tmp_path)} bytes are there",
    )
    held = archive.stats
    assert 4000 < held.bytes_on_disk <= 5500 and held.bytes_waiting > 3000 and not held.failed
    assert [float(archive.read("a", index)[1][0][0]) for index in range(8)] == list(range(8)), "from disk or memory"
    archive.drop_before(4)
    flush(archive)
    assert archive.first("a") == 4 and archive.stats.bytes_waiting == 0 and taken(tmp_path) <= 5500
    archive.close()
    assert taken(tmp_path) <= 5500
    again = Archive(tmp_path, owner="rank 1", again=True)
    assert again.first("a") == 4
    again.close()
    assert not capfd.readouterr().err

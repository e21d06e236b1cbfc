"""A loop in which 80 groups are made, and used, under a profiler that keeps the shapes."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

import shared_core
from tests.support.report import Report, end_group

GROUPS = 80


def scatters(group: dist.ProcessGroup | None, rank: int, size: int) -> float:
    total = 0.0
    for source in range(size):
        parts = [torch.full((3, 3), float(each + source)) for each in range(size)]
        mine = torch.full((3, 3), -1.0)
        dist.scatter(mine, parts if rank == source else None, src=source, group=group)
        total += mine.sum().item()
    return total


def main() -> dist.ProcessGroup:
    report = Report()
    if not os.environ.get("SWIFT_BASELINE"):
        shared_core.install()
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    expected = sum(9.0 * (rank + source) for source in range(size))
    with torch.autograd.profiler.profile(record_shapes=True) as profile:
        wrong = [n for n in range(GROUPS) if scatters(dist.new_group(), rank, size) != expected]
    assert not wrong, wrong
    seen = sum("scatter" in event.name for event in profile.function_events)
    assert seen >= GROUPS * size, seen
    report.finish({})
    return end_group()


if __name__ == "__main__":
    last = main()

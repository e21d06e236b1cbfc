"""Evaluates a sharded model often between two step boundaries, and reports by how much its memory grows."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import shared_core
from tests.support.report import Report

#: Evaluations before it is looked at how much memory there is, and after that: at first the allocator fills up.
FIRST, TIMES = 10, 40


def held() -> int:
    """Bytes of memory that this process has written."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) * 1024


def main() -> dist.ProcessGroup:
    report = Report()
    shared_core.install()
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Sequential(nn.Linear(1000, 4000), nn.Linear(4000, 2))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    shared_core.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    gathered = 4 * sum(p.numel() for p in model.parameters())
    with torch.no_grad():
        for _ in range(FIRST):
            model(torch.ones(1, 1000))
        before = held()
        for _ in range(TIMES):
            model(torch.ones(1, 1000))
    report.finish({}, grown=(held() - before) / gathered)
    group = dist.group.WORLD
    dist.barrier()
    dist.destroy_process_group()
    return group


if __name__ == "__main__":
    group = main()  # let go of after the model: see plain_ddp.py

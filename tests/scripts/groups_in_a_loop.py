"""Groups made in batches: some are destroyed there, some are kept for later ones."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import nn

import shared_core
from tests.support.digest import training_digest
from tests.support.report import Report, end_group

HOW = sys.argv[1]


def train() -> dist.ProcessGroup:
    report = Report()
    if not os.environ.get("SWIFT_BASELINE"):
        shared_core.install()
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
    net = nn.Linear(8, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2, momentum=0.9)
    data = torch.randn(24, 8, generator=torch.Generator().manual_seed(rank)).split(2)
    job = shared_core.attach(net, optimizer)
    group = pair = None
    total = torch.zeros(3)
    for _ in job.epochs(1):
        for number, x in job.steps(list(data)):
            report.count(f"batch {number}")
            if HOW != "kept" or number % 4 == 2:
                group = dist.new_group()
                pair = dist.new_group([0, size - 1])
            net(x).square().mean().backward()
            for each in net.parameters():
                dist.all_reduce(each.grad, group=group)
            parts = [torch.full((3,), float(number * 10 + each)) for each in range(size)]
            mine = torch.empty(3)
            dist.scatter(mine, parts if rank == number % size else None, src=number % size, group=group)
            total += mine
            if rank in (0, size - 1) and pair is not None:
                dist.broadcast(total, src=0, group=pair)
            optimizer.step()
            optimizer.zero_grad()
            if HOW == "destroyed":
                dist.barrier()  # else one closes what another still reads from
                dist.destroy_process_group(group)
                if rank in (0, size - 1):
                    dist.destroy_process_group(pair)
    report.finish(training_digest(net, [optimizer], [], {"total": total}))
    return end_group()


if __name__ == "__main__":
    last = train()  # let go of after the model

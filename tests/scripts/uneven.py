"""Rank 1 ends its epoch earlier than rank 0, which waits in the backward pass of DistributedDataParallel."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

import shared_core


def main() -> None:
    shared_core.install()
    dist.init_process_group("gloo", timeout=timedelta(seconds=12))
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job = shared_core.attach(model, optimizer)
    for _ in job.epochs(2):
        for _, x in job.steps([torch.ones(2, 4)] * (6 - dist.get_rank())):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        dist.barrier()


if __name__ == "__main__":
    main()

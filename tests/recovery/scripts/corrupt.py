"""DDP in which one bit of one parameter of one rank flips after a recovery."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import nn

import shared_core
from tests.support.digest import training_digest
from tests.support.report import Report


def flip(net: nn.Module) -> None:
    data = net.second.weight.data.view(-1).view(torch.uint8)
    data[5] ^= 4


def main() -> None:
    victim, steps = int(sys.argv[1]), int(sys.argv[2])
    report = Report()
    shared_core.install()
    job = shared_core.current_job()
    assert job is not None
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = nn.Sequential()
    net.add_module("first", nn.Linear(8, 8))
    net.add_module("second", nn.Linear(8, 2))
    ddp = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    loop = {"step": 0}
    job.attach([ddp], [optimizer])
    job.register("loop", lambda: dict(loop), loop.update)
    flipped = False
    while loop["step"] < steps:
        due = job._worker.recovery.forming.comparison
        if (
            job.rank == victim
            and job.env.incarnation == 0
            and due is not None
            and not due.start
            and job.updates.state_version >= due.version
            and not flipped
        ):
            flipped = True
            flip(net)
        job.step_boundary()
        report.count(f"batch {loop['step']}")
        optimizer.zero_grad()
        ddp(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        loop["step"] += 1
    dist.barrier()
    report.finish(training_digest(net, [optimizer]), flipped=flipped, pid=os.getpid())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""What a replacement iterates has fewer items than the failed worker had read."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn

import shared_core
from tests.support.report import Report, end_group


def train() -> dist.ProcessGroup:
    report = Report()
    shared_core.install()
    dist.init_process_group("gloo")
    torch.manual_seed(3)
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job = shared_core.attach(model, optimizer)
    for _ in job.epochs(1):
        replacement = os.environ.get("SWIFT_RECOVERY_INCARNATION", "0") != "0"
        for _, x in job.steps(torch.ones(2, 4) for _ in range(3 if replacement else 10)):
            report.count("step")
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    report.finish({"all": ""})
    return end_group()


if __name__ == "__main__":
    group = train()  # let go of after the model

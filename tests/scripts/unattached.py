"""Nothing is attached: the model and its optimizer are registered, and gradients are averaged by hand."""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn

import shared_core
from tests.support.digest import training_digest
from tests.support.report import Report, end_group


def train() -> dist.ProcessGroup:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ddp", action="store_true")
    args = parser.parse_args()
    report = Report()
    if not os.environ.get("SWIFT_BASELINE"):
        shared_core.install()
    dist.init_process_group("gloo")
    torch.manual_seed(3)
    net = nn.Linear(8, 1)
    model: nn.Module = nn.parallel.DistributedDataParallel(net) if args.ddp else net
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2, momentum=0.9)
    data = torch.randn(20, 8, generator=torch.Generator().manual_seed(dist.get_rank())).split(2)
    job = shared_core.attach()
    job.register(net, optimizer)
    for _ in job.epochs(3):
        for _, x in job.steps(list(data)):
            report.count("batch")
            model(x).square().mean().backward()
            for each in () if args.ddp else net.parameters():
                dist.all_reduce(each.grad)
            optimizer.step()
            optimizer.zero_grad()
    report.finish(training_digest(net, [optimizer], [], {}))
    return end_group()


if __name__ == "__main__":
    group = train()  # let go of after the model

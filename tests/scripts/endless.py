"""Loops that give no step boundary, or none that a failed worker could be replaced at."""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn

import shared_core
from tests.support.digest import training_digest
from tests.support.report import Report, end_group

STEPS = 12
#: So many that it is clear that nothing will be attached.
MANY = 110


def train() -> dist.ProcessGroup:
    parser = argparse.ArgumentParser()
    parser.add_argument("form", choices=["endless", "unattached", "by_hand", "counted"])
    args = parser.parse_args()
    report = Report()
    if args.form != "by_hand" and not os.environ.get("SWIFT_BASELINE"):
        shared_core.install()
    dist.init_process_group("gloo")
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    model = net if args.form == "by_hand" else nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    torch.manual_seed(dist.get_rank())

    def step() -> None:
        report.count("step")
        model(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    if args.form == "by_hand":
        for _ in range(MANY):
            report.count("step")
            model(torch.randn(4, 64)).square().mean().backward()
            for each in net.parameters():
                dist.all_reduce(each.grad)
            optimizer.step()
            optimizer.zero_grad()
    elif args.form == "unattached":
        for _ in range(STEPS):
            step()
    elif args.form == "endless":
        shared_core.attach(model, optimizer)
        number = 0
        while True:
            step()
            number += 1
            if number == STEPS:
                break
    else:
        job = shared_core.attach(model, optimizer)
        for _, _ in job.steps(range(STEPS)):  # what the line says, in the place of 'while True:'
            step()
    report.finish(training_digest(net, [optimizer], [], {}))
    return end_group()


if __name__ == "__main__":
    group = train()  # let go of after the model

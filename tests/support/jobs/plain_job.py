"""The job of the soak test without Lightning, on any device: DDP, AdamW, BatchNorm, dropout, clipping, a scheduler."""

from __future__ import annotations

import os
import random

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from shared_core.devices import random_states
from tests.support.device import device
from tests.support.digest import digest, training_digest
from tests.support.report import Report, end_group, generators_digest
from tests.support.runner import BASELINE

STEPS = 14


def main() -> None:
    report = Report()
    job = None
    if not os.environ.get(BASELINE):
        import shared_core

        shared_core.install()
        job = shared_core.current_job()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 32), nn.Linear(32, 4)
    )
    net.to(device())
    ddp = nn.parallel.DistributedDataParallel(net, bucket_cap_mb=0.004)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    torch.manual_seed(rank)
    np.random.seed(rank)
    random.seed(rank)
    loop = {"step": 0, "loss_sum": 0.0}
    if job is not None:
        job.attach([ddp], [optimizer])
        job.register("scheduler", scheduler.state_dict, scheduler.load_state_dict)
        job.register("loop", lambda: dict(loop), loop.update)
    while loop["step"] < STEPS:
        if job is not None:
            job.step_boundary()
        report.count(f"batch {loop['step']}")
        x = torch.randn(8, 16).to(device())
        optimizer.zero_grad()
        loss = (ddp(x) - x[:, :4].sin()).pow(2).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        loop["loss_sum"] += total.item()
        loop["step"] += 1
    digests = training_digest(net, [optimizer], [scheduler], {"loss": loop["loss_sum"]})
    report.finish(digests | {"generators": generators_digest(), "devices": digest(random_states())}, steps=STEPS)
    group = end_group()
    del ddp, group


if __name__ == "__main__":
    main()

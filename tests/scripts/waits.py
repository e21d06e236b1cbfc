"""Ranks that wait: for a newcomer that does something else than its peers, for a slow start, for a late peer."""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import shared_core
from shared_core.testing.report import Report

NEWCOMER = os.environ["SWIFT_RECOVERY_INCARNATION"] != "0"


def main() -> None:
    how, timeout_s = sys.argv[1], float(sys.argv[2])
    report = Report()
    job = shared_core.install()
    assert job is not None
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
    side = dist.new_group([0, 1])
    net = nn.Linear(2, 2)
    job.attach([net], [torch.optim.SGD(net.parameters(), lr=0.1)])
    loop = {"step": 0}
    job.register("loop", lambda: dict(loop), loop.update)
    while loop["step"] < 5:
        job.batch_top()
        report.count(f"batch {loop['step']}")
        value = torch.full((4, 3), float(loop["step"]))
        if NEWCOMER and loop["step"] == 4 and how == "group":
            dist.barrier(group=side)
        elif NEWCOMER and loop["step"] == 4 and how == "message":
            dist.recv(value, 0)
        dist.all_reduce(value)
        loop["step"] += 1
    report.finish({})
    dist.barrier()


if __name__ == "__main__":
    main()

"""A replacement that does not do what the failed worker did."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import nn

import shared_core
from tests.support.report import Report


def main() -> None:
    how = sys.argv[1]
    report = Report()
    job = shared_core.install()
    assert job is not None
    dist.init_process_group("gloo")
    net = nn.Linear(2, 2)
    job.attach([net], [torch.optim.SGD(net.parameters(), lr=0.1)])
    loop = {"step": 0}
    job.register("loop", lambda: dict(loop), loop.update)
    while loop["step"] < 5:
        job.step_boundary()
        # Asked in each batch: a variable would be given the failed worker's value.
        other = how if os.environ["SWIFT_RECOVERY_INCARNATION"] != "0" else "same"
        report.count(f"batch {loop['step']}")
        value = torch.full((4, 3), float(loop["step"]))
        if other == "operation":
            dist.all_gather_into_tensor(torch.empty(8, 3), value)
        elif other == "shape":
            dist.all_reduce(value[:3])
        elif other == "root":
            dist.broadcast(value, 0)
        elif other == "input":
            dist.all_reduce(value + 1)
        elif how == "root":
            dist.broadcast(value, 1)
        else:
            dist.all_reduce(value)
        dist.barrier()
        loop["step"] += 1
    report.finish({})
    dist.barrier()


if __name__ == "__main__":
    main()

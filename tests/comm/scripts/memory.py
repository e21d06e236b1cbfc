"""DDP training; reports what the logs hold once all is in its stride."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

import shared_core
from tests.support.report import Report


def main() -> None:
    report = Report()
    job = shared_core.install()
    assert job is not None
    dist.init_process_group("gloo")
    net = nn.Sequential(*[nn.Linear(512, 512) for _ in range(6)])
    ddp = nn.parallel.DistributedDataParallel(net, bucket_cap_mb=1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    job.attach([ddp], [optimizer])
    runtime = job.runtime
    gradient = sum(p.numel() * p.element_size() for p in net.parameters())
    held, free = [], []
    for step in range(14):
        job.step_boundary()
        report.count(f"batch {step}")
        optimizer.zero_grad()
        ddp(torch.ones(2, 512)).sum().backward()
        with runtime.lock:
            held.append(runtime.groups.log_bytes() / gradient)
            free.append(
                sum(t.numel() * t.element_size() for ts in runtime.results.pool._free.values() for t in ts) / gradient
            )
        optimizer.step()
    report.finish({}, held=held[8:], free=free[8:], peak=runtime.results.peak_bytes / gradient)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

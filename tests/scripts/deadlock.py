"""Two ranks that make different calls in their fourth batch, always or only before all workers start again."""

from __future__ import annotations

import os
import sys
import threading

import torch
import torch.distributed as dist
from torch import nn

import shared_core

HOW = sys.argv[1]


def wait_elsewhere(rank: int, pair: dist.ProcessGroup) -> None:
    """What the two ranks do instead of the same."""
    value = torch.ones(4)
    if HOW == "computes":  # no deadlock: rank 1 is only late
        if rank == 1:
            torch.linalg.eigvals(torch.randn(300, 300))
            threading.Event().wait(8.0)
        dist.all_reduce(value)
    elif HOW == "none":
        if rank == 0:
            dist.all_reduce(value)
    elif HOW == "messages":
        dist.recv(value, 1 - rank)
    elif rank == 0:
        dist.all_reduce(value)
    elif HOW in ("group", "once"):
        dist.barrier(group=pair)
    elif HOW == "call":
        dist.broadcast(value, src=0)
    elif HOW == "message":
        dist.recv(value, 0)


def main() -> None:
    shared_core.install()
    dist.init_process_group("gloo")
    rank, pair = dist.get_rank(), dist.new_group([0, 1])
    net = nn.Linear(4, 1)
    job = shared_core.attach(net, torch.optim.SGD(net.parameters(), lr=0.1))
    for _ in job.epochs(1):
        for number, x in job.steps([torch.ones(2, 4)] * 6):
            dist.all_reduce(x)
            if number == 3 and not (HOW == "once" and os.environ["SWIFT_RECOVERY_RESTART"] != "0"):
                wait_elsewhere(rank, pair)
                if HOW == "none" and rank == 1:
                    return
    dist.barrier()


if __name__ == "__main__":
    main()

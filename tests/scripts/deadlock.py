"""Ranks that make different calls in their fourth batch, always or only before all workers start again."""

from __future__ import annotations

import os
import sys
import threading

import torch
import torch.distributed as dist
from torch import nn

import shared_core

HOW = sys.argv[1]
#: Rank 1 makes no call any more: its program ends.
ENDS = ("none", "message, none")


def wait_elsewhere(rank: int, pair: dist.ProcessGroup, net: nn.Module) -> None:
    """What the two ranks do instead of the same."""
    value = torch.ones(4)
    if HOW == "computes":  # no deadlock: rank 1 is only late
        if rank == 1:
            torch.linalg.eigvals(torch.randn(300, 300))
            threading.Event().wait(8.0)
        dist.all_reduce(value)
    elif HOW in ENDS:
        if rank == 0:
            dist.recv(value, 1) if HOW == "message, none" else dist.all_reduce(value)
    elif HOW == "three":
        if rank == 0:
            dist.all_reduce(value)
        elif rank == 1:
            dist.recv(value, 2)
        else:
            dist.barrier(group=pair)
    elif HOW == "bucket" and rank == 0:
        net(torch.ones(2, 4)).sum().backward()
    elif HOW == "messages":
        dist.recv(value, 1 - rank)
    elif rank == 0:
        dist.all_reduce(value)
    elif HOW == "any source":
        dist.recv(value)
    elif HOW == "inputs":
        dist.reduce_scatter_tensor(torch.ones(4), torch.ones(8), group=pair)
    elif HOW in ("group", "once"):
        dist.barrier(group=pair)
    elif HOW == "call":
        dist.broadcast(value, src=0)
    elif HOW in ("message", "bucket"):
        dist.recv(value, 0)


def main() -> None:
    shared_core.install()
    dist.init_process_group("gloo")
    rank, pair = dist.get_rank(), dist.new_group([0, dist.get_world_size() - 1])
    net: nn.Module = nn.Linear(4, 1)
    if HOW == "bucket":
        net = nn.parallel.DistributedDataParallel(net)
    job = shared_core.attach(net, torch.optim.SGD(net.parameters(), lr=0.1))
    for _ in job.epochs(1):
        for number, x in job.steps([torch.ones(2, 4)] * 6):
            dist.all_reduce(x)
            if number == 3 and not (HOW == "once" and os.environ["SWIFT_RECOVERY_RESTART"] != "0"):
                wait_elsewhere(rank, pair, net)
                if HOW in ENDS and rank == 1:
                    return
    dist.barrier()


if __name__ == "__main__":
    main()

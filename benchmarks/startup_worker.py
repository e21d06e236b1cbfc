"""Worker of the start-up benchmark: a plain DDP loop after a start-up that computes and waits."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import shared_core
from benchmarks.recovery_worker import LAYERS, WIDTH, Trace, batch


def start_up(seconds: float) -> None:
    """Half of it computes, as an index that is built does, and half waits, as for a file that is read."""
    end = time.thread_time() + seconds / 2
    while time.thread_time() < end:
        sum(range(10_000))
    time.sleep(seconds / 2)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--startup", type=float, required=True, metavar="SECONDS")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    shared_core.install()
    dist.init_process_group("gloo")
    rank, trace = dist.get_rank(), Trace(options.out, int(os.environ["RANK"]))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = nn.Sequential(*[part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.ReLU())])
    model = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    start_up(options.startup)
    job = shared_core.attach(model, optimizer)
    stop = options.out / "stop"
    for _ in job.epochs(1):
        for step, x in job.steps(batch(step, rank) for step in range(1 << 18)):
            optimizer.zero_grad()
            (model(x) - x.sin()).pow(2).mean().backward()
            optimizer.step()
            trace.note("step", step=step)
            if stop.exists() and step >= int(stop.read_text()):
                break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

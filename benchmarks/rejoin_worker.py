"""Worker of :mod:`benchmarks.rejoin`: a loop over ``shared_steps`` that notes when each step is done."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import shared_core
from benchmarks.recovery_worker import Trace

_WIDTH = 1000


class Own(torch.optim.AdamW):
    """An optimizer that is not torch's own: nobody knows that it steps each parameter by itself."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--layers", type=int, required=True, help="of a million parameters each")
    parser.add_argument("--own", action="store_true", help="an optimizer that is not torch's own")
    options = parser.parse_args()
    torch.set_num_threads(1)
    shared_core.install()
    dist.init_process_group("gloo")
    trace = Trace(options.out, int(os.environ["RANK"]))
    torch.manual_seed(1)
    net = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(options.layers)))
    optimizer = (Own if options.own else torch.optim.AdamW)(net.parameters(), lr=1e-4)
    data = TensorDataset(torch.randn(1 << 13, _WIDTH))
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, shuffle=False))
    job, stop = shared_core.attach(net, optimizer), options.out / "stop"
    trace.note("loop")
    for step in job.shared_steps(loader, 100):
        if stop.exists() and step.number >= int(stop.read_text() or 1 << 60):
            break
        step.backward(lambda batch: net(batch[0]).square().mean())
        optimizer.step()
        trace.note("step", step=step.number)


if __name__ == "__main__":
    main()

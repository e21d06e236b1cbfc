"""Plain PyTorch: DDP that trains until there is a file ``enough``, which rank 0 tells the others."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import shared_core
from tests.support.report import OUT


def main() -> None:
    out = Path(os.environ[OUT])
    shared_core.install()
    dist.init_process_group("gloo")
    torch.manual_seed(3)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 4)))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    loop = shared_core.attach(model, optimizer)
    enough = torch.zeros(1)
    for _ in loop.epochs(1):
        for _, inputs in loop.steps(torch.randn(16, 64) for _ in iter(int, 1)):
            model(inputs).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            enough.fill_((out / "enough").exists())
            dist.broadcast(enough, 0)
            if enough:
                break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

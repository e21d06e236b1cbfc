"""The soak's job with a sharded model, on any device: FSDP2 over all ranks, or HSDP over replicas of shards.
BatchNorm, dropout, augmentation, clipping, a scheduler, and an evaluation after each epoch.

Fourteen steps in two epochs. A step of the second has two micro-batches; gradients of the first one wait, unsharded.
"""

from __future__ import annotations

import argparse
import os
import random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import shared_core
from shared_core.devices import random_states
from tests.support.device import device
from tests.support.digest import digest, training_digest
from tests.support.report import Report, end_group, generators_digest
from tests.support.runner import BASELINE

STEPS, EPOCHS = 14, 2
BATCH = 4
#: No number of ranks divides it.
WIDTH = 23


class Block(nn.Module):
    """One group of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dropout = nn.BatchNorm1d(WIDTH), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        return x + self.dropout(self.down(self.up(self.norm(x)).relu()))


def sharded(replicas: int) -> FSDPModule:
    """A model of four groups of parameters, with so many replicas of each shard."""
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(8, WIDTH), *(Block() for _ in range(3)), nn.Linear(WIDTH, 3)).to(device())
    size = dist.get_world_size()
    shape = (replicas, size // replicas) if replicas > 1 else (size,)
    mesh = init_device_mesh(device().type, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    for block in list(net)[1:4]:
        fully_shard(block, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def main() -> Any:
    parser = argparse.ArgumentParser()
    parser.add_argument("--replicas", type=int, default=1, help="of each shard; more than one is HSDP")
    args = parser.parse_args()
    report = Report()
    if not os.environ.get(BASELINE):
        shared_core.install()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model: Any = sharded(args.replicas)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    size = 2 * BATCH * STEPS // EPOCHS * dist.get_world_size()
    data = TensorDataset(torch.randn(size, 8, generator=torch.Generator().manual_seed(5)))
    sampler: DistributedSampler[Any] = DistributedSampler(data)
    loader = DataLoader(data, batch_size=2 * BATCH, sampler=sampler)
    torch.manual_seed(rank)
    np.random.seed(rank)
    random.seed(rank)
    job = shared_core.attach(model, optimizer, scheduler, loader)
    seen = job.register(loss=0.0)
    for epoch in job.epochs(EPOCHS):
        sampler.set_epoch(epoch)
        model.train()
        for number, (both,) in job.steps(loader):
            report.count(f"epoch {epoch} batch {number}")
            both = both + 0.1 * torch.randn(8) + 0.1 * random.random() + 0.1 * float(np.random.rand())
            parts = both.to(device()).chunk(1 + epoch)
            for part, x in enumerate(parts, 1):
                model.set_requires_gradient_sync(part == len(parts))
                loss = (model(x) - x[:, :3].sin()).square().mean() / len(parts)
                loss.backward()
                seen.loss += loss.item()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        model.eval()
        with torch.no_grad():
            seen.loss += model(data.tensors[0][:6].to(device())).square().mean().item()
    model.reshard()
    digests = training_digest(model, [optimizer], [scheduler], vars(seen))
    report.finish(digests | {"generators": generators_digest(), "devices": digest(random_states())}, steps=STEPS)
    return end_group()


if __name__ == "__main__":
    group = main()  # let go of after the model, whose end would else hold the interpreter's lock

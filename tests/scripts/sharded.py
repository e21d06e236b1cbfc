"""Plain PyTorch with ``fully_shard``: FSDP2 over all ranks, or HSDP over replicas of shards; on any device."""

from __future__ import annotations

import argparse
import os
import random
from collections.abc import Iterator

import numpy as np
import torch
import torch.distributed as dist
from on_device import finish
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import shared_core
from tests.support.device import device
from tests.support.digest import training_digest
from tests.support.report import Report


class Block(nn.Module):
    """Sizes that two and four ranks cannot divide evenly."""

    def __init__(self, width: int, mixed: bool, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width) if mixed else nn.BatchNorm1d(width)
        self.up, self.down = nn.Linear(width, 3 * width + 1), nn.Linear(3 * width + 1, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(torch.relu(self.up(self.norm(x)))))


def sharded(args: argparse.Namespace) -> nn.Sequential:
    """The model, sharded block by block."""
    torch.manual_seed(3)
    blocks = [Block(args.width, args.mixed, args.dropout) for _ in range(3)]
    net = nn.Sequential(nn.Linear(8, args.width), *blocks, nn.Linear(args.width, 3)).to(device())
    size = dist.get_world_size()
    shape = (args.replicas, size // args.replicas) if args.replicas > 1 else (size,)
    mesh = init_device_mesh(device().type, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if args.mixed else MixedPrecisionPolicy()
    for block in net if args.bare_root else net[1:4]:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(net, mesh=mesh, mp_policy=policy)


def batches(job: object, loader: DataLoader[object], args: argparse.Namespace) -> Iterator[torch.Tensor]:
    for _, (x,) in job.steps(loader):  # type: ignore[attr-defined]
        x = x + 0.1 * torch.randn(8) + 0.1 * random.random() + 0.1 * float(np.random.rand())
        yield x.to(device())


def train() -> dist.ProcessGroup:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--replicas", type=int, default=1, help="of each shard; more than one is HSDP")
    parser.add_argument("--width", type=int, default=15)
    parser.add_argument("--dropout", type=float, default=0.1, help="0: what is trained does not depend on the device")
    parser.add_argument("--mixed", action="store_true", help="compute in bf16, without statistics")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches of a step")
    parser.add_argument("--sync", action="store_true", help="reduce the gradients of each micro-batch")
    parser.add_argument("--evaluate", action="store_true", help="after each epoch")
    parser.add_argument("--evaluate-first", action="store_true", help="before the model is attached")
    parser.add_argument(
        "--bare-root", action="store_true", help="shard all layers, so that nothing is left in the root"
    )
    parser.add_argument("--freeze", action="store_true", help="a block's statistics, from the third batch of an epoch")
    args = parser.parse_args()
    report = Report()
    if not os.environ.get("SWIFT_BASELINE"):
        shared_core.install()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = sharded(args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    data = torch.randn(12 * dist.get_world_size(), 8, generator=torch.Generator().manual_seed(5))
    sampler: DistributedSampler[object] = DistributedSampler(TensorDataset(data), shuffle=True)
    loader = DataLoader(TensorDataset(data), batch_size=2, sampler=sampler)
    torch.manual_seed(rank)
    np.random.seed(rank)
    random.seed(rank)

    def error() -> float:
        model.eval()
        with torch.no_grad():
            return model(data[:6].to(device())).square().mean().item()

    before = error() if args.evaluate_first else 0.0
    job = shared_core.attach(model, optimizer, scheduler, loader)
    seen = job.register(loss=before, batches=0)
    for epoch in job.epochs(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for x in batches(job, loader, args):
            report.count(f"batch {seen.batches}")
            seen.batches += 1
            if args.freeze and seen.batches % 6 == 3:
                model[2].eval()
            last = seen.batches % args.accumulate == 0
            model.set_requires_gradient_sync(last or args.sync)
            loss = (model(x) - x[:, :3].sin()).square().mean() / args.accumulate
            loss.backward()
            seen.loss += loss.item()
            if last:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        scheduler.step()
        if args.evaluate:
            seen.loss += error()
    model.reshard()
    digests = training_digest(model, [optimizer], [scheduler], vars(seen))
    finish(report, digests, **vars(seen))
    group = dist.group.WORLD
    dist.barrier()
    dist.destroy_process_group()
    return group


if __name__ == "__main__":
    group = train()  # let go of after the model: see plain_ddp.py

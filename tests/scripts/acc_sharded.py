"""A loop of Accelerate with a sharded model: by the script's own ``fully_shard``, or as Accelerate's plugin says."""

from __future__ import annotations

import argparse
import os
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import fsdp2_prepare_model, set_seed
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from shared_core.errors import Unsupported
from tests.support.digest import training_digest
from tests.support.report import Report, generators_digest


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(15, 31), nn.Linear(31, 15), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(self.up(x).relu()))


class Noisy(TensorDataset):
    """Noise is drawn when an item is read."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        (x,) = super().__getitem__(index)
        return (x + 0.05 * torch.randn(8) + 0.01 * random.random() + 0.01 * float(np.random.rand()),)


def net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 15), Block(), Block(), Block(), nn.LayerNorm(15), nn.Linear(15, 3))


def asked_for() -> FullyShardedDataParallelPlugin:
    return FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"]
    )


def sharded(accelerator: Accelerator, args: argparse.Namespace) -> Any:
    """The model of this rank, which Accelerate does not wrap."""
    model = net()
    if args.plugin:
        accelerator.state.fsdp_plugin = asked_for()
        return accelerator.prepare_model(fsdp2_prepare_model(accelerator, model), evaluation_mode=True)
    size = accelerator.num_processes
    shape = (args.replicas, size // args.replicas) if args.replicas > 1 else (size,)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    for block in model[1:4]:
        fully_shard(block, mesh=mesh)
    return accelerator.prepare_model(fully_shard(model, mesh=mesh), evaluation_mode=True)


def refused(accelerator: Accelerator, report: Report) -> None:
    """Prepare and read a loader as they must not be."""
    said = {}
    model = fully_shard(net(), mesh=init_device_mesh("cpu", (accelerator.num_processes,)))
    try:
        accelerator.prepare(model)
    except Unsupported as error:
        said["wrapped"] = str(error)
    adam = torch.optim.AdamW(model.parameters())
    _, loader = accelerator.prepare(adam, DataLoader(TensorDataset(torch.ones(4, 8))))
    try:
        next(iter(loader))
    except Unsupported as error:
        said["not prepared"] = str(error)
    report.finish({}, refused=said)
    accelerator.end_training()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--replicas", type=int, default=1, help="of each shard; more than one is HSDP")
    parser.add_argument("--plugin", action="store_true", help="Accelerate shards the model itself")
    parser.add_argument("--ignored", action="store_true", help="the plugin is given to the Accelerator")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--unreduced", action="store_true", help="reduce only the gradients of a whole step")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--refused", action="store_true", help="only say what is refused")
    args = parser.parse_args()
    report = Report()
    baseline = bool(os.environ.get("SWIFT_BASELINE"))
    epochs: Any = iter(range(2))
    seen = SimpleNamespace(loss=0.0, right=0.0)
    handlers = []
    if not baseline:
        from accelerate_swift import SwiftPlugin

        plugin = SwiftPlugin()
        handlers, epochs, seen = [plugin], plugin.epochs(2), plugin.register(loss=0.0, right=0.0)
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=args.accumulate,
        mixed_precision="bf16" if args.bf16 else "no",
        kwargs_handlers=handlers,
        fsdp_plugin=asked_for() if args.ignored else None,
    )
    if args.refused:
        refused(accelerator, report)
        return
    model: Any = accelerator.prepare(net()) if args.ignored else sharded(accelerator, args)
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2)
    cycle = torch.optim.lr_scheduler.StepLR(adam, 5 * accelerator.num_processes, 0.5)
    points = torch.randn(12 * accelerator.num_processes, 8, generator=torch.Generator().manual_seed(5))
    train = DataLoader(Noisy(points), batch_size=2, shuffle=True)
    held_out = DataLoader(TensorDataset(points[:7]), batch_size=2)
    optimizer, train, held_out, scheduler = accelerator.prepare(adam, train, held_out, cycle)
    set_seed(7, device_specific=True)
    for epoch in epochs:
        model.train()
        for (x,) in train:
            report.count(f"epoch {epoch} batch {x.sum().item():.6f}")
            with accelerator.accumulate(model):
                if args.unreduced:
                    model.set_requires_gradient_sync(accelerator.sync_gradients)
                loss = (model(x) - x[:, :3].sin()).square().mean()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            seen.loss += accelerator.gather(loss.detach()).sum().item()
        model.eval()
        for (x,) in held_out:
            with torch.no_grad():
                guess = accelerator.gather_for_metrics(model(x))
            seen.right += guess.sum().item()
    if not args.ignored:
        model.reshard()
    digests = training_digest(model, [adam], [cycle], vars(seen))
    report.finish(digests | {"generators": generators_digest()})
    accelerator.end_training()


if __name__ == "__main__":
    main()

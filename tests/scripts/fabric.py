"""A loop of Lightning's Fabric: shuffled loaders, dropout and batch normalisation, a schedule, an evaluation."""

from __future__ import annotations

import argparse
import os
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

import lightning_swift
from tests.support.digest import training_digest
from tests.support.report import Report, end_group, generators_digest


def shard(net: Any, mesh: Any) -> Any:
    for layer in (net[0], net[-1]):
        fully_shard(layer, mesh=mesh["data_parallel"])
    return fully_shard(net, mesh=mesh["data_parallel"])


def train() -> dist.ProcessGroup:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--evaluate-first", action="store_true", help="before each training pass, too")
    parser.add_argument("--again", action="store_true", help="set up the training loader in each epoch")
    parser.add_argument("--bar", action="store_true", help="show progress")
    parser.add_argument("--cut", action="store_true", help="use the first batches of a pass only")
    parser.add_argument("--lasting", action="store_true", help="evaluate with loader workers that persist")
    parser.add_argument("--sharded", action="store_true", help="FSDP2")
    parser.add_argument("--save", type=Path, help="a checkpoint of Fabric's after each epoch, in this folder")
    args = parser.parse_args()
    report = Report()
    stock = bool(os.environ.get("SWIFT_BASELINE"))
    strategy: Any = "ddp" if stock else "swift_ddp"
    if args.sharded and stock:
        strategy = ModelParallelStrategy(shard, data_parallel_size=2, tensor_parallel_size=1)
    elif args.sharded:
        strategy = lightning_swift.SwiftFabricFSDPStrategy(shard)
    precision: Any = args.precision
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy, precision=precision)
    fabric.launch()
    fabric.seed_everything(3, verbose=False)
    net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))
    if args.sharded:  # parameters are other ones afterwards
        model = fabric.setup_module(net)
        optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))
    else:
        model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
    data = torch.randn(46, 8, generator=torch.Generator().manual_seed(5))

    def training_loader() -> DataLoader[Any]:
        loader = DataLoader(TensorDataset(data), batch_size=4, shuffle=True)
        found: Any = fabric.setup_dataloaders(loader)
        return found

    train_loader = training_loader()
    # Shuffled, so that what an evaluation sees depends on how many there were before it.
    workers = {"num_workers": 1, "persistent_workers": True} if args.lasting else {}
    held_out: Any = fabric.setup_dataloaders(
        DataLoader(TensorDataset(data[:20]), batch_size=3, shuffle=True, **workers)  # type: ignore[arg-type]
    )
    torch.manual_seed(fabric.global_rank)

    job = lightning_swift.attach(model, optimizer, scheduler)
    seen = job.register(loss=0.0, batches=0, evaluations=0.0)

    def evaluate() -> None:
        model.eval()
        with torch.no_grad():
            first = torch.stack([number * model(x).mean() for number, (x,) in enumerate(held_out, 1)]).sum()
        seen.evaluations += float(fabric.all_reduce(first, reduce_op="sum"))

    for _ in job.epochs(args.epochs):
        if args.evaluate_first:
            evaluate()
        if args.again:
            train_loader = training_loader()
        model.train()
        batches = tqdm(train_loader) if args.bar else islice(train_loader, 5) if args.cut else train_loader
        for step, (x,) in job.steps(batches):
            report.count(f"batch {step}")
            pending = (step + 1) % args.accumulate != 0
            with fabric.no_backward_sync(model, enabled=pending):
                loss = model(x + 0.1 * torch.randn(8)).square().mean() / args.accumulate
                fabric.backward(loss)
            if not pending:
                fabric.clip_gradients(model, optimizer, max_norm=1.0)
                optimizer.step()
                optimizer.zero_grad()
            seen.loss += float(fabric.all_reduce(loss.detach().clone(), reduce_op="mean"))
            seen.batches += 1
        scheduler.step()
        evaluate()
        if args.save:
            fabric.save(args.save / f"{seen.batches}.ckpt", {"model": model, "optimizer": optimizer, "loss": seen.loss})
    digests = training_digest(net, [optimizer.optimizer], [scheduler], vars(seen))
    report.finish(digests | {"generators": generators_digest()}, **vars(seen))
    return end_group()


if __name__ == "__main__":
    group = train()  # let go of after the model

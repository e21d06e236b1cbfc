"""Plain PyTorch with ``shared_core.attach``: epochs, a distributed sampler, counters, a second loop over other data."""

from __future__ import annotations

import argparse
import os
import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import shared_core
from tests.support.digest import training_digest
from tests.support.report import Report, end_group, generators_digest


def train() -> dist.ProcessGroup:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--no-epochs", action="store_true", help="the script counts its epochs itself")
    parser.add_argument("--unmarked", action="store_true", help="read batches past job.steps()")
    parser.add_argument("--break-at", type=int, default=0, help="leave each epoch after so many batches")
    parser.add_argument("--alone", action="store_true", help="no collectives but those of the gradients")
    parser.add_argument("--second", action="store_true", help="a second call of epochs(), over two loaders")
    parser.add_argument("--no-install", action="store_true", help="forget shared_core.install()")
    parser.add_argument("--log", default="", help="mode in which the script opens a log file before its loop")
    args = parser.parse_args()
    report = Report()
    if not args.no_install and not os.environ.get("SWIFT_BASELINE"):
        shared_core.install()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))
    model = nn.parallel.DistributedDataParallel(net, bucket_cap_mb=0.001)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
    data = torch.randn(46, 8, generator=torch.Generator().manual_seed(5))
    sampler: DistributedSampler[object] = DistributedSampler(TensorDataset(data), shuffle=True)
    loader = DataLoader(TensorDataset(data), batch_size=4, sampler=sampler, num_workers=args.workers)
    other = DataLoader(TensorDataset(data[:20]), batch_size=5, shuffle=True, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(rank)
    np.random.seed(rank)
    random.seed(rank)

    job = shared_core.attach(model, optimizer, scheduler, loader, other)
    seen = job.register(loss=0.0, batches=0, weight=0.0, best=SimpleNamespace(x=1.0).x)

    Path("config.txt").write_text(f"{args}")  # the same in each worker
    log = open(f"log{rank}.txt", args.log) if args.log else None  # noqa: SIM115 (until the end)

    def run(epoch: int, batches: DataLoader[object], *, evaluate: bool = True) -> None:
        model.train()
        for step, (x,) in enumerate(batches) if args.unmarked else job.steps(batches):
            report.count(f"batch {step}")
            seen.weight += sum(p.detach().square().sum().item() for p in net.parameters())  # past the model's output
            loss = model(x + 0.1 * torch.randn(8)).square().mean() / args.accumulate
            if (step + 1) % args.accumulate:
                with model.no_sync():
                    loss.backward()
            else:
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            if log is not None:
                print(epoch, step, file=log, flush=True)
            total = loss.detach().clone()
            if not args.alone:
                dist.all_reduce(total)
            seen.loss += total.item()
            seen.batches += 1
            if args.break_at and seen.batches % args.break_at == 0:
                break
        scheduler.step()
        if args.alone or not evaluate:
            return
        model.eval()
        with torch.no_grad():
            worst = torch.stack([model(x).square().mean() for (x,) in DataLoader(TensorDataset(data), 16)]).max()
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        seen.best = min(seen.best, worst.item())

    for epoch in range(args.epochs) if args.no_epochs else job.epochs(args.epochs):
        sampler.set_epoch(epoch)
        run(epoch, loader)
    if args.second:
        for epoch in job.epochs(2):
            run(epoch, loader, evaluate=False)  # between two passes a replacement has no parameters yet
            run(epoch, other)
    report.finish(
        training_digest(net, [optimizer], [scheduler], vars(seen)) | {"generators": generators_digest()}, **vars(seen)
    )
    return end_group()


if __name__ == "__main__":
    group = train()  # let go of after the model

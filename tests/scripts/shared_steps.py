"""Plain PyTorch with ``job.shared_steps``: any worker can compute any rank's share."""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import shared_core
from shared_core.loaders import seed_random
from tests.support.copies import Copies, hold
from tests.support.digest import digest, training_digest
from tests.support.report import Report, generators_digest


class Noisy(TensorDataset):
    """Random noise is drawn when an item is read."""

    def __getitem__(self, index: int):  # type: ignore[no-untyped-def]
        (x,) = super().__getitem__(index)
        return x + 0.05 * torch.randn(16), x[:4].sin()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--evaluate", action="store_true", help="at the start of each epoch, and at the end")
    parser.add_argument("--copies", default="", help="10:1,12:2: step 12 waits for two failures and the copies")
    parser.add_argument(
        "--hold", type=int, default=-1, help="a rank: its replacements wait for another one to be admitted"
    )
    parser.add_argument("--mistake", default="", help="ddp, own, norm, gather, sampler, buffer, late, twice")
    args = parser.parse_args()
    copies = Copies(args.copies)
    report = Report()
    if not os.environ.get("SWIFT_BASELINE"):
        shared_core.install()
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4))
    if args.mistake in ("norm", "buffer"):
        net.append(nn.BatchNorm1d(4) if args.mistake == "norm" else Counting())
    net.register_parameter("unused", nn.Parameter(torch.ones(3)))
    net.register_parameter("frozen", nn.Parameter(torch.ones(3), requires_grad=False))
    data = Noisy(torch.randn(70, 16, generator=torch.Generator().manual_seed(5)))
    sampler: DistributedSampler[object] = DistributedSampler(data, shuffle=True)
    loader = DataLoader(
        data, batch_size=4, sampler=None if args.mistake == "sampler" else sampler, num_workers=args.workers
    )
    wrapped = nn.parallel.DistributedDataParallel(net) if args.mistake == "ddp" else net
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
    seed_random(11)  # a replacement gets a copy of a peer's
    job = shared_core.attach(wrapped, optimizer, scheduler)
    seen = job.register(loss=0.0, worst=0.0)

    def loss(batch: list[torch.Tensor]) -> torch.Tensor:
        x, y = batch
        value = nn.functional.mse_loss(net(x), y)
        if args.mistake == "gather":
            dist.all_reduce(value.detach().clone())
        return value

    def evaluate() -> None:
        with torch.no_grad():
            worst = net.eval()(torch.ones(1, 16)).max() + dist.get_rank()
        net.train()
        dist.all_reduce(worst)
        seen.worst += worst.item()

    hold(args.hold)
    if args.mistake == "own":
        for _ in job.steps(loader):
            pass
    for step in job.shared_steps(loader, args.epochs, accumulate=args.accumulate):
        report.count(f"step {step.number}")
        copies.wait(step.number)
        if args.evaluate and step.first:
            step.wait_for_all()
            evaluate()
        seen.loss += step.backward(loss).mean().item()
        if args.mistake == "twice":
            step.backward(loss)
        if args.mistake == "late":
            step.wait_for_all()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
    if args.evaluate or args.copies:
        job.wait_for_all()
    if args.evaluate:
        evaluate()
    digests = training_digest(net, [optimizer], [scheduler], vars(seen))
    report.finish(digests | {"generators": generators_digest(), "loss": digest(seen.loss)}, loss=seen.loss)
    group = dist.group.WORLD
    dist.destroy_process_group()
    del group


class Counting(nn.Module):
    """Counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x


if __name__ == "__main__":
    main()

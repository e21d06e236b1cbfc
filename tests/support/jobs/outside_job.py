"""A plain loop that keeps averages of its weights, or changes by hand all that a script may, with gradients of two
micro-batches: clipped and normalised weights, a target network, a codebook, layers that are frozen and thawed, groups
of the optimizer, its state, buffers.
"""

from __future__ import annotations

import argparse
import os
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import shared_core
from shared_core.faults import inject
from tests.support.digest import digest, training_digest
from tests.support.report import Report, end_group, generators_digest
from tests.support.runner import BASELINE

STEPS, EPOCHS = 14, 2
BATCH = 8


class Net(nn.Module):
    """A perceptron with BatchNorm and dropout, layers that are trained later, and a buffer that is assigned again."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1))
        self.middle = nn.Linear(32, 32)
        self.late = nn.Linear(32, 32)
        self.last = nn.Linear(32, 4)
        self.seen: torch.Tensor
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> Any:
        self.seen = self.seen + x.sum()
        hidden = self.first(x)
        return self.last(hidden + self.middle(hidden).relu() + self.late(hidden).tanh())


def average(old: torch.Tensor, new: torch.Tensor, count: Any) -> torch.Tensor:
    """An exponential average, parameter by parameter, with a place for faults in the middle of the update."""
    inject.point("outside")
    return old + (new - old) * 0.1


class Averages:
    """Two averages of the weights: one of each step, with buffers, and an equal one of each third step."""

    def __init__(self, net: nn.Module) -> None:
        self.net = net
        self.ema = AveragedModel(net, avg_fn=average, use_buffers=True)
        self.equal = AveragedModel(net)
        self.modules: list[nn.Module] = [self.ema, self.equal]

    def boundary(self, step: int) -> None:
        """Before a batch."""

    def between(self, step: int, x: torch.Tensor) -> None:
        """Between forward and backward."""
        if step % 4 == 2:
            self.equal.update_parameters(self.net)

    def before(self, step: int) -> None:
        """Between backward and the update."""

    def after(self, step: int) -> None:
        """After the update."""
        inject.point("outside")
        self.ema.update_parameters(self.net)
        inject.point("outside")
        if step % 3 == 0:
            self.equal.update_parameters(self.net)
            inject.point("outside")


class ByHand:
    """Everything else that a script may change."""

    def __init__(self, net: Net, optimizer: torch.optim.Optimizer) -> None:
        self.net, self.optimizer = net, optimizer
        self.target, self.book = Net(), nn.Embedding(8, 16)
        self.target.load_state_dict(net.state_dict())
        for module in (self.target, self.book):
            module.requires_grad_(False)
        self.modules: list[nn.Module] = [self.target, self.book]

    def boundary(self, step: int) -> None:
        """Before a batch: the target network follows, layers thaw, the optimizer gets another group and rate."""
        if step % 3 == 1:
            for mine, theirs in zip(self.target.parameters(), self.net.parameters(), strict=True):
                mine.data.copy_(theirs.data)
        inject.point("outside")
        self.net.middle.requires_grad_(step % 4 != 3)
        if step == 6:
            self.optimizer.add_param_group({"params": list(self.net.late.parameters()), "lr": 5e-3})
        inject.point("outside")
        self.optimizer.param_groups[0]["lr"] *= 0.95
        self.optimizer.param_groups[-1]["weight_decay"] = 0.01 * (step % 2)

    def between(self, step: int, x: torch.Tensor) -> None:
        """Between forward and backward: the codebook moves to this rank's data."""
        inject.point("outside")
        for row in x.detach():
            nearest = (self.book.weight - row).square().sum(1).argmin()
            self.book.weight.data[nearest].mul_(0.9).add_(row, alpha=0.1)
        inject.point("outside")

    def before(self, step: int) -> None:
        """Between backward and the update: noise on a layer, the same on all ranks."""
        generator = torch.Generator().manual_seed(step)
        with torch.no_grad():
            self.net.last.bias.add_(0.01 * torch.randn(4, generator=generator))
        inject.point("outside")

    def after(self, step: int) -> None:
        """After the update: weights are normalised and clipped, moments forgotten, the target network moves."""
        inject.point("outside")
        with torch.no_grad():
            self.net.last.weight.div_(self.net.last.weight.norm().clamp(min=1.0))
            inject.point("outside")
            self.target.last.weight.lerp_(self.net.last.weight, 0.05)
        for parameter in self.net.first.parameters():
            parameter.data.clamp_(-0.2, 0.2)
        inject.point("outside")
        if step == 9:
            for value in self.optimizer.state[self.net.last.weight].values():
                value.zero_()
        self.net.seen = self.net.seen * 0.5
        for name, buffer in self.net.named_buffers():
            if name.endswith("running_mean"):
                buffer.mul_(0.99)


class Weights:
    """Nothing but clipping of the trained weights."""

    def __init__(self, net: Net) -> None:
        self.net = net
        self.modules: list[nn.Module] = []

    def boundary(self, step: int) -> None:
        """Before a batch."""

    def between(self, step: int, x: torch.Tensor) -> None:
        """Between forward and backward."""

    def before(self, step: int) -> None:
        """Between backward and the update."""

    def after(self, step: int) -> None:
        """After the update."""
        inject.point("outside")
        for parameter in self.net.first.parameters():
            with torch.no_grad():
                parameter.mul_(0.999).clamp_(-0.2, 0.2)
        inject.point("outside")


def main() -> Any:
    parser = argparse.ArgumentParser()
    parser.add_argument("--what", choices=["averages", "by-hand", "weights"], required=True)
    parser.add_argument("--begin", type=int, default=0, help="change nothing before this step")
    parser.add_argument("--forget", action="store_true", help="do not say that there are averages")
    parser.add_argument("--pull", action="store_true", help="weights are drawn to the average")
    parser.add_argument("--world", type=int, default=int(os.environ["WORLD_SIZE"]), help="workers at the start")
    args = parser.parse_args()
    report = Report()
    if not os.environ.get(BASELINE):
        shared_core.install()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(3)
    net = Net()
    by_hand = args.what == "by-hand"
    ddp = nn.parallel.DistributedDataParallel(net, bucket_cap_mb=0.004, find_unused_parameters=by_hand)
    trained = [p for name, p in net.named_parameters() if not (by_hand and name.startswith("late."))]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    own: Any = ByHand(net, optimizer) if by_hand else Weights(net) if args.what == "weights" else Averages(net)
    data = TensorDataset(
        torch.randn(BATCH * 2 * STEPS // EPOCHS * args.world, 16, generator=torch.Generator().manual_seed(5))
    )
    sampler: DistributedSampler[Any] = DistributedSampler(data)
    loader = DataLoader(data, batch_size=2 * BATCH, sampler=sampler)
    torch.manual_seed(rank)
    np.random.seed(rank)
    random.seed(rank)
    job = shared_core.attach(ddp, optimizer, *([] if by_hand else [scheduler]), *([] if args.forget else own.modules))
    total = job.register(loss=0.0)

    def call(method: Callable[..., None], step: int, *more: Any) -> None:
        if step >= args.begin:
            method(step, *more)

    for epoch in job.epochs(EPOCHS):
        sampler.set_epoch(epoch)
        for _, (both,) in job.steps(loader):
            step = job.total_steps
            report.count(f"batch {step}")
            call(own.boundary, step)
            optimizer.zero_grad()
            for number, x in enumerate(both.chunk(2)):
                ddp.require_backward_grad_sync = number == 1
                loss = (ddp(x) - x[:, :4].sin()).square().mean()
                loss = loss + 1e-3 * sum(p.square().sum() for p in net.last.parameters())
                call(own.between, step, x)
                loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            call(own.before, step)
            optimizer.step()
            call(own.after, step)
            if args.pull:
                for mine, averaged in zip(net.parameters(), own.ema.module.parameters(), strict=True):
                    mine.data.lerp_(averaged.data, 0.01)
            if not by_hand:
                scheduler.step()
            summed = loss.detach().clone()
            dist.all_reduce(summed)
            total.loss += summed.item()
    modules = [net, *own.modules]
    digests = training_digest(modules, [optimizer], [] if by_hand else [scheduler], {"loss": total.loss})
    modes = digest([p.requires_grad for module in modules for p in module.parameters()])
    report.finish(digests | {"generators": generators_digest(), "modes": modes}, steps=STEPS)
    return end_group()


if __name__ == "__main__":
    group = main()  # let go of after the model, whose end would else hold the interpreter's lock

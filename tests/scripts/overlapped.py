"""Plain PyTorch with the update overlapped with communication: loops that it must leave as they are, and mistakes."""

from __future__ import annotations

import argparse
import random

import numpy as np
import torch
import torch.distributed as dist
from beginning import begin
from torch import nn

from tests.support.digest import digest, training_digest
from tests.support.report import Report, end_group, generators_digest

OPTIMIZERS = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},
    "nesterov": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "foreach": False},
    "Adam": {"lr": 0.01, "amsgrad": True, "foreach": True},
    "AdamW": {"lr": 0.01},
    "fused": {"lr": 0.01, "fused": True},
    "RMSprop": {"lr": 0.001, "centered": True, "momentum": 0.9},
    "Adafactor": {"lr": 0.01},
    "NAdam": {"lr": 0.01},
    "ASGD": {"lr": 0.01},
}
CLASSES = {"nesterov": "SGD", "fused": "AdamW"}


class Net(nn.Module):
    """Layers of one size, with BatchNorm and dropout."""

    def __init__(self, width: int, tied: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))
        self.norm = nn.BatchNorm1d(width)
        if tied:
            self.layers[3].weight = self.layers[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = nn.functional.dropout(torch.tanh(layer(x)), 0.1, self.training)
        return self.norm(x)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--optimizer", default="AdamW", choices=OPTIMIZERS)
    parser.add_argument(
        "--way", default="", help="of the loop: view, accumulate, closure, tied, outside, zeroed, average"
    )
    parser.add_argument(
        "--mistake", default="", help="clip, data, replaced, removed, rate, weight, skip, twice, unused"
    )
    args = parser.parse_args()
    report = Report()
    job = begin()
    rank = dist.get_rank()
    torch.manual_seed(0)
    net, extra = Net(24, args.way == "tied"), nn.Parameter(torch.ones(3))
    ddp = nn.parallel.DistributedDataParallel(
        net,
        bucket_cap_mb=0.002,
        gradient_as_bucket_view=args.way == "view",
        find_unused_parameters=args.mistake == "unused",
    )
    parameters = list(net.parameters())
    rest = parameters[4:] + ([extra] if args.way == "outside" else [])
    name = CLASSES.get(args.optimizer, args.optimizer)
    groups = [{"params": parameters[:4]}, {"params": rest, "lr": 0.02}]
    optimizer = getattr(torch.optim, name)(groups, **OPTIMIZERS[args.optimizer])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    average = [p.detach().clone() for p in parameters]
    loop = {"step": 0, "seen": "", "early": 0}

    def see(kind: str) -> None:
        grads = [p.grad for p in parameters]
        loop["seen"] = digest([loop["seen"], kind, grads, [float(g.norm()) for g in grads if g is not None]])

    def put_average(values: list[torch.Tensor]) -> None:
        for place, value in zip(average, values, strict=True):
            place.copy_(value)

    optimizer.register_step_pre_hook(lambda *_: see("before"))
    optimizer.register_step_post_hook(lambda *_: see("after"))
    torch.manual_seed(rank)
    np.random.seed(rank)
    random.seed(rank)
    if job is not None:
        job.attach([ddp], [optimizer])
        job.register("scheduler", scheduler.state_dict, scheduler.load_state_dict)
        job.register("loop", lambda: dict(loop), loop.update)
        job.register("average", lambda: average, put_average)

    def backward() -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * loop["step"] + rank)
        x = torch.randn(6, 24, generator=generator)
        if args.way == "accumulate":
            with ddp.no_sync():
                ddp(x.flip(0)).square().mean().backward()
        loss = (ddp(x) - x).square().mean() + extra.sum() * 0.1
        before = [p.detach().clone() for p in parameters]
        loss.backward()
        loop["early"] += any(not torch.equal(p, b) for p, b in zip(parameters, before, strict=True))
        return loss

    while loop["step"] < args.steps:
        if job is not None:
            job.step_boundary()
        report.count(f"batch {loop['step']}")
        optimizer.zero_grad(set_to_none=args.way != "zeroed")
        if args.way == "closure":
            optimizer.step(backward)
        else:
            backward()
            see("between")
            if loop["step"] == 4:
                mistake(args.mistake, ddp, optimizer)
            if loop["step"] != 4 or args.mistake != "skip":
                optimizer.step()
        with torch.no_grad():
            for kept, parameter in zip(average, parameters, strict=True):
                kept.lerp_(parameter, 0.1)
            if args.way == "average" and loop["step"] % 4 == 3:  # the script changes weights outside updates
                parameters[0].copy_(average[0])
        scheduler.step()
        loop["step"] += 1
    digests = training_digest(net, [optimizer], [scheduler], {"extra": extra, "average": average, "seen": loop["seen"]})
    report.finish(digests | {"generators": generators_digest()}, early=loop["early"])
    group = end_group()
    del group


def mistake(name: str, ddp: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """What a script may do between backward and step, and an update that has been made cannot follow."""
    weight = next(ddp.parameters())
    assert weight.grad is not None
    if name == "clip":
        nn.utils.clip_grad_norm_(ddp.parameters(), 1e-3)
    elif name == "data":
        weight.grad.data.clamp_(-1e-6, 1e-6)
    elif name == "replaced":
        weight.grad = weight.grad * 2
    elif name == "removed":
        weight.grad = None
    elif name == "rate":
        optimizer.param_groups[1]["lr"] *= 0.5
    elif name == "weight":
        with torch.no_grad():
            weight.mul_(0.5)
    elif name == "twice":
        ddp(torch.ones(6, 24)).square().mean().backward()


if __name__ == "__main__":
    main()

"""Compiled models: where ``torch.compile`` stands, its backend, and graphs that DDP is told not to change."""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from beginning import begin
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from tests.support.digest import training_digest
from tests.support.report import Report, end_group

#: Two layers are more than a bucket.
WIDTH = 400


class Net(nn.Module):
    """Layers, some of which may be used twice, and one that may not be used at all."""

    def __init__(self, *, twice: bool, again: bool, unused: bool, norm: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, WIDTH), nn.Linear(WIDTH, 4)
        self.middle, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH) if norm else nn.Identity()
        if unused:
            self.unused = nn.Linear(WIDTH, WIDTH)
        self.twice, self.again = twice, again

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(torch.relu(self.first(x)))
        for _ in range(2 if self.twice else 1):
            y = checkpoint(self.middle, x, use_reentrant=True) if self.again else self.middle(x)
            x = torch.nn.functional.dropout(torch.tanh(y), 0.1)
        return self.last(torch.relu(self.other(x)))


def wrapped(net: nn.Module, where: str, backend: str, **options: bool) -> tuple[nn.Module, nn.Module]:
    """The module that is called, and the one that is attached."""
    ddp = nn.parallel.DistributedDataParallel
    options |= {"bucket_cap_mb": 1}  # of a smaller one Dynamo's optimizer for DDP makes nothing
    if where == "outer":
        inside = ddp(net, **options)
        return torch.compile(inside, backend=backend), inside
    if where == "outer_attached":
        whole = torch.compile(ddp(net, **options), backend=backend)
        return whole, whole
    if where == "inner":
        whole = ddp(torch.compile(net, backend=backend), **options)
    elif where == "in_place":
        net.compile(backend=backend)
        whole = ddp(net, **options)
    elif where == "whole_in_place":
        whole = ddp(net, **options)
        whole.compile(backend=backend)
    else:
        whole = ddp(net, **options)
    return whole, whole


def sharded(net: nn.Module, where: str, backend: str) -> tuple[nn.Module, nn.Module]:
    """The same for ``fully_shard``."""
    if where == "inner":
        net.middle.compile(backend=backend)
    fully_shard(net.middle)
    fully_shard(net)
    return (torch.compile(net, backend=backend) if where == "outer" else net), net


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--where", default="outer")
    parser.add_argument("--backend", default="aot_eager")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--shard", action="store_true", help="with fully_shard")
    parser.add_argument("--static", action="store_true")
    parser.add_argument("--find", action="store_true", help="find_unused_parameters")
    parser.add_argument("--unused", action="store_true")
    parser.add_argument("--twice", action="store_true")
    parser.add_argument("--again", action="store_true", help="the gradients of a layer come twice in a backward")
    parser.add_argument("--norm", action="store_true")
    parser.add_argument("--view", action="store_true")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--uneven", action="store_true", help="every third batch is smaller")
    args = parser.parse_args()
    report = Report()
    job = begin()
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = Net(twice=args.twice or args.again, again=args.again, unused=args.unused, norm=args.norm)
    if args.shard:
        model, attached = sharded(net, args.where, args.backend)
    else:
        options = {
            "static_graph": args.static,
            "find_unused_parameters": args.find,
            "gradient_as_bucket_view": args.view,
        }
        model, attached = wrapped(net, args.where, args.backend, **options)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    torch.manual_seed(rank)
    loop = {"step": 0, "loss": 0.0}
    if job is not None:
        job.attach([attached], [optimizer])
        job.register("loop", lambda: dict(loop), loop.update)
    while loop["step"] < args.steps:
        if job is not None:
            job.step_boundary()
        step = int(loop["step"])
        report.count(f"batch {step}")
        optimizer.zero_grad()
        for micro in range(args.accumulate):
            rows = 5 if args.uneven and step % 3 == 2 else 8
            x = torch.randn(rows, 16)
            last = micro == args.accumulate - 1
            if not args.shard and not last and step:  # in the first, DDP may have to learn a static graph
                with attached.no_sync():
                    (model(x) - x[:, :4].sin()).pow(2).mean().backward()
            else:
                loss = (model(x) - x[:, :4].sin()).pow(2).mean()
                loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        loop["loss"] += loss.item()
        loop["step"] += 1
    report.finish(training_digest(net, [optimizer], [], loop), **loop)
    group = end_group()
    del model, attached, net, group


if __name__ == "__main__":
    main()

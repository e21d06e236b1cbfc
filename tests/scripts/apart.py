"""Plain PyTorch in ways by which ranks train something apart: refused where it would be attached, kept where it is
registered."""

from __future__ import annotations

import argparse
import os
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import shared_core
from tests.support.digest import training_digest
from tests.support.report import Report, end_group

WAYS = ("join", "hook", "group", "zero", "averager", "inside", "forgotten", "experts", "registered", "wrapped")


class Wrapper(torch.optim.Optimizer):
    """Has an attached optimizer make its steps."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.step_inside = inner.step

    def step(self, closure: Any = None) -> None:
        self.step_inside()


def optimizer_of(way: str, model: nn.Module) -> Any:
    """The optimizer of a way."""
    if way == "zero":
        return ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=1e-2)
    plain = torch.optim.Adam(model.parameters(), lr=1e-2)
    return PostLocalSGDOptimizer(plain, PeriodicModelAverager(4)) if way == "averager" else plain


def train() -> dist.ProcessGroup:
    parser = argparse.ArgumentParser()
    parser.add_argument("way", choices=WAYS)
    way = parser.parse_args().way
    report = Report()
    if not os.environ.get("SWIFT_BASELINE"):
        shared_core.install()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(3)
    groups = [dist.new_group([each]) for each in range(dist.get_world_size())]
    net = nn.Linear(4, 4)
    model = DistributedDataParallel(net, process_group=groups[rank] if way == "group" else None)
    if way == "hook":
        model.register_comm_hook(powerSGD_hook.PowerSGDState(None), powerSGD_hook.powerSGD_hook)
    optimizer = optimizer_of(way, model)
    torch.manual_seed(rank)
    expert = nn.Linear(4, 4)
    its_own = torch.optim.Adam(expert.parameters(), lr=1e-2)
    if way == "inside":  # of a wrapper's two optimizers only the outer one is attached
        job = shared_core.attach(model, torch.optim.SGD(net.parameters()))
    elif way == "experts":
        job = shared_core.attach(model, expert, optimizer, its_own)
    else:
        job = shared_core.attach(model, *([] if way == "forgotten" else [optimizer]))
        job.register(expert, its_own)
    total = job.register(loss=0.0)
    stepped = Wrapper(optimizer) if way == "wrapped" else optimizer
    with model.join() if way == "join" else nullcontext():
        for index, _ in job.steps(range(6)):
            report.count(f"batch {index}")
            loss = (model(expert(torch.randn(8, 4)).tanh()) - 1.0).square().mean()
            for each in (optimizer, its_own):
                each.zero_grad()
            loss.backward()
            for each in (stepped, its_own):
                each.step()
            total.loss += loss.item()
    report.finish(training_digest([net, expert], [optimizer, its_own], [], vars(total)), loss=total.loss)
    return end_group()


if __name__ == "__main__":
    group = train()  # let go of after the model

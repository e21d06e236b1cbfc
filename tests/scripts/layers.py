"""Plain PyTorch whose layers change while it trains, and scripts that attach several times."""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import prune
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, WeightedRandomSampler

import shared_core
from tests.support.digest import training_digest
from tests.support.report import Report, end_group

DATA = torch.randn(40, 4, generator=torch.Generator().manual_seed(5))


class Lazy(nn.Module):
    """Registers its buffers when it sees the first batch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "mean"):
            self.register_buffer("mean", x.detach().mean(0))
            self.register_buffer("seen", torch.tensor(0.0), persistent=False)
        self.seen += 1
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean / self.seen


class Odd(torch.optim.SGD):
    """Keeps a list of each parameter."""

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter].setdefault("norms", []).append(float(parameter.norm()))
        return super().step(closure)


class Own(torch.optim.Optimizer):
    """Needs all gradients, counts its steps, and draws parameters to slow ones without any."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05})
        self.calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.calls += 1
        for parameter in self.param_groups[0]["params"]:
            slow = self.state[parameter].setdefault("slow", parameter.clone())
            parameter -= 0.05 / self.calls * parameter.grad.double().float()
            slow += 0.1 * (parameter - slow)
            parameter.copy_(0.9 * parameter + 0.1 * slow)


def counting(layer: nn.Module, _: Any, output: torch.Tensor) -> torch.Tensor:
    layer.calls += 1
    return output * (1 + 0.01 * layer.calls)


def network(part: str) -> nn.Sequential:
    torch.manual_seed(3)
    middle = Lazy() if part == "buffers" else nn.BatchNorm1d(8)
    net = nn.Sequential(nn.Linear(4, 8), middle, nn.Tanh(), nn.Linear(8, 1))
    if part == "attributes":
        net[0].calls = 0
        net[0].register_forward_hook(counting)
    return net


def train(part: str, net: nn.Sequential, report: Report) -> torch.optim.Optimizer:
    model = nn.parallel.DistributedDataParallel(net, broadcast_buffers=False, find_unused_parameters=part == "head")
    optimizer: torch.optim.Optimizer
    if part == "own":
        optimizer = Own(net.parameters())
    else:
        optimizer = (Odd if part == "list" else torch.optim.SGD)(net.parameters(), lr=0.05, momentum=0.9)
    job = shared_core.attach(model, optimizer)
    sampler: DistributedSampler[Any] = DistributedSampler(DATA)
    loader = DataLoader(DATA, 4, sampler=sampler)
    weights = WeightedRandomSampler(torch.ones(40).tolist(), 20)
    if part == "weights":
        loader = DataLoader(DATA, 4, sampler=weights)
    view = net[0].weight.data if part == "views" else torch.zeros(())
    best: Any = None
    for epoch in job.epochs(3):
        sampler.set_epoch(epoch)
        for _, x in job.steps(loader):
            report.count("batch")
            optimizer.zero_grad()
            (model(x) - 1).square().mean().backward()
            optimizer.step()
            if part == "attributes":
                net[1].momentum *= 0.9
        if part == "views":  # nothing is copied: what is best follows the model and the optimizer
            net[3].bias.data += 1e-3 * view.sum()
            if best is None:
                array = net[0].bias.detach().numpy()
                best = net.state_dict(), optimizer.state_dict()
            net[3].bias.data += 1e-3 * float(array.sum())
            net.load_state_dict(best[0])
            optimizer.load_state_dict(best[1])
        if part == "between":
            with torch.no_grad():
                hard = DATA[(DATA @ net[0].weight.T).sum(1).argsort()[:8]]
            for _, (x,) in job.steps(DataLoader(TensorDataset(hard), 4)):
                (model(x) - 1).square().mean().backward()
                optimizer.step()
        if epoch == 0:
            weights.weights = DATA[:, 0].abs().double()
        if part == "head" and epoch == 1:
            net[3] = nn.Linear(8, 1).requires_grad_(False)
        if part == "pruned" and epoch == 0:
            prune.l1_unstructured(net[0], "weight", amount=0.3)
    return optimizer


def main() -> Any:
    parser = argparse.ArgumentParser()
    parser.add_argument("part")
    part = parser.parse_args().part
    report = Report()
    if not os.environ.get("SWIFT_BASELINE"):
        shared_core.install()
    dist.init_process_group("gloo")
    digests = {}
    for _ in range(3 if part == "folds" else 1):
        net = network(part)
        optimizer = train(part, net, report)
        found = {"calls": getattr(net[0], "calls", 0), "momentum": getattr(net[1], "momentum", 0.0)}
        digests = training_digest(net, [optimizer] if part != "list" else [], metrics=found)
    report.finish(digests)
    return end_group()


if __name__ == "__main__":
    group = main()  # let go of after the model

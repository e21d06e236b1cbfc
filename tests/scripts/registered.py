"""What is registered has a ``state_dict`` that does not hold what changes: metrics, and an object of the script."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
import torchmetrics
from torch import nn

import shared_core
from tests.support.digest import training_digest
from tests.support.report import Report, end_group


class Best:
    """Its ``state_dict`` leaves out how often it was asked."""

    def __init__(self) -> None:
        self.value, self.asked = 1e9, 0

    def look(self, loss: float) -> None:
        self.value, self.asked = min(self.value, loss), self.asked + 1

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def train() -> dist.ProcessGroup:
    report = Report()
    if not os.environ.get("SWIFT_BASELINE"):
        shared_core.install()
    dist.init_process_group("gloo")
    torch.manual_seed(3)
    net = nn.Linear(8, 1)
    model = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2, momentum=0.9)
    data = torch.randn(20, 8, generator=torch.Generator().manual_seed(dist.get_rank())).split(2)
    job = shared_core.attach(model, optimizer)

    def held() -> tuple[Any, ...]:
        """Not in a variable of the script: what is registered is found by the job alone."""
        metrics = torchmetrics.MetricCollection([torchmetrics.SumMetric(), torchmetrics.MaxMetric()])
        every = torchmetrics.MeanMetric(), metrics, torchmetrics.CatMetric(), Best()
        job.register(*every)
        return every

    mean, several, all_losses, best = held()
    for _ in job.epochs(2):
        for _, x in job.steps(list(data)):
            report.count("batch")
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            value = loss.detach()
            mean.update(value)
            several.update(value)
            all_losses.update(value)
            best.look(loss.item())
    values = {
        "mean": mean.compute().item(),
        "all": all_losses.compute().tolist(),
        "best": best.value,
        "asked": best.asked,
        **{name: value.item() for name, value in several.compute().items()},
    }
    report.finish(training_digest(net, [optimizer], [], values), values=values)
    return end_group()


if __name__ == "__main__":
    group = train()  # let go of after the model

"""Loops whose items, or what is made of them, are held by a running expression, which no variable shows."""

from __future__ import annotations

import argparse
import os
import random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shared_core
from tests.support.digest import digest, training_digest
from tests.support.report import Report, end_group, generators_digest

WAYS = "list sum generator map added attribute equal epochs loaders counted while".split()


class Sums:
    loss = 0.0


def train() -> dist.ProcessGroup:
    parser = argparse.ArgumentParser()
    parser.add_argument("way", choices=WAYS)
    way = parser.parse_args().way
    report = Report()
    if not os.environ.get("SWIFT_BASELINE"):
        shared_core.install()
    dist.init_process_group("gloo")
    torch.manual_seed(3)
    np.random.seed(3)
    random.seed(3)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    model = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2, momentum=0.9)
    loader = DataLoader(TensorDataset(torch.randn(80, 8)), batch_size=4, shuffle=True)
    job = shared_core.attach(model, optimizer)

    def update(item: Any) -> float:
        report.count("batch")
        loss = model(item[1][0]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.item())

    def losses() -> Any:
        for item in job.steps(loader):
            yield update(item)

    def epoch(batches: Any) -> float:
        total = 0.0
        for item in job.steps(batches):
            total += update(item)
        return total

    rows: list[Any] = []
    total, sums, best = 0.0, Sums(), 1e9
    if way == "epochs":
        rows = [epoch(loader) for _ in job.epochs(3)]
    for number in job.epochs(3) if way != "epochs" else ():
        steps = job.steps(loader)
        if way == "counted":
            for _ in range(15):
                item = next(steps)
                total += update(item)
        elif way == "while":
            count = 0
            while count < 15:
                item = next(steps)
                total += update(item)
                count += 1
        elif way == "list":
            rows.append([update(item) for item in steps])
        elif way == "sum":
            rows.append(sum(update(item) for item in steps))
        elif way == "generator":
            rows.append(max(losses()))
        elif way == "map":
            rows.append(list(map(update, steps)))
        elif way == "added":
            while len(rows) < 20 * (number + 1):
                rows.append(number)
                total += update(next(steps))
        elif way == "attribute":
            while len(rows) < 20 * (number + 1):
                rows.append(number)
                sums.loss = sums.loss + update(next(steps))
        elif way == "loaders":
            rows.append([epoch(each) for each in (loader, loader)])
        else:  # what has been read before is the same in a replacement
            total += epoch(loader)
            best = min(best, number - epoch(loader))
    found = {"rows": rows, "numbers": [total, sums.loss, best]}
    report.finish(
        training_digest(net, [optimizer], [], {}) | {"found": digest(found), "generators": generators_digest()}
    )
    return end_group()


if __name__ == "__main__":
    group = train()  # let go of after the model

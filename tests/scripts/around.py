"""Loops that go through ``enumerate``, ``zip`` and others around what this product gives them."""

from __future__ import annotations

import argparse
import itertools
import os
import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.support.digest import training_digest
from tests.support.report import Report, end_group, generators_digest

SIZES = [float(number) for number in range(100)]


class Pairs:
    """An iterator of the script's own around another."""

    def __init__(self, items: Any) -> None:
        self.items = iter(items)

    def __iter__(self) -> Pairs:
        return self

    def __next__(self) -> Any:
        return 0, next(self.items)


#: What gives (number, batch) of what ``steps`` gives.
WAYS: dict[str, Callable[[Any], Iterable[Any]]] = {
    "enumerate": lambda steps: ((number, batch) for number, (_, batch) in enumerate(steps, 5)),
    "generator": lambda steps: enumerate(batch for _, batch in steps),
    "own": lambda steps: ((number, batch) for number, (_, (_, batch)) in enumerate(Pairs(steps))),
    "some": lambda steps: enumerate(batch for number, batch in steps if number % 3),
    "zip": lambda steps: ((size, batch) for (_, batch), size in zip(steps, SIZES)),  # noqa: B905
    "count": lambda steps: ((size, batch) for (_, batch), size in zip(steps, itertools.count(3))),  # noqa: B905
    "both": lambda steps: ((n + m, batch) for n, (m, (_, batch)) in enumerate(enumerate(steps), 1)),
    "map": lambda steps: map(lambda step, size: (size, step[1]), steps, SIZES),
    "first": lambda steps: ((size, batch) for size, (_, batch) in zip(SIZES, steps)),  # noqa: B905
    "islice": lambda steps: itertools.islice(steps, 7),
    "pairwise": lambda steps: ((0, one[1]) for one, _ in itertools.pairwise(steps)),
}


def train() -> dist.ProcessGroup | None:
    parser = argparse.ArgumentParser()
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("--accelerate", action="store_true")
    args = parser.parse_args()
    report, stock = Report(), bool(os.environ.get("SWIFT_BASELINE"))
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    net: Any = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    data = TensorDataset(torch.randn(80, 8, generator=torch.Generator().manual_seed(5)))
    loader = DataLoader(data, batch_size=4, shuffle=args.accelerate)
    job: Any = None
    optimizer: Any = torch.optim.SGD(net.parameters(), lr=1e-2)
    if args.accelerate:
        from accelerate import Accelerator

        from accelerate_swift import SwiftPlugin

        job = None if stock else SwiftPlugin()
        accelerator = Accelerator(cpu=True, kwargs_handlers=[job] if job is not None else [])
        model, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    else:
        import shared_core

        if not stock:
            shared_core.install()
        dist.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(net)
        job = shared_core.attach(model, optimizer)
    epochs = range(3) if job is None else job.epochs(3)
    for turn, _ in enumerate(each for each in epochs):
        steps = ((0, batch) for batch in loader) if args.accelerate else job.steps(loader)
        for number, (x,) in WAYS[args.way](steps):
            report.count("batch")
            loss = model(x).square().mean() * (1.0 + 0.01 * number + 0.1 * turn)
            if args.accelerate:
                accelerator.backward(loss)
            else:
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    inner = getattr(optimizer, "optimizer", optimizer)
    report.finish(training_digest(net, [inner], [], {}) | {"generators": generators_digest()})
    if args.accelerate:
        accelerator.end_training()
        return None
    return end_group()


if __name__ == "__main__":
    group = train()  # let go of after the model

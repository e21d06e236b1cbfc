"""Plain PyTorch with ``shared_core.attach``: loops as people write them, one call of ``epochs`` for each form."""

from __future__ import annotations

import argparse
import os
import random
from collections.abc import Callable, Iterator
from itertools import chain, cycle, islice
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from tqdm import tqdm

import shared_core
from tests.support.digest import training_digest
from tests.support.report import Report, end_group, generators_digest

FORMS = (
    "tqdm fresh own_generator generator enumerate islice zip map wrapper list nested turns left empty rounds stream "
    "bare_generator workers agreed"
).split()


class Doubled:
    """A wrapper that shows nothing of the loader below."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.below = loader

    def __iter__(self) -> Iterator[Any]:
        for (x,) in self.below:
            yield [2 * x]


def negative(batch: list[torch.Tensor]) -> list[torch.Tensor]:
    return [-batch[0]]


def shaken(loader: DataLoader[Any]) -> Iterator[Any]:
    for (x,) in loader:
        yield [x + 0.01 * torch.rand(8)]


def train() -> dist.ProcessGroup:
    parser = argparse.ArgumentParser()
    parser.add_argument("forms", nargs="+", choices=[*FORMS, "shared_stream"])
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    report = Report()
    if not os.environ.get("SWIFT_BASELINE"):
        shared_core.install()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))
    model = nn.parallel.DistributedDataParallel(net, bucket_cap_mb=0.001)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = TensorDataset(torch.randn(40, 8, generator=torch.Generator().manual_seed(5)))
    sampler: DistributedSampler[Any] = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=5, sampler=sampler)
    own = torch.Generator().manual_seed(7 + rank)
    shuffled = DataLoader(data, batch_size=10, shuffle=True, generator=own)
    plain = DataLoader(data, batch_size=10, shuffle=True)
    listed = [
        DataLoader(data, batch_size=10, shuffle=True, generator=torch.Generator().manual_seed(i)) for i in range(9)
    ]
    stream = chain.from_iterable(cycle([shuffled]))
    noise = torch.Generator().manual_seed(70 + rank)
    torch.manual_seed(rank)
    np.random.seed(rank)
    random.seed(rank)

    def given_out(tensor: torch.Tensor) -> torch.Tensor:
        """Rank 0's, at all ranks."""
        tensor = tensor if rank == 0 else torch.empty_like(tensor)
        dist.broadcast(tensor, 0)
        return tensor

    def handed_on(tensor: torch.Tensor) -> torch.Tensor:
        """Rank 0's, at both ranks, by messages."""
        if rank == 0:
            dist.send_object_list([{"shape": tensor.shape}], 1)
            dist.isend(tensor, 1).wait()
            return tensor
        told: list[Any] = [None]
        dist.recv_object_list(told, 0)
        tensor = torch.empty(told[0]["shape"])
        dist.irecv(tensor, 0).wait()
        return tensor

    table, places = given_out(torch.rand(20_000)), given_out(torch.randperm(20_000))
    shift = handed_on(torch.rand(8, 3))
    job = shared_core.attach(model, optimizer)
    seen = job.register(loss=0.0, batches=0)

    def update(x: torch.Tensor, index: int) -> None:
        report.count(f"batch {index}")
        model(x + 0.1 * torch.randn(8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.batches += 1

    def simple(batches: Any) -> None:
        for index, (x,) in job.steps(batches):
            update(x, index)

    def nested(epoch: int) -> None:
        for index, (x,) in job.steps(loader):
            for inner, (y,) in job.steps(DataLoader(data, batch_size=20, shuffle=True)):
                update(x + y[:5], 10 * index + inner)

    def turns(epoch: int) -> None:
        first, second = job.steps(loader), job.steps(shuffled)
        for index, (x,) in first:
            update(x, index)
            if index % 2 == 0:
                other, (y,) = next(second)
                update(y, other)

    def left(epoch: int) -> None:
        for index, (x,) in job.steps(plain):
            if index == 0:
                continue
            update(x, index)
            if index == 2:
                break

    def empty(epoch: int) -> None:
        if epoch != 1:
            simple(loader)
        dist.all_reduce(torch.ones(1))
        simple([])

    def rounds(epoch: int) -> None:
        simple(islice(plain, 2))
        order = torch.randperm(40)  # between two passes
        later = islice(DataLoader(data, batch_size=10, sampler=order.tolist()), 3)
        simple(shuffled)
        simple(later)

    def bare(epoch: int) -> None:
        for index, (x,) in job.steps(loader):
            update(x + 0.1 * torch.randn(8, generator=noise), index)

    def agreed(epoch: int) -> None:
        for _ in range(2):
            order = given_out(torch.randperm(40))
            for index, (x,) in job.steps(DataLoader(data, batch_size=10, sampler=order[rank::2].tolist())):
                update(x + table[places[seen.batches]] + shift[:, 0], index)

    def endless(epoch: int) -> None:
        for index, (x,) in job.steps(stream):
            update(x, index)
            if index == 5:
                break

    forms: dict[str, Callable[[int], None]] = {
        "tqdm": lambda epoch: simple(tqdm(loader, disable=False)),
        "fresh": lambda epoch: simple(DataLoader(data, batch_size=10, shuffle=True)),
        "own_generator": lambda epoch: simple(DataLoader(data, batch_size=10, shuffle=True, generator=own)),
        "generator": lambda epoch: simple(shaken(shuffled)),
        "enumerate": lambda epoch: simple(batch for _, batch in enumerate(shuffled)),
        "islice": lambda epoch: simple(islice(plain, 3)),
        "zip": lambda epoch: simple([x + y[:5]] for (x,), (y,) in zip(loader, shuffled, strict=False)),
        "map": lambda epoch: simple(map(negative, plain)),
        "wrapper": lambda epoch: simple(Doubled(shuffled)),
        "list": lambda epoch: simple(listed[epoch]),
        "nested": nested,
        "turns": turns,
        "left": left,
        "empty": empty,
        "rounds": rounds,
        "stream": endless,
        "bare_generator": bare,
        "workers": lambda epoch: simple(islice(DataLoader(data, batch_size=10, shuffle=True, num_workers=1), 3)),
        "agreed": agreed,
        "shared_stream": lambda epoch: simple(islice(stream, 3)),
    }
    for form in args.forms:
        for epoch in job.epochs(args.epochs):
            sampler.set_epoch(epoch)
            forms[form](epoch)
            total = torch.tensor(float(seen.batches))
            dist.all_reduce(total)
            seen.loss += total.item()
            if form == "agreed" and epoch == 1:
                break
    report.finish(
        training_digest(net, [optimizer], [], vars(seen)) | {"generators": generators_digest()},
        own=own.initial_seed(),
        drawn=int(torch.randint(1 << 30, (), generator=own)),
        total=job.total_steps,
        **vars(seen),
    )
    return end_group()


if __name__ == "__main__":
    group = train()  # let go of after the model

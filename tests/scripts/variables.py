"""Plain PyTorch whose state is in plain variables: nothing is registered."""

from __future__ import annotations

import argparse
import array
import collections
import dataclasses
import decimal
import fractions
import itertools
import os
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import shared_core
from tests.support.digest import digest, training_digest
from tests.support.report import Report, end_group, generators_digest

Row = collections.namedtuple("Row", "loss number")  # noqa: PYI024 (as scripts write it)
SEEN = 0
BY_EPOCH: dict[int, float] = {}


@dataclasses.dataclass
class Meter:
    total: float = 0.0
    rows: list[Row] = dataclasses.field(default_factory=list)


class Slots:
    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0


class Tracker:
    made = 0

    def __init__(self) -> None:
        self.buffer: collections.deque[Row] = collections.deque(maxlen=7)
        self.meter, self.slots = Meter(), Slots()
        self.bytes, self.array = bytearray(4), array.array("d", [0.0, 0.0])
        self.exact, self.third = decimal.Decimal(0), fractions.Fraction(0)
        self.itself = self


def counter() -> Callable[[float], float]:
    total = 0.0

    def add(value: float) -> float:
        nonlocal total
        total += value
        return total

    return add


def counted(function: Callable[..., Any]) -> Callable[..., Any]:
    calls = 0

    def call(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        return function(*args, calls)

    return call


class Settings:
    class Inner:
        _seen = 0

    @counted
    def called(self, times: int) -> int:
        return times

    @staticmethod
    @counted
    def noted(times: int) -> int:
        return times


THREAD = threading.local()
THREAD.seen = 0


class Signs(torch.optim.Optimizer):
    """Keeps what it needs outside of its state, as scripts do it."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-3})
        self.means: dict[int, torch.Tensor] = collections.defaultdict(lambda: torch.zeros(()))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for each in self.param_groups[0]["params"]:
            self.means[id(each)] = 0.9 * self.means[id(each)] + each.grad
            each.mean = getattr(each, "mean", 0.0) * 0.9 + each.grad
            each.sub_((self.means[id(each)] + each.mean).sign(), alpha=1e-3)


def numbers() -> Iterator[int]:
    yield from itertools.count()


def plain(value: Any) -> Any:
    """Of an object, all that it holds."""
    if isinstance(value, Tracker):
        meter = value.meter
        return [
            [tuple(each) for each in value.buffer],
            [meter.total, [tuple(each) for each in meter.rows]],
            [value.slots.value, bytes(value.bytes), list(value.array), str(value.exact), str(value.third)],
            [Tracker.made, value.itself is value],
        ]
    return value


def train() -> dist.ProcessGroup:
    global SEEN
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices="breaks mean kinds order left late places parts unrestorable ignored".split())
    args = parser.parse_args()
    report = Report()
    if not os.environ.get("SWIFT_BASELINE"):
        shared_core.install()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))
    model = nn.parallel.DistributedDataParallel(net, bucket_cap_mb=0.001)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if args.part == "places":
        optimizer = Signs(model.parameters())
    data = TensorDataset(torch.randn(80, 8, generator=torch.Generator().manual_seed(5)))
    sampler: DistributedSampler[Any] = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    torch.manual_seed(rank)
    np.random.seed(rank)
    random.seed(rank)
    job = shared_core.attach(model, optimizer)

    def update(x: torch.Tensor) -> float:
        report.count("batch")
        loss = model(x + 0.1 * torch.randn(8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.item())

    found: dict[str, Any] = {}
    if args.part == "breaks":
        for _ in job.epochs(5):
            n = 0
            for (x,) in (batch for _, batch in job.steps(loader)):
                update(x)
                n += 1
                if n == 9:
                    break
            found["n"] = n
    elif args.part == "mean":
        total, count, best, history, loss = 0.0, 0, 1e9, [], torch.zeros(())
        for epoch in job.epochs(3):
            for _, (x,) in job.steps(loader):
                loss = model(x).square().mean()
                total += loss.item()
                count += 1
                best = min(best, loss.item())
                history.append(update(x))
            BY_EPOCH[epoch] = loss.item()
        found = {"mean": total / count, "best": best, "history": history, "by epoch": BY_EPOCH, "last": loss.item()}
    elif args.part == "kinds":
        tracker, add, own, numpy = Tracker(), counter(), random.Random(3 + rank), np.random.default_rng(rank)
        alias, table, state = tracker.meter.rows, np.zeros(5), torch.zeros(3)
        by_name: dict[str, Any] = collections.defaultdict(list)
        best: dict[str, Any] | None = None
        for _ in job.epochs(3):
            for step, (x,) in job.steps(loader):
                value = update(x * own.random() + numpy.random())
                row = Row(value, step)
                tracker.buffer.append(row)
                tracker.meter.total += value
                alias.append(row)
                tracker.slots.value += value
                tracker.bytes[step % 4] += 1
                tracker.array[step % 2] += value
                tracker.exact += 1
                tracker.third += fractions.Fraction(1, 3)
                Tracker.made += 1
                SEEN += 1
                add(value)
                table[step % 5] += value
                state = 0.9 * state + value
                by_name[f"{step % 3}"].append(row)
                if step % 4 == 3:
                    best = {key: each.clone() for key, each in net.state_dict().items()}
        found = {
            "tracker": plain(tracker),
            "alias": alias is tracker.meter.rows,
            "others": [SEEN, add(0.0), own.random(), numpy.random(), table, state],
            "by name": {key: [tuple(each) for each in rows] for key, rows in by_name.items()},
            "best": best,
        }
    elif args.part == "order":
        order, own, wheel = list(range(len(data))), random.Random(7), [0, 1, 2]
        for _ in job.epochs(4):
            own.shuffle(order)
            mine = order[rank::2]
            batches = [torch.stack([data[each][0] for each in mine[at : at + 8]]) for at in range(0, len(mine), 8)]
            for _, x in job.steps(batches):
                update(x * (1 + wheel[0]))
                wheel.append(wheel.pop(0))
        found |= {"order": order, "wheel": wheel}
    elif args.part == "late":
        for _ in job.epochs(3):
            for _, (x,) in job.steps(loader):
                value = update(x)
                SEEN += 1
                if SEEN > 5:
                    import late_state

                    late_state.add(value)
        found = {"first": late_state.FIRST, "seen": late_state.SEEN, "last": late_state.add(0.5)}
    elif args.part == "places":

        class Local:
            seen = 0

        delta, settings = torch.zeros(8, requires_grad=True), Settings()
        graph = torch.eye(8).to_sparse()
        for epoch in job.epochs(3):
            for step, (x,) in job.steps(loader):
                update(x + delta.detach() + torch.sparse.mm(graph, x.T).T)
                model(x + delta).sum().backward()  # its gradient is kept from batch to batch
                optimizer.zero_grad()
                delta.data.add_(delta.grad, alpha=1e-3)
                graph = (graph * 0.9 + torch.sparse_coo_tensor([[step % 8], [epoch]], [0.1], (8, 8))).coalesce()
                Settings.Inner._seen += 1
                Local.seen += settings.called() + Settings.noted()
                THREAD.seen += 1
                torch.backends.cuda.enable_flash_sdp(step % 3 > 0)
        flash = torch.backends.cuda.flash_sdp_enabled()
        found = {"delta": [delta.detach(), delta.grad], "graph": graph.to_dense(), "flash": flash}
        found["numbers"] = [Settings.Inner._seen, Local.seen, settings.called(), Settings.noted(), THREAD.seen]
    elif args.part == "parts":
        own, ring, table = torch.randn(60, 8), torch.zeros(12, 8), np.ones((40, 8), np.float32)
        rows, window, row = own[:4], ring[:4], table[0]
        for _ in job.epochs(3):
            for step, _ in job.steps(range(10)):
                update(rows + window + torch.from_numpy(row))
                window += 0.1 * rows
                row *= 0.9
                rows, window, row = own[5 * step : 5 * step + 4], ring[step % 8 : step % 8 + 4], table[step]
        found = {"own": own, "ring": ring, "table": table}
    elif args.part == "left":
        kept: list[torch.Tensor] = []
        for _ in job.epochs(3):
            for step, (x,) in job.steps(loader):
                update(x)
                if step % 2:
                    kept.append(x.mean(0))
        found["kept"] = torch.stack(kept)
    else:
        if args.part == "ignored":
            job.ignore("stream")
        stream = numbers()
        for _ in job.epochs(3):
            for _, (x,) in job.steps(loader):
                update(x)
                SEEN += next(stream)
        found["seen"] = SEEN
    report.finish(
        training_digest(net, [optimizer], [], {"found": digest(found)}) | {"generators": generators_digest()},
        found=repr(found),
    )
    return end_group()


if __name__ == "__main__":
    group = train()  # let go of after the model

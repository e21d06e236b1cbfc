"""Plain PyTorch as people write it by hand: state in objects of libraries, a resume of its own, updates without an
optimizer."""

from __future__ import annotations

import argparse
import contextvars
import ctypes
import decimal
import functools
import io
import logging
import multiprocessing
import os
import queue
import random
import re
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.quasirandom import SobolEngine
from torch.utils.data import DataLoader

import shared_core
from tests.support.digest import digest, training_digest
from tests.support.report import Report, end_group, generators_digest

FILE = "last.pt"
CONTEXT, LOCAL = contextvars.ContextVar("context", default=0.0), threading.local()


class Only:
    """There is one, which the class keeps."""

    _made: Only | None = None

    def __init__(self) -> None:
        self.count = 0

    @classmethod
    def get(cls) -> Only:
        if cls._made is None or cls._made.count > 5:
            cls._made = cls()
        return cls._made

    def factor(self, value: float) -> float:
        return value


def tenfold(self: Only, value: float) -> float:
    return 10.0 * value


@functools.cache
def registry() -> dict[str, float]:
    return {"seen": 0.0}


def smaller(one: float, other: float) -> float:
    return min(one, other)


def larger(one: float, other: float) -> float:
    return max(one, other)


choose = smaller


def places(net: nn.Module) -> Callable[[int], float]:
    """Keeps something in every place that is easily forgotten. Returns the factor of a step, which depends on all."""
    latent = torch.zeros(2, requires_grad=True)
    settings = types.ModuleType("settings")
    pattern, rate, logger = re.compile("a"), lambda step: 0.5 * step, logging.getLogger("own")
    LOCAL.total = settings.rate = torch.seen = 0.0  # type: ignore[attr-defined]
    loader, kept = DataLoader([0]), [Only(), Only()]
    loader.read, weak = [], weakref.WeakKeyDictionary[Only, float]()  # type: ignore[attr-defined]
    registry()

    class Here:
        count = 0

    def step(number: int) -> float:
        global choose
        nonlocal pattern, rate
        Only.get().count += 1
        Here.count += 2
        CONTEXT.set(CONTEXT.get() + 0.5)
        LOCAL.total += number
        torch.seen += 0.5  # type: ignore[attr-defined]
        loader.read.append(number)  # type: ignore[attr-defined]
        weak[kept[number % 2]] = weak.get(kept[number % 2], 0.0) + number
        settings.rate += 0.25
        registry()["seen"] += 1.0
        (latent * number).sum().backward()
        for parameter in net.parameters():
            parameter.average = getattr(parameter, "average", 0.0) * 0.5 + parameter.detach().mean().item()
        if number == 3:
            choose, pattern = larger, re.compile("b")
            rate = lambda step: 0.25 * step + 1.0  # noqa: E731
            Only.factor = tenfold  # type: ignore[method-assign]
            logger.setLevel(logging.ERROR)
        found = [Only.get().count, Here.count, CONTEXT.get(), LOCAL.total, settings.rate, registry()["seen"]]
        found += [choose(1.0, 2.0), rate(number), float(pattern.pattern == "b"), float(logger.isEnabledFor(30))]
        found += [torch.seen, len(loader.read), *(weak.get(each, 0.0) for each in kept)]  # type: ignore[attr-defined]
        found += [kept[0].factor(1.0)]
        found += [latent.grad.sum().item(), *(parameter.average for parameter in net.parameters())]
        return 1.0 + 0.001 * sum(place * value for place, value in enumerate(found, 1))

    return step


class Adaptive(torch.optim.SGD):
    """Its rate depends on its momenta at all ranks; it remembers them."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=1e-2, momentum=0.9)
        self.norms: list[float] = []

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        dist.all_reduce(norm := sum(each["momentum_buffer"].norm() for each in self.state.values()))
        self.norms.append(norm.item())
        self.param_groups[0]["lr"] = 1e-2 / (1.0 + norm.item())


class Dealt(torch.optim.Optimizer):
    """Momentum as distributed Muon keeps it: each rank updates some parameters, and is given the rest."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for number, parameter in enumerate(self.param_groups[0]["params"]):
            owner = number % dist.get_world_size()
            if owner == dist.get_rank():
                momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                momentum.lerp_(parameter.grad, 0.1)
                parameter.sub_(momentum, alpha=self.param_groups[0]["lr"])
            dist.broadcast(parameter, owner)


def hooked(net: nn.Sequential, optimizer: torch.optim.Optimizer) -> list[Any]:
    """What hooks of a layer and of the optimizer note, and have no other place for."""
    found: list[Any] = []

    def notes() -> tuple[Callable[..., None], Callable[..., None]]:
        count, average = 0, torch.zeros(len(parameters_to_vector(net.parameters())))

        def forward(*_: Any) -> None:
            nonlocal count
            count += 1

        def stepped(*_: Any) -> None:
            average.lerp_(parameters_to_vector(net.parameters()).detach(), 0.1)
            found.append((count, average.sum().item()))

        return forward, stepped

    forward, stepped = notes()
    net[0].register_forward_hook(forward)
    optimizer.register_step_post_hook(stepped)
    return found


class Libraries:
    """State in objects of Python's and torch's own classes."""

    def __init__(self) -> None:
        self.args, self.queue = argparse.Namespace(step=0), queue.PriorityQueue[float]()
        self.shared, self.numbers = multiprocessing.Value("d", 0.0), multiprocessing.Array("i", 3)
        self.c, self.text, self.bytes = ctypes.c_double(0.0), io.StringIO(), io.BytesIO()
        self.sobol = SobolEngine(1, scramble=True, seed=3)

    def step(self, value: float) -> float:
        """One more step; depends on all of it."""
        self.args.step += 1
        self.queue.put(-value)
        self.shared.value += value
        self.numbers[1] += 1
        self.c.value += 0.5
        self.text.write("x")
        self.bytes.write(b"xy")
        least = self.queue.get() if self.queue.qsize() > 3 else 0.0
        parts = [self.args.step, least, self.shared.value, self.numbers[1], self.c.value, self.sobol.draw(1).item()]
        return 1.0 + 0.01 * (sum(parts) + self.text.tell() + len(self.bytes.getvalue()))


def train() -> dist.ProcessGroup:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "part",
        choices="libraries settings places beside again iterator numbers list epochs by_hand divided "
        "adaptive dealt hooked reads lasting".split(),
    )
    part = parser.parse_args().part
    report = Report()
    if not os.environ.get("SWIFT_BASELINE"):
        shared_core.install()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    made = {"adaptive": Adaptive, "dealt": Dealt}.get(part, functools.partial(torch.optim.AdamW, lr=1e-2))
    optimizer: torch.optim.Optimizer = made(net.parameters())  # type: ignore[operator]
    found: list[Any] = []

    def gradients(factor: float = 1.0) -> float:
        report.count("batch")
        loss = net(torch.randn(8, 8, dtype=torch.float32)).square().mean() * factor
        net.zero_grad()
        loss.backward()
        return float(loss.item())

    def update(factor: float = 1.0) -> None:
        found.append(gradients(factor))
        for parameter in net.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()

    def save(place: int) -> None:
        if rank == 0:
            torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict(), "place": place}, f"{FILE}.new")
            os.replace(f"{FILE}.new", FILE)
        dist.barrier()

    start = 0
    if part in ("numbers", "list", "epochs") and os.path.exists(FILE):
        saved = torch.load(FILE)
        net.load_state_dict(saved["net"])
        optimizer.load_state_dict(saved["optimizer"])
        start = saved["place"]
    dist.barrier()  # all have looked for the file
    job = shared_core.attach(net) if part == "by_hand" else shared_core.attach(net, optimizer)
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(rank)
    if part == "libraries":
        held = Libraries()
        for _ in job.epochs(2):
            for step, _ in job.steps(range(8)):
                update(held.step(float(step)))
    elif part == "places":
        factor = places(net)
        for step, _ in job.steps(range(14)):
            update(factor(step))
    elif part == "settings":
        for epoch in job.epochs(3):
            for step, _ in job.steps(range(4)):
                if (epoch, step) == (1, 1):
                    torch.set_default_dtype(torch.float64)
                    decimal.getcontext().prec = 5
                    os.makedirs(f"folder{rank}", exist_ok=True)
                    os.chdir(f"folder{rank}")
                    os.environ["STAGE"] = "2"
                    torch.set_float32_matmul_precision("medium")
                    torch.backends.mkldnn.enabled = False
                    np.set_printoptions(precision=2)
                    logging.root.setLevel(logging.ERROR)
                noise = torch.rand(1).item()  # another number with each type
                seen = [
                    decimal.Decimal(1) / 3,
                    os.environ.get("STAGE", 0),
                    logging.root.level,
                    str(np.array([1 / 3]))[1:-1],
                ]
                seen += [noise, os.path.basename(os.getcwd()) == f"folder{rank}", torch.backends.mkldnn.enabled]
                seen += [torch.get_float32_matmul_precision() == "medium"]
                update(sum(place * float(each) for place, each in enumerate(seen, 1)))
    elif part == "beside":
        table, expert = nn.Linear(8, 1), nn.Linear(1100, 1100)  # the expert is too large to be a variable
        adagrad, adam = torch.optim.Adagrad(table.parameters()), torch.optim.Adam(expert.parameters())
        job.register(expert, adam)
        for _, _ in job.steps(range(14)):
            loss = table(torch.randn(4, 8)).square().mean() + expert(torch.randn(1, 1100)).square().mean()
            adagrad.zero_grad()
            adam.zero_grad()
            loss.backward()
            adagrad.step()
            adam.step()
            update(1.0 + loss.item())
        found.append(digest({"beside": [table.state_dict(), adagrad.state_dict(), expert.state_dict()]}))
    elif part in ("adaptive", "dealt", "hooked", "reads"):
        noted = hooked(net, optimizer) if part == "hooked" else getattr(optimizer, "norms", [])
        for step, _ in job.steps(range(14)):
            if part == "reads" and step:
                found += [each["exp_avg"].sum().item() for each in optimizer.state.values()]
            update()
        found.append(noted)
    elif part == "again":
        for _, _ in job.steps(range(6)):
            update()
        first = end_group()  # let go of after the second
        dist.init_process_group("gloo")
        total = torch.tensor(found[-1])
        dist.all_reduce(total)
        found += [total.item(), first is None]
    elif part == "iterator":
        items = iter(DataLoader(torch.arange(20.0)))
        for _, _ in job.steps(range(12)):
            update(float(next(items)))
    elif part == "lasting":
        evaluated = DataLoader(torch.arange(4), num_workers=1, persistent_workers=True)
        for step, _ in job.steps(range(8)):
            update(sum(map(float, evaluated)) if step % 3 == 2 else 1.0)
    elif part in ("numbers", "list"):
        for step, _ in job.steps(range(start, 16) if part == "numbers" else list(range(start, 16))):
            update(1.0 + step)
            if step % 5 == 4:
                save(step + 1)
    elif part == "epochs":
        for count, epoch in enumerate(job.epochs(start + 4, start=start)):
            for step, _ in job.steps(range(4)):
                update(1.0 + count + epoch + step)
            save(epoch + 1)
    elif part == "by_hand":
        for _ in job.epochs(2):
            for _, _ in job.steps(range(8)):
                found.append(gradients())
                gradient = torch.cat([each.grad.flatten() for each in net.parameters() if each.grad is not None])
                dist.all_reduce(gradient)
                weights = parameters_to_vector(net.parameters()).detach() - 0.01 * gradient / world
                vector_to_parameters(weights, net.parameters())  # past all counters of changes
                dist.all_reduce(loss := torch.tensor(found[-1]))
                found.append(loss.item())
    else:
        mesh = init_device_mesh("cpu", (world,))
        share = nn.Linear(8, 8)
        for name, parameter in list(share.named_parameters()):
            share.register_parameter(name, nn.Parameter(distribute_tensor(parameter.detach(), mesh)))
        job.register(share)
        for _, _ in job.steps(range(4)):
            update()
    digests = training_digest(net, [optimizer], [], {"found": digest({"found": found})})
    report.finish(digests | {"generators": generators_digest()})
    return end_group()


if __name__ == "__main__":
    group = train()  # let go of after the model

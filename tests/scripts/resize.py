"""Training while the number of workers changes. The parameters count how often each sample was used.

The gradient of ``uses`` is -1 for each sample of the whole batch whatever the number of workers, if the average over
workers is right, and its learning rate is 1: after each epoch ``uses`` says what the updates in the state have seen.
"""

from __future__ import annotations

import argparse
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

import shared_core
from shared_core.protocol import worker_env
from shared_core.worker import link
from tests.support.digest import digest, training_digest
from tests.support.report import Report, end_group

SAMPLES = 240


class Numbered(Dataset[tuple[int, torch.Tensor]]):
    """Samples that know their number."""

    def __init__(self) -> None:
        self.data = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(5))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, self.data[index] + 0.01 * torch.randn(8)


class Stream(IterableDataset[tuple[int, torch.Tensor]]):
    """The samples of one rank, one after the other."""

    def __iter__(self) -> Iterator[tuple[int, torch.Tensor]]:
        data = Numbered()
        return (data[index] for index in range(dist.get_rank(), SAMPLES, dist.get_world_size()))


class Net(nn.Module):
    """A small network, and the uses of each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
        self.uses = nn.Parameter(torch.zeros(SAMPLES))

    def forward(self, indices: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.net(x).squeeze(1), self.uses[indices]


def whole(tensor: Any) -> torch.Tensor:
    """All of it, where it is divided over the ranks."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # type: ignore[no-any-return]


def shard(model: Net, replicas: int) -> None:
    """Divide it over the ranks, with so many replicas of each shard."""
    size = dist.get_world_size()
    shape = (replicas, size // replicas) if replicas > 1 else (size,)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    fully_shard(model.net, mesh=mesh)
    fully_shard(model, mesh=mesh)


class First:
    """Parameters, and moments of a divided model, as the first batch of this process finds them; known to nobody who
    could put it back.

    With ``HOLD_AT`` in the environment a process waits in that batch to be killed.
    """

    def __init__(self) -> None:
        self.parameters = ""

    def batch(self, number: int, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer] = ()) -> None:
        """A batch begins; batches are counted over all epochs, from 0."""
        if not self.parameters:
            found = [whole(parameter.detach()) for parameter in model.parameters()]
            if isinstance(model, FSDPModule):
                states = [state for each in optimizers for state in each.state.values()]
                found += [whole(state[key]) for state in states for key in ("exp_avg", "exp_avg_sq") if key in state]
            self.parameters = digest(found)
        if os.environ.get("HOLD_AT") == str(number):
            threading.Event().wait()


FIRST = First()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3, help="at least so many")
    parser.add_argument("--until", type=int, default=0, help="continue until there are so many workers")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--stream", action="store_true", help="an IterableDataset")
    parser.add_argument("--last", type=int, default=-1, help="a rank that fails when all others have finished")
    parser.add_argument("--optimizer", default="AdamW")
    parser.add_argument("--one-optimizer", action="store_true")
    parser.add_argument("--sharded", type=int, default=0, help="replicas of each shard; 0 for DDP")
    parser.add_argument("--replacements-hang", action="store_true", help="before the loop, for ever")
    args = parser.parse_args()
    if args.replacements_hang and worker_env.env().incarnation:
        threading.Event().wait()
    report = Report()
    shared_core.install()
    dist.init_process_group("gloo")
    world, dist_rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(3)
    model = Net()
    if args.sharded:
        shard(model, args.sharded)
    ddp = model if args.sharded else nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.001)
    kind = getattr(torch.optim, args.optimizer)
    optimizers = [kind(model.net.parameters(), lr=1e-2), torch.optim.SGD([model.uses], lr=1.0)]
    if args.one_optimizer:
        both = [{"params": list(model.net.parameters()), "momentum": 0.9}, {"params": [model.uses], "lr": 1.0}]
        optimizers = [torch.optim.SGD(both, lr=0.01)]
    data = Numbered()
    sampler: DistributedSampler[object] = DistributedSampler(data, shuffle=True)
    if args.stream:
        loader = DataLoader(Stream(), batch_size=4)
    else:
        loader = DataLoader(data, batch_size=4, sampler=sampler, num_workers=args.workers)
    torch.manual_seed(dist_rank)
    job = shared_core.attach(ddp, *optimizers, loader)
    seen = job.register(losses=[], exact=[], worlds=[], used=[], total=0.0, batches=0)
    counted = 0  # begins again with another number of workers
    for epoch in job.epochs(200):
        sampler.set_epoch(epoch)
        for _, (indices, x) in job.steps(loader):
            step = job.total_steps
            report.count(f"batch {step}")
            FIRST.batch(step, model, optimizers)
            guess, uses = ddp(indices, x)
            loss = (guess - x.sin().sum(1)).square().mean()
            for optimizer in optimizers:
                optimizer.zero_grad()
            (loss - world * uses.sum()).backward()
            for optimizer in optimizers:
                optimizer.step()
            total = loss.detach().clone()
            dist.all_reduce(total)
            seen.total += total.item() / world
            seen.batches += 1
            counted += 1
        seen.losses.append(seen.total / seen.batches)
        times = whole(model.uses.detach())
        seen.exact.append(bool((times == epoch + 1).all()))
        seen.worlds.append(world)
        seen.used.append(int(times.sum()))
        seen.total, seen.batches = 0.0, 0
        if epoch + 1 >= args.epochs and (not args.until or world == args.until):
            break
    report.finish(training_digest(model, optimizers, [], {}), **vars(seen), counted=counted, first=FIRST.parameters)
    group = end_group()
    if args.last == dist_rank and report.who["incarnation"] == 0:
        here = worker_env.env()
        store = link.connect_store(where=here)
        store.wait([f"{here.prefix}done/{rank}" for rank in range(world) if rank != dist_rank])
        os.kill(os.getpid(), signal.SIGKILL)
    del ddp, job, group


if __name__ == "__main__":
    main()

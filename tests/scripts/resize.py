"""Training while the number of workers changes. The parameters count how often each sample was used.

The gradient of ``uses`` is -1 for each sample of the whole batch whatever the number of workers, if the average over
workers is right, and its learning rate is 1: after each epoch ``uses`` says what the updates in the state have seen.
"""

from __future__ import annotations

import argparse
import os
import signal
import threading
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

import shared_core
from shared_core.protocol import worker_env
from shared_core.testing.digest import digest, training_digest
from shared_core.testing.report import Report, end_group
from shared_core.worker import link

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


class First:
    """Parameters as the first batch of this process finds them; known to nobody who could put it back.

    With ``HOLD_AT`` in the environment a process waits in that batch to be killed.
    """

    def __init__(self) -> None:
        self.parameters = ""

    def batch(self, number: int, model: nn.Module) -> None:
        """A batch begins; batches are counted over all epochs, from 0."""
        if not self.parameters:
            self.parameters = digest([parameter.detach() for parameter in model.parameters()])
        if os.environ.get("HOLD_AT") == str(number):
            threading.Event().wait()


FIRST = First()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3, help="at least so many")
    parser.add_argument("--until", type=int, default=0, help="go on until there are so many workers")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--stream", action="store_true", help="an IterableDataset")
    parser.add_argument("--last", type=int, default=-1, help="a rank that is lost when all others have finished")
    parser.add_argument("--optimizer", default="AdamW")
    parser.add_argument("--one-optimizer", action="store_true")
    parser.add_argument("--newcomers-hang", action="store_true", help="before the loop, for ever")
    args = parser.parse_args()
    if args.newcomers_hang and worker_env.env().incarnation:
        threading.Event().wait()
    report = Report()
    shared_core.install()
    dist.init_process_group("gloo")
    world, dist_rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(3)
    model = Net()
    ddp = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.001)
    kind = getattr(torch.optim, args.optimizer)
    optimizers = [kind(model.net.parameters(), lr=1e-2), torch.optim.SGD([model.uses], lr=1.0)]
    if args.one_optimizer:
        both = [{"params": list(model.net.parameters()), "momentum": 0.9}, {"params": [model.uses], "lr": 1.0}]
        optimizers = [torch.optim.SGD(both, lr=0.01)]
    data = Numbered()
    sampler: DistributedSampler[object] = DistributedSampler(data, shuffle=True)
    if args.stream:
        loader = DataLoader(Stream(), batch_size=args.batch)
    else:
        loader = DataLoader(data, batch_size=args.batch, sampler=sampler, num_workers=args.workers)
    torch.manual_seed(dist_rank)
    job = shared_core.attach(ddp, *optimizers, loader)
    seen = job.register(losses=[], exact=[], worlds=[], used=[], total=0.0, batches=0)
    for epoch in job.epochs(200):
        sampler.set_epoch(epoch)
        for _, (indices, x) in job.steps(loader):
            step = job.total_steps
            report.count(f"batch {step}")
            FIRST.batch(step, model)
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
        seen.losses.append(seen.total / seen.batches)
        seen.exact.append(bool((model.uses.detach() == epoch + 1).all()))
        seen.worlds.append(world)
        seen.used.append(int(model.uses.sum()))
        seen.total, seen.batches = 0.0, 0
        if epoch + 1 >= args.epochs and (not args.until or world == args.until):
            break
    report.finish(training_digest(model, optimizers, [], {}), **vars(seen), first=FIRST.parameters)
    group = end_group()
    if args.last == dist_rank and report.who["incarnation"] == 0:
        here = worker_env.env()
        store = link.connect_store(where=here)
        store.wait([f"{here.prefix}done/{rank}" for rank in range(world) if rank != dist_rank])
        os.kill(os.getpid(), signal.SIGKILL)
    del ddp, job, group


if __name__ == "__main__":
    main()

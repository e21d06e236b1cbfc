"""Worker of the benchmark ``reroute_ddp``: runs blocks of steps when told to."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import shared_core
from benchmarks.common import Line
from benchmarks.overhead_worker import CASES

EPOCH = 1 << 16


class Nothing(Dataset[int]):
    """Indices; the loss draws its batch itself."""

    def __len__(self) -> int:
        return EPOCH

    def __getitem__(self, index: int) -> int:
        return index


def shared(
    net: nn.Module, loss: Callable[[nn.Module], torch.Tensor], optimizer: torch.optim.Optimizer
) -> Iterator[None]:
    loop = shared_core.attach(net, optimizer)
    data = Nothing()
    loader = DataLoader(data, batch_size=1, sampler=DistributedSampler(data, shuffle=False))
    for step in loop.shared_steps(loader, 1):
        step.backward(lambda _: loss(net))
        optimizer.step()
        yield


def usual(
    net: nn.Module, loss: Callable[[nn.Module], torch.Tensor], optimizer: torch.optim.Optimizer
) -> Iterator[None]:
    model = nn.parallel.DistributedDataParallel(net)
    job = shared_core.current_job()
    if job is not None:
        job.attach([model], [optimizer])
    while True:
        if job is not None:
            job.step_boundary()
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()
        yield


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--system", default="gloo")
    parser.add_argument("--loop", choices=["ddp", "shared"], required=True)
    parser.add_argument("--case", choices=list(CASES), required=True)
    parser.add_argument("--socket", required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    shared_core.install()
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    net, loss = CASES[options.case]()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    steps = (usual if options.loop == "ddp" else shared)(net, loss, optimizer)
    line = Line.of_worker(options.socket, options.system)
    while "run" in (message := line.receive()):
        begin = time.perf_counter()
        for _ in range(message["run"]):
            next(steps)
        line.send({"seconds": time.perf_counter() - begin})
    line.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

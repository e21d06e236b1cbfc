"""Worker of the recovery curves: plain DDP over a data set, after a start-up, with a model of any size."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

BATCH, SMALL = 8, 32
#: Steps between two checkpoints under torchrun.
EVERY = 20


class Items(torch.utils.data.Dataset[torch.Tensor]):
    """Samples that are functions of their index and take a while to read.

    Args:
        number: of samples.
        width: of a sample, a float32 vector.
        read_s: seconds that reading one takes.
    """

    def __init__(self, number: int, width: int, read_s: float) -> None:
        self.number, self.width, self.read_s = number, width, read_s

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.read_s:
            time.sleep(self.read_s)
        return torch.full((self.width,), (index % 997) / 997)


def network(parameters: int) -> tuple[nn.Module, int]:
    """An MLP of about this many parameters, and its width; 0 gives the smallest."""
    width = 1024 if parameters else SMALL
    layers = max(1, round(parameters / (width * width + width)))
    return nn.Sequential(*[part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())]), width


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--system", choices=("swift", "torchrun", "torchft"), required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--read-ms", type=float, default=0.0)
    parser.add_argument("--loader-workers", type=int, default=0)
    parser.add_argument("--startup-s", type=float, default=0.0)
    parser.add_argument("--parameters", type=int, default=0)
    options = parser.parse_args()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    trace = os.open(options.out / f"trace{rank}.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def note(step: int) -> None:
        os.write(trace, (json.dumps({"step": step, "time": time.time(), "pid": os.getpid()}) + "\n").encode())

    torch.set_num_threads(1)
    torch.manual_seed(0)
    time.sleep(options.startup_s)  # an index, a tokenizer, a large model
    net, width = network(options.parameters)
    optimizer: Any = torch.optim.AdamW(net.parameters(), lr=1e-4)
    data = Items(options.steps * BATCH * world, width, options.read_ms / 1e3)
    sampler: Any = DistributedSampler(data, num_replicas=world, rank=rank)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler, num_workers=options.loader_workers)

    def train(model: nn.Module, batch: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    if options.system == "torchft":
        from benchmarks import torchft_side

        manager, model, optimizer = torchft_side.wrap(net, optimizer, "curves", min_replicas=1)
        for batch in loader:  # a replica that is started again begins its share of the data again
            before = manager.current_step()
            train(model, batch)
            if manager.current_step() > before:
                note(manager.current_step())
            if manager.current_step() >= options.steps:
                break
        manager.shutdown(wait=False)
        os._exit(0)  # its threads do not end by themselves
    if options.system == "swift":
        import shared_core

        shared_core.install()
        dist.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(net)
        job = shared_core.attach(model, optimizer)
        for _ in job.epochs(1):
            for step, batch in job.steps(loader):
                train(model, batch)
                note(step + 1)
    else:
        dist.init_process_group("gloo")
        checkpoint, done = options.out / "checkpoint.pt", 0
        if checkpoint.exists():
            saved = torch.load(checkpoint)
            net.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            done = saved["step"]
        model = nn.parallel.DistributedDataParallel(net)
        for step, batch in enumerate(loader):
            if step < done:
                continue
            train(model, batch)
            note(step + 1)
            if rank == 0 and (step + 1) % EVERY == 0:
                state = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
                torch.save(state, checkpoint.with_suffix(".tmp"))
                os.replace(checkpoint.with_suffix(".tmp"), checkpoint)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

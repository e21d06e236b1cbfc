"""Plain PyTorch with a Checkpointer, or without, on any device: one process, or DDP under torchrun. Prints a digest of
the end.

What happens to it is in the environment, so that its arguments are those of the next start:
``DIE``: step at which it is killed, ``END``: step at which it is told to end, by itself; ``END_RANK``: the rank that
is told so, all if not given; ``SLOW``: its writer stands still by then, with a checkpoint committed; ``ACCUMULATE``:
batches between two updates; ``OUTSIDE``: keep an average and clip weights. ``ADOPT`` is the option ``resume_from``.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from beginning import backend
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from tqdm import tqdm

import shared_core
from shared_core.waiting import Wait, poll
from tests.support.device import device
from tests.support.digest import digest

FOLDER, POLICY, EPOCHS = sys.argv[1], sys.argv[2], 3
ACCUMULATE = int(os.environ.get("ACCUMULATE", "1"))
#: Checkpoints that were there before this run.
FOUND: set[Path] = set()


def main() -> None:
    FOUND.update(committed())
    several = "WORLD_SIZE" in os.environ
    if several:
        dist.init_process_group(backend())
    torch.manual_seed(3)
    generator = torch.Generator().manual_seed(7)
    data = TensorDataset(torch.randn(240, 12, generator=generator), torch.randint(0, 4, (240,), generator=generator))
    sampler = DistributedSampler(data) if several else None
    loader = DataLoader(data, batch_size=8, sampler=sampler, shuffle=sampler is None)
    model: nn.Module = nn.Sequential(
        nn.Linear(12, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 4)
    )
    model.to(device())
    if several:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 90)
    average = torch.optim.swa_utils.AveragedModel(model, avg_fn=lambda old, new, _: old + 0.1 * (new - old))
    outside = [average] if "OUTSIDE" in os.environ else []
    if POLICY == "none":
        loop = shared_core.attach(model, optimizer, scheduler, *outside)
    else:
        options: dict[str, Any] = {"checkpoint.policy": POLICY}
        if POLICY == "fixed":
            options |= {"checkpoint.every_steps": 4}
        if "SLOW" in os.environ:
            options |= {"detection.wait_timeout_s": 1.0}
        if "ADOPT" in os.environ:
            options |= {"checkpoint.resume_from": os.environ["ADOPT"]}
        loop = shared_core.Checkpointer(FOLDER, model, optimizer, scheduler, *outside, **options)
    seen = loop.register(loss=0.0, first=-1)
    rank = dist.get_rank() if several else 0
    began = None
    for epoch in loop.epochs(EPOCHS):
        if sampler is not None:
            sampler.set_epoch(epoch)
        for _, (inputs, labels) in loop.steps(tqdm(loader, file=io.StringIO())):
            step = loop.total_steps
            began = step if began is None else began
            loss = nn.functional.cross_entropy(model(inputs.to(device())), labels.to(device()))
            loss.backward()
            strike(step, rank, began)
            if step % ACCUMULATE == 0:
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                if outside:
                    average.update_parameters(model)
                    for parameter in model.parameters():
                        parameter.data.mul_(0.999).clamp_(-0.3, 0.3)
            if outside and step % 3 == 0:
                average.update_parameters(model)
            seen.loss += loss.item()
            loop.note_loss(loss)
    state = [*model.state_dict().values(), *average.state_dict().values()]
    state += [value for each in optimizer.state.values() for value in each.values()]
    # one write: under torchrun, print() would write the end of the line by itself, and lines of two ranks mix
    sys.stdout.write(f"rank {rank} began {began} digest {digest(state)} loss {seen.loss.hex()}\n")
    sys.stdout.flush()
    if several:
        dist.destroy_process_group()


def strike(step: int, rank: int, began: int) -> None:
    """A run that does not continue from a checkpoint has committed one before, so that the next start can continue."""
    for name, number in (("DIE", signal.SIGKILL), ("END", signal.SIGTERM)):
        if step == int(os.environ.get(name, -1)):
            if number == signal.SIGTERM and rank != int(os.environ.get("END_RANK", rank)):
                continue
            waits = number == signal.SIGKILL or "SLOW" in os.environ
            if waits and not began:
                wait = Wait(f"step {step}", "a checkpoint to be committed", 60.0)
                poll(lambda: bool(committed() - FOUND), lambda: False, wait)
            if "SLOW" in os.environ:
                os.kill(writer(), signal.SIGSTOP)
            os.kill(os.getpid(), number)


def committed() -> set[Path]:
    """Whole checkpoints, also those of other commands."""
    return {*Path(FOLDER).glob("*/step-*/manifest.json")}


def writer() -> int:
    """The process that writes checkpoints, a child of this one."""
    me = str(os.getpid())
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes()
            parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
            if b"shared_core.checkpoint.writer" in words and parent == me:
                return int(entry.name)
    raise AssertionError("there is no writer")


if __name__ == "__main__":
    main()

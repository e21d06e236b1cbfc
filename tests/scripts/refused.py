"""Plain PyTorch, with a batch at which one worker takes something away from the job: room, a folder, descriptors."""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import subprocess
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import shared_core
from tests.support.digest import training_digest
from tests.support.report import Report, end_group


def take_away(what: str, where: str) -> None:
    """``full``: fill the file system of a folder; ``hidden``: hide it behind a full one, where room is given back as
    well as taken; ``read-only``: hide it behind one that is; ``gone``: remove it; ``NOFILE``, ``AS``: no more
    descriptors, or no more memory, for this worker.
    """
    if what == "full":
        with open(Path(where) / "filler", "wb", buffering=0) as file:
            for size in (1 << 16, 1 << 12, 1):
                try:
                    while True:
                        file.write(bytes(size))
                except OSError:
                    continue
        for path in (*Path(where).rglob("*.jsonl"), *Path(where).rglob("*.log")):  # the rest of their last pages
            with open(path, "ab") as file:
                file.write(b"\n" * (-path.stat().st_size % 4096))
    elif what == "hidden":
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4k,mode=1777", "tmpfs", where], check=True)
        take_away("full", where)
    elif what == "read-only":
        subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", where], check=True)
    elif what == "gone":
        shutil.rmtree(where)
    elif what == "NOFILE":
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")), 1 << 20))
    elif what == "AS":
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (1 << 20), resource.RLIM_INFINITY))


def train() -> dist.ProcessGroup:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ballast", type=int, default=1, help="numbers of rank-local state")
    parser.add_argument("--take", nargs="*", default=[], help="what:where; rank 0 takes it away in its third batch")
    parser.add_argument("--gate", default="", help="a named pipe: rank 0 waits there until somebody has written to it")
    args = parser.parse_args()
    report = Report()
    if not os.environ.get("SWIFT_BASELINE"):
        shared_core.install()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))
    model = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = torch.randn(48, 8, generator=torch.Generator().manual_seed(5))
    sampler: DistributedSampler[object] = DistributedSampler(TensorDataset(data), shuffle=True)
    loader = DataLoader(TensorDataset(data), batch_size=3, sampler=sampler)
    job = shared_core.attach(model, optimizer)
    seen = job.register(batches=0, ballast=torch.zeros(args.ballast))
    first = os.environ.get("SWIFT_RECOVERY_INCARNATION") == "0" and os.environ.get("SWIFT_RECOVERY_RESTART", "0") == "0"
    for epoch in job.epochs(2):
        sampler.set_epoch(epoch)
        for _, (x,) in job.steps(loader):
            seen.batches += 1
            if seen.batches == 3 and rank == 0 and first:
                for each in args.take:
                    what, _, where = each.partition(":")
                    take_away(what, os.environ["SWIFT_RECOVERY_JOB_DIR"] if where == "job" else where)
                if args.gate:
                    Path(args.gate).read_bytes()
            seen.ballast = seen.ballast + rank
            loss = model(x + 0.1 * torch.randn(8)).square().mean()
            loss.backward()
            dist.all_reduce(loss.detach().repeat(640))  # DDP's buckets are no part of the log that is spilled
            optimizer.step()
            optimizer.zero_grad()
            print(f"rank {rank}: batch {seen.batches}", flush=True)
    report.finish(
        training_digest(net, [optimizer], [], {"batches": seen.batches, "ballast": seen.ballast.sum().item()})
    )
    return end_group()


if __name__ == "__main__":
    group = train()  # let go of after the model

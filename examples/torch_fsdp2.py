"""A sharded model (FSDP2) in a loop of one's own: a classifier of scikit-learn's digits.

    swiftrun --nproc-per-node 2 examples/torch_fsdp2.py

Four lines differ from a script for torchrun; each says why. Kill a worker while it runs (its process number is
printed): the fingerprints of the ranks' shards at the end do not change.
"""

from __future__ import annotations

import argparse
import hashlib
import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import shared_core


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    options = parser.parse_args()
    shared_core.install()  # 1: before the process group, which is to survive the failure of workers
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    print(f"rank {rank} is process {os.getpid()}", flush=True)
    digits = load_digits()
    images, labels = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    data = TensorDataset(images[:1500], labels[:1500])
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(data)
    train = DataLoader(data, batch_size=16, sampler=sampler)
    torch.manual_seed(7)  # each rank keeps its part of the same parameters
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model[0], mesh=mesh)  # a larger model: each of its blocks
    fully_shard(model, mesh=mesh)
    torch.manual_seed(7 + rank)  # and draws its own dropout
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs * len(train))
    job = shared_core.attach(model, optimizer, schedule)  # 2: what is trained
    for epoch in job.epochs(options.epochs):  # 3: instead of range, so that a replacement enters the right epoch
        model.train()
        sampler.set_epoch(epoch)
        for _, (x, y) in job.steps(train):  # 4: instead of enumerate, so that it enters the right batch
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        model.eval()
        with torch.no_grad():
            right = (model(images[1500:]).argmax(1) == labels[1500:]).float().mean()
        if rank == 0:
            print(f"epoch {epoch}: accuracy {right.item():.4f}", flush=True)
    model.reshard()
    shard = b"".join(parameter.to_local().detach().numpy().tobytes() for parameter in model.parameters())
    print(f"rank {rank}: {hashlib.sha256(shard).hexdigest()[:16]}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

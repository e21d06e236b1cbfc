"""The smallest useful loop under Fabric: a classifier of scikit-learn's digits, on workers that may be killed.

    python examples/fabric_minimal.py

Three lines differ from a script for stock Fabric; each says why. Kill a worker while it runs (its process number is
printed): the fingerprints at the end do not change.
"""

from __future__ import annotations

import hashlib
import os

import torch
from lightning.fabric import Fabric
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_swift  # makes strategy="swift_ddp" known


def main() -> None:
    fabric = Fabric(accelerator="cpu", devices=2, strategy="swift_ddp")
    fabric.launch()
    print(f"rank {fabric.global_rank} is process {os.getpid()}", flush=True)
    fabric.seed_everything(7, verbose=False)
    digits = load_digits()
    images, labels = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10))
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-3))
    train = fabric.setup_dataloaders(DataLoader(TensorDataset(images[:1500], labels[:1500]), 16, shuffle=True))
    job = lightning_swift.attach(model, optimizer)  # 1: what is trained
    for epoch in job.epochs(10):  # 2: instead of range, so that a replacement enters the right epoch
        model.train()
        for _, (x, y) in job.steps(train):  # 3: instead of enumerate, so that it enters the right batch
            fabric.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            right = (net(images[1500:]).argmax(1) == labels[1500:]).float().mean()
        fabric.print(f"epoch {epoch}: accuracy {right.item():.4f}", flush=True)
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in net.parameters())
    print(f"rank {fabric.global_rank}: {hashlib.sha256(weights).hexdigest()[:16]}", flush=True)


if __name__ == "__main__":
    main()

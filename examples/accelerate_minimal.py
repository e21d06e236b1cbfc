"""The smallest useful loop under Accelerate: a classifier of scikit-learn's digits, on workers that may be killed.

    swiftrun --nproc-per-node 2 examples/accelerate_minimal.py

Kill a worker while it runs (its process number is printed): the fingerprints at the end do not change.
"""

from __future__ import annotations

import hashlib
import os

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate_swift import SwiftPlugin


def main() -> None:
    plugin = SwiftPlugin(num_processes=2)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[plugin])
    print(f"rank {accelerator.process_index} is process {os.getpid()}", flush=True)
    set_seed(7)
    digits = load_digits()
    images, labels = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    train = DataLoader(TensorDataset(images[:1500], labels[:1500]), batch_size=16, shuffle=True)
    held_out = DataLoader(TensorDataset(images[1500:], labels[1500:]), batch_size=64)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, train, held_out = accelerator.prepare(model, optimizer, train, held_out)
    seen = plugin.register(right=0)
    for epoch in plugin.epochs(10):
        model.train()
        for x, y in train:
            accelerator.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        seen.right = 0
        for x, y in held_out:
            with torch.no_grad():
                guess = model(x).argmax(-1)
            guess, y = accelerator.gather_for_metrics((guess, y))
            seen.right += int((guess == y).sum())
        accelerator.print(f"epoch {epoch}: accuracy {seen.right / len(labels[1500:]):.4f}")
    weights = b"".join(each.detach().numpy().tobytes() for each in accelerator.unwrap_model(model).parameters())
    print(f"rank {accelerator.process_index}: {hashlib.sha256(weights).hexdigest()[:16]}", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()

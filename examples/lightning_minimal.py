"""The smallest useful job under Lightning: a classifier of scikit-learn's digits, on workers that may be killed.

    python examples/lightning_minimal.py

Kill a worker while it runs (its process number is printed): the fingerprints at the end do not change.
"""

from __future__ import annotations

import hashlib
import os

import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

import lightning_swift  # noqa: F401  makes strategy="swift_ddp" known


class Digits(pl.LightningModule):
    """Two linear layers with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(128, 10)
        )

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        images, labels = batch
        loss = torch.nn.functional.cross_entropy(self.net(images), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        images, labels = batch
        self.log("accuracy", (self.net(images).argmax(1) == labels).float().mean(), sync_dist=True, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    digits = load_digits()
    images = torch.tensor(digits.data / 16, dtype=torch.float32)
    labels = torch.tensor(digits.target)
    pl.seed_everything(7)
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy="swift_ddp", max_epochs=10, logger=False, enable_checkpointing=False
    )
    print(f"rank {trainer.global_rank} is process {os.getpid()}", flush=True)
    model = Digits()
    trainer.fit(
        model,
        DataLoader(TensorDataset(images[:1500], labels[:1500]), batch_size=16, shuffle=True),
        DataLoader(TensorDataset(images[1500:], labels[1500:]), batch_size=64),
    )
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    print(f"rank {trainer.global_rank}: {hashlib.sha256(weights).hexdigest()[:16]}", flush=True)
    if trainer.is_global_zero:
        print(f"accuracy {trainer.callback_metrics['accuracy']:.4f}")


if __name__ == "__main__":
    main()

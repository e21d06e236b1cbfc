"""Data, modules and digests shared by the Lightning jobs."""

from __future__ import annotations

import gzip
import importlib.util
import os
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from tests.support.digest import digest
from tests.support.jobs.common import without_folder, without_ours

OUT = os.environ["SWIFT_TEST_OUT"]


@cache
def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Scikit-learn's digits, (1797, 64) float32 in [0, 1] and (1797,) int64, without importing the library."""
    spec = importlib.util.find_spec("sklearn")
    assert spec is not None and spec.submodule_search_locations
    path = Path(spec.submodule_search_locations[0], "datasets", "data", "digits.csv.gz")
    with gzip.open(path, "rt") as file:
        table = torch.from_numpy(np.loadtxt(file, delimiter=",", dtype=np.float32))
    return table[:, :64] / 16, table[:, 64].long()


class Digits(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """``size`` images from ``first`` on; ``augment`` adds noise from the generators of torch, NumPy and Python."""

    def __init__(self, size: int, first: int = 0, augment: bool = False) -> None:
        x, y = digits()
        self.x, self.y, self.augment = x[first : first + size], y[first : first + size], augment

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.x[index]
        if self.augment:
            x = x + 0.1 * torch.randn(64) + 0.1 * random.random() + 0.1 * float(np.random.rand())
        return x, self.y[index]


class Net(pl.LightningModule):
    """A perceptron on digits.

    Args:
        norm: with BatchNorm.
        dropout: probability of dropout.
        scheduler: of the learning rate: "", "step", "epoch" or "plateau".
        optimizer: name of the class in ``torch.optim``.
    """

    def __init__(
        self,
        norm: bool = False,
        dropout: float = 0.0,
        scheduler: str = "",
        optimizer: str = "AdamW",
        lr: float = 1e-2,
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Linear(64, 32)]
        layers += [nn.BatchNorm1d(32)] if norm else []
        layers += [nn.ReLU()]
        layers += [nn.Dropout(dropout)] if dropout else []
        self.net = nn.Sequential(*layers, nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))
        self.scheduler, self.optimizer, self.lr = scheduler, optimizer, lr

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", F.cross_entropy(self(x), y), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("test_loss", F.cross_entropy(self(x), y), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = getattr(torch.optim, self.optimizer)(self.parameters(), lr=self.lr)
        if not self.scheduler:
            return optimizer
        if self.scheduler == "plateau":
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}
        if self.scheduler == "step":
            cosine = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-2, total_steps=100)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": cosine, "interval": "step"}}
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def loader(size: int = 96, batch: int = 8, shuffle: bool = True, first: int = 0, **more: Any) -> DataLoader[Any]:
    """A loader of digits; keywords other than ``augment`` go to ``DataLoader``."""
    data = Digits(size, first, more.pop("augment", False))
    return DataLoader(data, batch_size=batch, shuffle=shuffle, **more)


def checkpoints() -> dict[str, str]:
    """Digest of the state in each checkpoint file of the run, by its path in the folder."""
    found: dict[str, str] = {}
    for path in sorted(Path(OUT).rglob("*.ckpt")):
        saved = torch.load(path, weights_only=False)
        parts = {k: saved[k] for k in ("state_dict", "optimizer_states", "lr_schedulers", "epoch", "global_step")}
        parts["callbacks"] = without_ours(saved["callbacks"])
        found[str(path.relative_to(OUT))] = digest(without_folder(parts))
    return found


DigestOf = Callable[[pl.Trainer, pl.LightningModule], dict[str, str]]

"""Data for the soak's jobs."""

from __future__ import annotations

import torch
from torch.utils.data import Dataset


class Clusters(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Points around ten centres, (64,) float32 with an int64 class.

    Args:
        size: number of points.
        seed: of the points; the centres are always the same.
        augment: add noise from the global generator at each access.
    """

    def __init__(self, size: int, seed: int, augment: bool = False) -> None:
        centres = torch.randn(10, 64, generator=torch.Generator().manual_seed(0))
        generator = torch.Generator().manual_seed(seed)
        self.y = torch.randint(10, (size,), generator=generator)
        self.x = centres[self.y] + torch.randn(size, 64, generator=generator)
        self.augment = augment

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.x[index]
        return (x + 0.1 * torch.randn(64) if self.augment else x), self.y[index]

"""``plain_ddp.py`` whose gradients are not reduced again (``unhealed``), or that tells others what forward gives."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import plain_ddp  # noqa: E402

model = plain_ddp.model


class Exchange(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.detach().mean()
        dist.all_reduce(mean)
        return x + 0.01 * mean


def exchanging(*args: Any) -> nn.Module:
    return nn.Sequential(model(*args), Exchange())


if __name__ == "__main__":
    what = sys.argv.pop(1)
    if what == "exchanging":
        plain_ddp.model = exchanging  # type: ignore[assignment]
    elif not os.environ.get("SWIFT_BASELINE"):
        from shared_core.worker.integrity import StateCheck

        StateCheck._reduce_again = lambda self, buckets: None  # type: ignore[method-assign]
    plain_ddp.main()

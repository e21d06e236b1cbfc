"""``plain_ddp.py`` whose gradients are not reduced again (``unhealed``), that tells others what forward gives
(``exchanging``), whose forward appends to a file (``writing``) or reads on in one (``reading``), that computes
something else in the first copy of a worker (``misled``), or that shares memory (``sharing``).
"""

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


class Misled(nn.Module):
    pid = os.getpid()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (1 + (os.getppid() == self.pid))


def misled(*args: Any) -> nn.Module:
    return nn.Sequential(model(*args), Misled())


class Line(nn.Module):
    """Adds to the log of a rank, or scales by the next number of a file that all of its forwards share."""

    def __init__(self, path: Path, mode: str) -> None:
        super().__init__()
        self.path, self.file = path, path.open() if mode == "reading" else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.file is not None:
            return x * float(self.file.readline())
        with self.path.open("a") as log:
            log.write("forward\n")
        return x


def with_lines(*args: Any) -> nn.Module:
    path = Path(os.environ["SWIFT_TEST_OUT"], f"lines{os.environ['RANK']}")
    if what == "reading":
        path.write_text("".join(f"{i}.{i:09000}\n" for i in range(1, 9)))  # more than a file object reads ahead
    return nn.Sequential(model(*args), Line(path, what))


if __name__ == "__main__":
    what = sys.argv.pop(1)
    if what == "exchanging":
        plain_ddp.model = exchanging  # type: ignore[assignment]
    elif what == "misled":
        plain_ddp.model = misled  # type: ignore[assignment]
    elif what == "sharing":
        shared = torch.zeros(4).share_memory_()
    elif what in ("writing", "reading"):
        plain_ddp.model = with_lines  # type: ignore[assignment]
    elif not os.environ.get("SWIFT_BASELINE"):
        from shared_core.worker.integrity import StateCheck

        StateCheck._reduce_again = lambda self, buckets: None  # type: ignore[method-assign]
    plain_ddp.main()

"""CheckFreq's way (FAST 2021): the state is copied in one step and written by a thread during the next ones.

The interval is the smallest whose cost stays below 3.5 % of the training time, measured over the first checkpoints.
"""

from __future__ import annotations

import copy
import math
import os
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

#: Share of the training time that checkpoints may take (section 4.2 of the paper).
BUDGET = 0.035


class CheckFreq:
    """Writes checkpoints on rank 0.

    Args:
        path: the file.
        net: the model.
        optimizer: its optimizer.
    """

    def __init__(self, path: Path, net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.path, self.net, self.optimizer = path, net, optimizer
        self.every = 1
        self.next = 1
        self._writer: threading.Thread | None = None
        self._last = time.perf_counter()
        self._steps: list[float] = []
        self._copies: list[float] = []

    def after_step(self, step: int) -> None:
        """A step is done; begin a checkpoint if one is due."""
        now = time.perf_counter()
        self._steps.append(now - self._last)
        if step >= self.next:
            if self._writer is not None:
                self._writer.join()  # one at a time: the copy waits for the write before it
            state = {
                "model": copy.deepcopy(self.net.state_dict()),
                "optimizer": copy.deepcopy(self.optimizer.state_dict()),
                "step": step,
            }
            self._writer = threading.Thread(target=self._write, args=(state,), daemon=True)
            self._writer.start()
            self._copies.append(time.perf_counter() - now)
            if len(self._copies) >= 3:
                typical = sorted(self._steps)[len(self._steps) // 2]
                cost = sorted(self._copies)[len(self._copies) // 2]
                self.every = max(1, math.ceil(cost / (BUDGET * typical)))
            self.next = step + self.every
        self._last = time.perf_counter()

    def _write(self, state: dict[str, Any]) -> None:
        temporary = self.path.with_suffix(".tmp")
        torch.save(state, temporary)
        os.replace(temporary, self.path)

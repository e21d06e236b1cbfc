"""Record the loss of every step of the examples' models, for ``checkpoint_policy``: a CSV file each in ``curves/``.

The examples' own models, data and optimizers, in one process without a strategy.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.common import ROOT, say

sys.path.insert(0, str(ROOT / "examples" / "demo"))  # its scripts import each other by plain names

FOLDER = Path(__file__).parent / "curves"


def digits(steps: int) -> Iterator[float]:
    """``examples/lightning_minimal.py``: two layers on scikit-learn's digits, AdamW, batches of 16."""
    from examples.lightning_minimal import Digits

    data = load_digits()
    images, labels = torch.tensor(data.data / 16, dtype=torch.float32), torch.tensor(data.target)
    loader = DataLoader(TensorDataset(images[:1500], labels[:1500]), batch_size=16, shuffle=True)
    model = Digits()
    optimizer = model.configure_optimizers()
    while True:
        for x, y in loader:
            loss = torch.nn.functional.cross_entropy(model.net(x), y)
            yield from _stepped(loss, optimizer, model)


def gpt2(steps: int, schedule: bool) -> Iterator[float]:
    """``examples/demo``: GPT-2 over bytes of the standard library, batches of 6; with its one-cycle schedule or not."""
    from train import ByteGPT, Windows, standard_library

    loader = DataLoader(Windows(standard_library()), batch_size=6, shuffle=True)
    model = ByteGPT(steps)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3 if schedule else 1e-3, weight_decay=0.01)
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=steps) if schedule else None
    while True:
        for batch in loader:
            loss = model.model(input_ids=batch, labels=batch).loss
            yield from _stepped(loss, optimizer, model)
            if cycle is not None:
                cycle.step()


def _stepped(loss: torch.Tensor, optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> Iterator[float]:
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    yield loss.item()


CURVES: dict[str, tuple[int, Callable[[int], Iterator[float]]]] = {
    "digits": (3000, digits),
    "gpt2_one_cycle": (1500, lambda steps: gpt2(steps, True)),
    "gpt2_constant": (1500, lambda steps: gpt2(steps, False)),
}


def main() -> int:
    """Entry point."""
    FOLDER.mkdir(exist_ok=True)
    for name, (steps, record) in CURVES.items():
        torch.manual_seed(7)
        losses = [loss for loss, _ in zip(record(steps), range(steps), strict=False)]
        lines = ["step,loss", *(f"{step},{loss:.4f}" for step, loss in enumerate(losses, 1))]
        (FOLDER / f"{name}.csv").write_text("\n".join(lines) + "\n")
        say(f"{name}: {steps} steps, {losses[0]:.3f} to {sum(losses[-50:]) / 50:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

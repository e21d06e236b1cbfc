"""Where the fit of the loss begins a new piece: real schedulers, as rank 0 sees them, and the rule that is followed."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.optim import SGD, Optimizer, lr_scheduler

from shared_core.checkpoint.curve import Pieces
from shared_core.config import SwiftConfig
from shared_core.worker.checkpoints.pricing import Pricing

Scheduler = lr_scheduler.LRScheduler

SMOOTH: dict[str, Callable[[Optimizer], Scheduler]] = {
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 300),
    "warm-up": lambda o: lr_scheduler.LinearLR(o, 1e-3, 1.0, 200),
    "short warm-up": lambda o: lr_scheduler.LinearLR(o, 0.1, 1.0, 8),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, 301),
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.97),
    "fast exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.5),
    "inverse root": lambda o: lr_scheduler.LambdaLR(o, lambda step: (step + 1) ** -0.5),
    "by epoch, a little": lambda o: lr_scheduler.StepLR(o, 50, 0.9),
}


def optimizer() -> Optimizer:
    groups = [[torch.nn.Parameter(torch.zeros(2))] for _ in range(2)]
    return SGD([{"params": groups[0]}, {"params": groups[1], "lr": 0.01}], lr=0.1)


def told(made: Optimizer, scheduler: Scheduler, every: int = 1) -> list[int]:
    """Step boundaries at which a new piece begins in 300 batches; the rate changes after every ``every``-th."""
    watched, found = Pieces(), []
    for boundary in range(300):
        if watched.at_boundary(boundary, boundary // every, [group["lr"] for group in made.param_groups]):
            found.append(boundary)
        if (boundary + 1) % every == 0:
            made.step()
            scheduler.step()
    return found


@pytest.mark.parametrize("name", SMOOTH)
@pytest.mark.parametrize("every", [1, 4])
def test_a_smooth_schedule_is_one_piece(name: str, every: int) -> None:
    made = optimizer()
    assert told(made, SMOOTH[name](made), every) == []


def test_jumps_begin_a_piece_each() -> None:
    made = optimizer()
    assert told(made, lr_scheduler.MultiStepLR(made, [100, 101, 150, 250], 0.1)) == [100, 150, 250], "once a jump"
    made = optimizer()
    halved = told(made, lr_scheduler.StepLR(made, 60, 0.5))
    assert halved == [60, 120, 180, 240]
    made = optimizer()
    by_epoch = lr_scheduler.LambdaLR(made, [lambda step: 1.0, lambda step: 1.0 if step < 70 else 3.0])
    assert told(made, by_epoch) == [70], "one group alone"


def priced(folder: Path, workers: int, **options: object) -> Pricing:
    return Pricing(SwiftConfig.from_dict({"checkpoint.dir": str(folder), **options}), workers, "train.py")


def test_rank_0_tells_the_fit(tmp_path: Path) -> None:
    """Losses and learning rates as they come to it, and then another number of workers."""
    pricing, made = priced(tmp_path, 4, **{"checkpoint.policy": "coci"}), optimizer()
    scheduler = lr_scheduler.MultiStepLR(made, [200], 0.1)
    for boundary in range(1, 400):
        pricing.step(boundary, 0.0, boundary, [made])
        pricing.loss(boundary, 1 + 1 / math.sqrt(boundary))
        made.step()
        scheduler.step()
    assert pricing._fitter.restarts == [(202, "the learning rate is 0.01 after 0.1")] and pricing._fitter.start == 202
    again, fewer = (priced(tmp_path, workers, **{"checkpoint.policy": "coci"}) for workers in (4, 3))
    for each in (again, fewer):
        each.restore(pricing.capture())
    assert again._fitter.restarts == [] and fewer._fitter.restarts == [(400, "3 workers instead of 4")]

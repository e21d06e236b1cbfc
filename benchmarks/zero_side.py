"""DeepSpeed's ZeRO-3: a model that its engine has divided."""

from __future__ import annotations

import contextlib
import logging
import os
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
from torch import nn


def engine(net: nn.Module, lr: float, batch: int, *, survives: bool) -> Any:
    """DeepSpeed's engine around a model, divided over all workers, and its AdamW.

    Args:
        lr: learning rate.
        batch: samples of one worker in a step.
        survives: the engine is this product's.
    """
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # for inference only, and compiled for half a minute
    config = {
        "train_micro_batch_size_per_gpu": batch,
        "optimizer": {"type": "AdamW", "params": {"lr": lr, "torch_adam": True}},
        "zero_optimization": {"stage": 3},
        "steps_per_print": None,
    }
    kind: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if survives:
        from shared_core.pipeline import SwiftZeroEngine, engines

        kind = engines(SwiftZeroEngine)
    with kind:
        made, *_ = deepspeed.initialize(model=net, config=config)
    return made


class Stepper:
    """What a loop calls in the place of an optimizer and of ``backward``."""

    def __init__(self, made: Any) -> None:
        self._engine = made

    def zero_grad(self) -> None:
        """The engine does that itself."""

    def backward(self, loss: torch.Tensor) -> None:
        """Compute gradients."""
        self._engine.backward(loss)

    def step(self) -> None:
        """Make an update."""
        self._engine.step()

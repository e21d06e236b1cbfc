"""Gradients that an optimizer's step is not to see: without one, torch's optimizers leave a parameter alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import Optimizer


class HiddenGradients:
    """Hides gradients from the rest of the present step; the program's own post-hooks see them again."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._hidden: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._handle = optimizer.register_step_post_hook(self._show)
        hooks: Any = optimizer._optimizer_step_post_hooks
        hooks.move_to_end(self._handle.id, last=False)

    def hide(self, parameters: Iterable[torch.Tensor]) -> None:
        """Hide the gradients of these parameters, those that have one, until the step has ended."""
        for parameter in parameters:
            if parameter.grad is not None:
                self._hidden.append((parameter, parameter.grad))
                parameter.grad = None

    def _show(self, *_: Any) -> None:
        for parameter, gradient in self._hidden:
            parameter.grad = gradient
        self._hidden.clear()

    def close(self) -> None:
        self._handle.remove()

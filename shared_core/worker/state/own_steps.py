"""Updates that the state contains already, by optimizers of a script's own: made, and taken back.

Optimizers of torch do nothing for parameters without a gradient, so gradients are hidden from them. One of a script may
need them, or change parameters without.
"""

from __future__ import annotations

import copy
import inspect

import torch
from torch.optim import Optimizer


def steps_as_torch(optimizer: Optimizer) -> bool:
    """Whether its step is one of torch's own."""
    return str(inspect.unwrap(type(optimizer).step).__module__).startswith("torch.")


class Before:
    """What an optimizer steps, before a step.

    Args:
        optimizer: which.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._values = [
            (p, p.detach().clone(), copy.deepcopy(optimizer.state[p]) if p in optimizer.state else None)
            for group in optimizer.param_groups
            for p in group["params"]
        ]

    @torch.no_grad()
    def put_back(self) -> None:
        """The step was made: take it back."""
        for parameter, value, state in self._values:
            parameter.data.copy_(value)
            if state is None:
                self._optimizer.state.pop(parameter, None)
            else:
                mine = self._optimizer.state[parameter]
                mine.clear()
                mine.update(state)

"""A step of an optimizer for some of its parameters only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch.optim import Optimizer


@contextmanager
def only(optimizer: Optimizer, parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Within it, the optimizer has only these of its parameters, in its own groups and order."""
    wanted = {id(parameter) for parameter in parameters}
    groups = optimizer.param_groups
    everything = [group["params"] for group in groups]
    chosen = []
    for group in groups:
        group["params"] = [p for p in group["params"] if id(p) in wanted]
        if group["params"]:
            chosen.append(group)
    optimizer.param_groups = chosen
    try:
        yield
    finally:
        optimizer.param_groups = groups
        for group, params in zip(groups, everything, strict=True):
            group["params"] = params


def step_parameters(optimizer: Optimizer, parameters: Iterable[torch.Tensor]) -> None:
    """``optimizer.step()`` for these parameters only, hooks of the optimizer included.

    The result is that of one whole step once all have been stepped, for every optimizer that treats each parameter by
    itself, as all of torch.optim do.
    """
    with only(optimizer, parameters):
        optimizer.step()

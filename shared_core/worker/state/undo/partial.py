"""A step of an optimizer for some of its parameters only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch.optim import Optimizer


@contextmanager
def only(optimizer: Optimizer, parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Within it, the optimizer has only these of its parameters, in its own groups and order.

    Steps of parts add up to one whole step for every optimizer that treats each parameter by itself, as all of
    torch.optim do.
    """
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

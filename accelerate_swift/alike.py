"""Whether all workers train the same parameters, so that one can stand in for another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from shared_core.errors import Unsupported

_ALONE = (
    "{} of the parameters that are trained are not in DistributedDataParallel, so each worker trains a copy of its "
    "own, and none can stand in for another. evaluate() or predict() before train() has this effect: use "
    "eval_on_start=True"
)
_APART = (
    "an update is made while gradients are not summed over the workers, as under LocalSGD or with optimizer.step() "
    "inside no_sync(): their parameters then differ, and none can stand in for another. Leave that out, or set "
    "SWIFT_RECOVERY=0 to train without recovery"
)


def refuse_alone(models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
    """Raise Unsupported for a ``transformers.Trainer`` whose workers train parameters that nothing keeps equal."""
    summed = {id(each) for model in models if isinstance(model, DistributedDataParallel) for each in model.parameters()}
    alone = [each for each in _parameters(optimizers) if id(each) not in summed and not isinstance(each, DTensor)]
    if alone:
        raise Unsupported(_ALONE.format(len(alone)))


def refuse_apart(models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> list[Any]:
    """Have each update refused that is made from gradients of this worker alone; returns handles that end this."""
    handles = []
    for optimizer in optimizers:
        own = {id(each) for each in _parameters([optimizer])}
        wrapped = [model for model in models if isinstance(model, DistributedDataParallel)]
        wrapped = [model for model in wrapped if own & {id(each) for each in model.parameters()}]
        if wrapped:
            handles.append(optimizer.register_step_pre_hook(_Check(wrapped)))
    return handles


class _Check:
    def __init__(self, models: Sequence[DistributedDataParallel]) -> None:
        self._models = models

    def __call__(self, *args: Any) -> None:
        if not any(model.require_backward_grad_sync for model in self._models):
            raise Unsupported(_APART)


def _parameters(optimizers: Sequence[Optimizer]) -> list[nn.Parameter]:
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    return [each for group in groups for each in group["params"] if each.requires_grad]

"""The state of DeepSpeed's optimizers that are sharded over the data-parallel ranks (bf16, ZeRO stage 1).

Each rank keeps the master weights in fp32 and the moments of its part of the stage, which no replica holds. So they are
rank-local state: published at every step boundary, to the machine's shared memory and, where there are several
machines, to another one. This costs at each step a copy of 12 bytes a parameter with Adam, divided by the data-parallel
degree, which is kept up to three times. A replacement therefore runs each update of the failed worker's batch, with
reduced gradients and gathered parameters from the log, and has the newest parameters after.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.utils import DummyOptim
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from shared_core.errors import SwiftError, Unsupported
from shared_core.pipeline import compat

#: Name of the registered state.
SHARD = "swift.shard"
#: What DeepSpeed's optimizers remember of their last step.
_FACTS = ("overflow", "_global_grad_norm")


def is_sharded(optimizer: Any) -> bool:
    return isinstance(optimizer, (BF16_Optimizer, DeepSpeedZeroOptimizer)) and not evaluates(optimizer)


def evaluates(optimizer: Any) -> bool:
    """Whether the engine only evaluates: it has no optimizer, or in bf16 one that does nothing."""
    return optimizer is None or isinstance(getattr(optimizer, "optimizer", None), DummyOptim)


class Shard:
    """One rank's part of a sharded optimizer. Unsupported for offload, experts, and optimizers that are not torch's."""

    def __init__(self, optimizer: Any) -> None:
        if type(optimizer) not in (BF16_Optimizer, DeepSpeedZeroOptimizer):
            raise Unsupported(f"{type(optimizer).__name__} cannot be recovered: use ZeRO stage 1 without additions")
        if getattr(optimizer, "cpu_offload", False) or optimizer.has_moe_layers:
            raise Unsupported("pipelines with offloaded optimizers or experts cannot be recovered in this version")
        if not isinstance(optimizer.optimizer, torch.optim.Optimizer):
            raise Unsupported(
                f"the optimizer inside is {type(optimizer.optimizer).__name__}, not one of torch's: pass one, or "
                "choose a type with torch_adam in the DeepSpeed configuration"
            )
        self._outer, self._inner = optimizer, optimizer.optimizer

    @property
    def _masters(self) -> list[torch.Tensor]:
        """This rank's part of each parameter group, flat, fp32."""
        return [master for group in self._inner.param_groups for master in group["params"]]

    def capture(self) -> dict[str, Any]:
        """Masters, moments, hyper-parameters, not copied: write them at once. SwiftError if gradients are pending."""
        outer = self._outer
        groups = outer.bf16_groups if isinstance(outer, BF16_Optimizer) else outer.bit16_groups
        if any(parameter.grad is not None for group in groups for parameter in group):
            raise SwiftError("gradients are pending at the step boundary of a batch: train through train_batch() alone")
        return captured(outer, self._masters)

    def restore(self, values: dict[str, Any]) -> None:
        """Copy a captured shard into the tensors in place; moments are taken over without a copy."""
        put_back(self._outer, self._masters, values)
        compat.link_moments(self._outer, there=any(values["state"]))


def captured(outer: Any, masters: Sequence[torch.Tensor]) -> dict[str, Any]:
    """As :meth:`Shard.capture`; ``masters`` are the flat tensors or parameters that the optimizer inside steps."""
    inner = _inner(outer)
    return {
        "masters": [master.detach() for master in masters],
        "state": [dict(inner.state.get(master, {})) for master in masters],
        "groups": [{k: v for k, v in group.items() if k != "params"} for group in inner.param_groups],
        "facts": {name: getattr(outer, name) for name in _FACTS if hasattr(outer, name)},
    }


def put_back(outer: Any, masters: Sequence[torch.Tensor], values: Mapping[str, Any]) -> None:
    """Inverse of :func:`captured`. Copies masters; takes moments over without a copy."""
    inner = _inner(outer)
    inner.state.clear()
    for master, stored, state in zip(masters, values["masters"], values["state"], strict=True):
        master.data.copy_(stored)
        if state:
            inner.state[master] = state
    for group, options in zip(inner.param_groups, values["groups"], strict=True):
        group.update(options)
    for name, value in values["facts"].items():
        setattr(outer, name, value)


def _inner(outer: Any) -> torch.optim.Optimizer:
    return outer if isinstance(outer, torch.optim.Optimizer) else outer.optimizer

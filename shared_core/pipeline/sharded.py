"""The state of DeepSpeed's optimizers that are sharded over the data-parallel ranks (bf16, ZeRO stage 1).

Each rank keeps the master weights in fp32 and the moments of its part of the stage, which no replica holds. So they are
rank-local state: published at every step boundary, to the machine's shared memory and, where there are several
machines, to another one. This costs at each step a copy of 12 bytes a parameter with Adam, divided by the data-parallel
degree, which is kept up to three times. A replacement therefore runs each update of the failed worker's batch, with
reduced gradients and gathered parameters from the log, and has the newest parameters after.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.utils import (
    DummyOptim,
    combine_grad_norm_groups,
    is_invalid_grad_norm,
    mask_nan_or_inf_with_val_inplace,
)
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor, nn

from shared_core.errors import SwiftError, Unsupported
from shared_core.pipeline import compat
from shared_core.reroute.summing import SumRule, unflatten

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


# -- under re-routing: each replica of a stage has all shards ---------------------------------------------------------
#
# Somebody must have the master weights and moments of a failed worker's shard, and step it until a replacement comes.
# All replicas have the sum of the gradients, and a step of an optimizer depends on nothing else: so each replica steps
# every shard, and all of them have the same bits. Then nothing of an update has to be sent, no pair of failures takes a
# shard with it, and a replacement is a copy of any replica. It costs the memory of an optimizer that is not sharded.
#
# A rank's own shard stays where DeepSpeed has it; what DeepSpeed saves and loads are its tensors. The arithmetic is
# that of BF16_Optimizer.step and DeepSpeedZeroOptimizer.step: norm over the shards and the stages, clipping, updates
# that are left out where the norm is not finite.


class WholeOptimizer:
    """All shards of one stage's optimizer, at one replica.

    Args:
        outer: DeepSpeed's optimizer; from now on its ``step`` makes the updates of all shards.
        parameters: of the stage, in the order in which gradients are summed.

    ``optimizer``: one of torch's, of the class inside ``outer``, with the master weights of all shards. Raises
    Unsupported for what :class:`Shard` refuses, and for what is not the same at every replica.
    """

    def __init__(self, outer: Any, parameters: Sequence[nn.Parameter], index: int, replicas: int) -> None:
        Shard(outer)
        _refuse_whole(outer)
        self._outer, self._parameters, self._index, self._replicas = outer, list(parameters), index, replicas
        self._bf16 = isinstance(outer, BF16_Optimizer)
        self._flats = compat.flat_groups(outer)
        self._gradients: list[Tensor] = []
        self._factor = 1.0
        self._norm: Any = None
        self._used: set[int] = set()
        self._masters = [self._all_masters(group, own) for group, own in zip(self._flats, self._own, strict=True)]
        self._places = [self._places_in(group) for group in self._flats]
        self.optimizer = _another(outer.optimizer, self._masters)
        compat.drop_gradient_hooks(outer)
        compat.replace_step(outer, self._step)
        for place, parameter in enumerate(self._parameters):
            parameter.register_post_accumulate_grad_hook(self._marker(place))

    @property
    def _own(self) -> list[Tensor]:
        return [group["params"][0] for group in self._outer.optimizer.param_groups]

    def _all_masters(self, group: compat.FlatGroup, own: Tensor) -> list[Tensor]:
        parts = enumerate(group.partitions)
        return [own if k == self._index else part.detach().clone().float().requires_grad_() for k, part in parts]

    def _places_in(self, group: compat.FlatGroup) -> list[tuple[int, int]]:
        """Of each parameter of a group: its place among the stage's, and its first element in the flat tensor."""
        number = {id(parameter): place for place, parameter in enumerate(self._parameters)}
        start, size = group.flat.data_ptr(), group.flat.element_size()
        return [(number[id(p)], (p.data_ptr() - start) // size) for p in group.parameters]

    def _marker(self, place: int) -> Callable[[Tensor], None]:
        def mark(_: Tensor) -> None:
            self._used.add(place)

        return mark

    # -- how gradients are summed ------------------------------------------------------------------

    @property
    def accumulates(self) -> torch.dtype | None:
        dtype: torch.dtype | None = self._outer.grad_acc_dtype if self._bf16 else None
        return dtype

    def rule(self, communication: torch.dtype, average: bool) -> SumRule:
        """How the gradients of the replicas are summed; they are sent in type ``communication``."""
        count = self._replicas if average else 1
        if not self._bf16 and self._outer.reduce_scatter:
            return SumRule(divisor=count, dtype=communication)
        return SumRule(dtype=communication, scale=1.0 / count)

    # -- a step ------------------------------------------------------------------------------------

    def set_gradients(self, flat: Tensor) -> None:
        """Keep views of the flat, summed gradients; see :class:`shared_core.reroute.step.StageModel`."""
        self._gradients = unflatten(flat, self._parameters)

    def norm(self) -> float:
        """Sum of the squares of this stage's gradients, with DeepSpeed's rounding."""
        counted = [not compat.is_replicated(parameter) for parameter in self._parameters]
        if self._bf16:
            places = [place for group in self._places for place, _ in group if counted[place] and place in self._used]
            norms = [self._gradients[place].float().norm(2.0) for place in places]
            return float(torch.stack(norms).pow(2.0).sum()) if norms else 0.0
        total = torch.zeros(())
        for shard in range(self._replicas):
            norms = [
                torch.linalg.vector_norm(part.double(), ord=2.0)
                for place, _, part in self._slices(0, shard)
                if counted[place]
            ]
            total = total + (torch.stack(norms).pow(2.0).sum().float() if norms else 0.0)
        return float(total)

    def _slices(self, group: int, shard: int) -> list[tuple[int, int, Tensor]]:
        """The part of each parameter's gradient in a shard: the parameter's place, first element in the shard, view."""
        size = self._masters[group][shard].numel()
        found = []
        for place, begin in self._places[group]:
            gradient, start = self._gradients[place].reshape(-1), begin - shard * size
            first, last = max(-start, 0), min(size - start, gradient.numel())
            if first < last:
                found.append((place, start + first, gradient[first:last]))
        return found

    def clip(self, norms: Sequence[float | None]) -> float:
        """The factor of the gradients, from the :meth:`norm` of all stages; not a number if the update is left out."""
        total = torch.zeros(())
        for norm in norms:
            total = total + (norm or 0.0)
        total = total.pow(0.5)
        mask_nan_or_inf_with_val_inplace(total)
        found = total if self._bf16 else combine_grad_norm_groups([total])
        return self.found(found)

    def found(self, norm: Any) -> float:
        """Take the norm over all stages; returns what :meth:`clip` does."""
        if norm is None or is_invalid_grad_norm(norm):
            self._norm, self._factor = math.inf, math.nan
            return self._factor
        self._norm, self._factor = norm, 1.0
        limit = float(self._outer.clip_grad)
        if limit > 0.0 and self._bf16:
            coefficient = limit / (norm + 1e-6)
            self._factor = float(coefficient) if coefficient < 1 else 1.0
        elif limit > 0.0:
            self._factor = float(1.0 / torch.clamp((norm + 1e-6) / limit, min=1.0))
        return self._factor

    @torch.no_grad()
    def _step(self, closure: None = None) -> None:
        """In place of DeepSpeed's: the update of all shards, and the parameters that come from them."""
        outer = self._outer
        compat.set_step_facts(outer, overflow=math.isnan(self._factor), norm=self._norm)
        self._take_hyperparameters()
        for group, masters in enumerate(self._masters):
            for shard, master in enumerate(masters):
                master.grad = None if outer.overflow else self._gradient(group, shard)
        self.optimizer.step()
        for masters in self._masters:
            for master in masters:
                master.grad = None
        self._gradients = []
        self._used.clear()
        for flat, masters in zip(self._flats, self._masters, strict=True):
            for part, master in zip(flat.partitions, masters, strict=True):
                part.data.copy_(master.data)
        self.link()

    def _gradient(self, group: int, shard: int) -> Tensor:
        """Of a shard's master weights: clipped, in fp32."""
        made = torch.zeros_like(self._masters[group][shard])
        for _, at, part in self._slices(group, shard):
            clipped = part * self._factor if self._bf16 and self._factor != 1.0 else part  # in its own type
            made[at : at + part.numel()] = clipped
        return made if self._bf16 or self._factor == 1.0 else made.mul_(self._factor)

    # -- what DeepSpeed has of it ------------------------------------------------------------------

    def _take_hyperparameters(self) -> None:
        for mine, theirs in zip(self.optimizer.param_groups, self._outer.optimizer.param_groups, strict=True):
            mine.update({name: value for name, value in theirs.items() if name != "params"})

    def link(self) -> None:
        """Give DeepSpeed's optimizer the moments of this rank's shard, also after they were replaced."""
        changed = False
        for own in self._own:
            state = self.optimizer.state.get(own)
            if state and self._outer.optimizer.state.get(own) is not state:
                self._outer.optimizer.state[own] = state
                changed = True
        if changed:
            compat.link_moments(self._outer, there=True)

    def loaded(self, group: Any) -> None:
        """DeepSpeed has loaded this rank's shard: get the others from their ranks. A collective of the replicas."""
        self._take_hyperparameters()
        self.optimizer.state.clear()
        for masters in self._masters:
            own = masters[self._index]
            state = self._outer.optimizer.state.get(own, {})
            for shard, master in enumerate(masters):
                made = state if shard == self._index else {name: copy.deepcopy(value) for name, value in state.items()}
                for tensor in (master.data, *(made[name] for name in sorted(made))):
                    if isinstance(tensor, Tensor):
                        dist.broadcast(tensor, dist.get_global_rank(group, shard), group=group)
                if made:
                    self.optimizer.state[master] = made


def _another(inner: torch.optim.Optimizer, masters: Sequence[Sequence[Tensor]]) -> torch.optim.Optimizer:
    """An optimizer like ``inner`` for other parameters, with the same moments for those that it has.

    Of a class of its own: the stage's parameters follow from its masters, outside its step, so who copies the state
    while updates continue cannot make them again from gradients alone.
    """
    kind = type(f"Whole{type(inner).__name__}", (type(inner),), {"__module__": __name__})
    made: torch.optim.Optimizer = object.__new__(kind)
    made.__dict__.update(inner.__dict__)
    made.__dict__.pop("step", None)  # schedulers count calls of the other one's
    made.param_groups = [
        {**group, "params": list(some)} for group, some in zip(inner.param_groups, masters, strict=True)
    ]
    made.state = defaultdict(dict)
    for group, some in zip(inner.param_groups, masters, strict=True):
        own = group["params"][0]
        for master in some if own in inner.state else ():
            made.state[master] = inner.state[own] if master is own else copy.deepcopy(inner.state[own])
    return made


def _refuse_whole(outer: Any) -> None:
    bf16, inner = isinstance(outer, BF16_Optimizer), outer.optimizer
    zero_in_bf16 = not bf16 and outer.dtype == torch.bfloat16
    reasons = [
        (bf16 and outer.immediate_grad_update, "bf16.immediate_grad_update"),
        (
            "muon" in type(inner).__name__.lower(),
            f"the optimizer {type(inner).__name__}, whose matrices are whole",
        ),
        (not bf16 and not outer.compute_grad_norm, "zero_optimization.compute_grad_norm=false"),
        (zero_in_bf16 and not outer.check_grad_overflow, "bf16.check_grad_overflow=false"),
        (not bf16 and len(inner.param_groups) > 1, "ZeRO-1 and several parameter groups"),
        (not bf16 and outer.low_precision_master_weights_and_grads, "master weights in low precision"),
    ]
    for holds, what in reasons:
        if holds:
            raise Unsupported(f"on_failure='reroute' cannot be used with {what}: choose on_failure='replace'")

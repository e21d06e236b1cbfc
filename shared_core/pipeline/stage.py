"""The layers of one pipeline stage, computed one micro-batch at a time outside any schedule.

Gradients of each micro-batch are kept apart: added in the order of the micro-batches they give the bits that the
schedule gives, wherever they were computed.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.torch_autocast import autocast_if_enabled
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from shared_core.loaders import seed_random
from shared_core.pipeline import compat
from shared_core.reroute.step import leaves_of

#: What passes between stages.
TensorOrTuple = Any


def layer_seed(seed: int, number: int, layer: int) -> int:
    """Seed, 63 bits, of a layer (place in the whole model) in a micro-batch (number over all steps, pipelines)."""
    raw = hashlib.blake2b(f"{seed} {number} {layer}".encode(), digest_size=8).digest()
    return int.from_bytes(raw, "big") >> 1


@dataclass
class Work:
    """One micro-batch of a stage; ``labels`` at the last one, ``gradient`` of the output at the others."""

    number: int
    inputs: TensorOrTuple
    labels: TensorOrTuple = None
    gradient: torch.Tensor | None = None


@dataclass
class Computed:
    """What a stage makes of a micro-batch.

    Attributes:
        loss: at the last stage; else None.
        input_gradients: of the floating-point inputs, None for the others; None at the first stage.
        gradients: of each parameter, None where the micro-batch does not reach it.
    """

    outputs: TensorOrTuple
    loss: torch.Tensor | None
    input_gradients: TensorOrTuple
    gradients: list[torch.Tensor | None]


@dataclass
class Passed:
    """A micro-batch whose forward pass is made.

    Attributes:
        leaves: its inputs, detached, which are differentiated.
        roots: from which backward begins; empty after it.
        loss: at the last stage; else None.
    """

    work: Work
    leaves: tuple[torch.Tensor, ...]
    outputs: TensorOrTuple
    roots: list[torch.Tensor]
    loss: torch.Tensor | None


@dataclass
class Stage:
    """Layers that a worker computes for itself or another.

    Attributes:
        parameters: those that are trained, in the order of DeepSpeed's module.
        loss_fn: of the last stage; None elsewhere, and where the last layer gives the loss.
        micro_batches: of a step; gradients are divided by it.
        autocast: entered while the layers compute, as DeepSpeed's engine does.
    """

    module: nn.Module
    layers: Sequence[Callable[[TensorOrTuple], TensorOrTuple]]
    first: int
    parameters: list[nn.Parameter]
    loss_fn: Callable[[TensorOrTuple, TensorOrTuple], torch.Tensor] | None
    last: bool
    micro_batches: int
    seed: int
    autocast: Callable[[], AbstractContextManager[None]]

    def run(self, x: TensorOrTuple, number: int) -> TensorOrTuple:
        """The layers of micro-batch ``number`` (see :func:`layer_seed`). The caller restores the global generators."""
        with self.autocast():
            for layer, call in enumerate(self.layers, self.first):
                seed_random(layer_seed(self.seed, number, layer))
                x = call(x)
        return x

    def forward(self, work: Work) -> Passed:
        """Forward of one micro-batch. Sets the global generators; the caller restores them."""
        leaves = leaves_of(as_tuple(work.inputs), first=self.first == 0)
        x: TensorOrTuple = tuple(t.clone() for t in leaves) if isinstance(work.inputs, tuple) else leaves[0].clone()
        x = self.run(x, work.number)
        loss = None
        if self.last:
            loss = self.loss_fn(x, work.labels) if self.loss_fn is not None else x
            roots = [loss / self.micro_batches]
        else:
            roots = [t for t in as_tuple(x) if t.is_floating_point()]
        outputs = tuple(t.detach() for t in x) if isinstance(x, tuple) else x.detach()
        return Passed(work, leaves, outputs, roots, None if loss is None else loss.detach())

    def backward(self, passed: Passed, gradient: torch.Tensor | None) -> Computed:
        """Backward of a micro-batch, once; frees the graph, leaves ``.grad``. The last stage needs no gradient."""
        leaves, given = passed.leaves, None if self.last else [gradient]
        wanted = [*self.parameters, *(t for t in leaves if t.requires_grad)]
        got: list[torch.Tensor | None] = list(torch.autograd.grad(passed.roots, wanted, given, allow_unused=True))
        of_inputs = iter(got[len(self.parameters) :])
        input_gradients: TensorOrTuple = tuple(next(of_inputs) if t.requires_grad else None for t in leaves)
        if not isinstance(passed.work.inputs, tuple):
            input_gradients = input_gradients[0]
        passed.roots = []
        return Computed(passed.outputs, passed.loss, input_gradients, got[: len(self.parameters)])


def compute_line(stages: Sequence[Stage], works: Sequence[Work]) -> list[Computed]:
    """Forward and backward of one micro-batch in neighboring stages, each with its own graph.

    One tensor passes from stage to stage; the first of ``works`` has inputs, the last labels or a gradient. Sets the
    global generators; the caller restores them.
    """
    line: list[Passed] = []
    for place, (stage, work) in enumerate(zip(stages, works, strict=True)):
        inputs = line[-1].outputs if place else work.inputs
        line.append(stage.forward(Work(work.number, inputs, work.labels)))
    gradient, done = works[-1].gradient, []
    for stage, passed in zip(reversed(stages), reversed(line), strict=True):
        done.append(stage.backward(passed, gradient))
        gradient = done[-1].input_gradients
    return done[::-1]


def clone(engine: PipelineEngine, stage: int, seed: int) -> Stage:
    """Build the layers of another stage, as DeepSpeed builds its own; parameters are fresh, modules are copied."""
    module = engine.module
    first, stop = module.parts[stage], module.parts[stage + 1]
    made = nn.Module()
    made.tied_modules = nn.ModuleDict()
    layers: list[Callable[[TensorOrTuple], TensorOrTuple]] = []
    for place, spec in enumerate(compat.layers_of(module)[first:stop], first):
        if isinstance(spec, TiedLayerSpec):
            if spec.key not in made.tied_modules:
                made.tied_modules[spec.key] = spec.build()
            tied = made.tied_modules[spec.key]
            layers.append(tied if spec.forward_fn is None else partial(spec.forward_fn, tied))
        elif isinstance(spec, LayerSpec | nn.Module):
            layer = spec.build() if isinstance(spec, LayerSpec) else copy.deepcopy(spec)
            made.add_module(str(place), layer)
            layers.append(layer)
        else:
            layers.append(spec)
    made.train()
    return _stage(engine, made, layers, stage, seed)


def own(engine: PipelineEngine, seed: int) -> Stage:
    return _stage(engine, engine.module, engine.module.forward_funcs, int(engine.stage_id), seed)


def _stage(engine: PipelineEngine, holder: nn.Module, layers: Sequence[Any], stage: int, seed: int) -> Stage:
    module, micro_batches = engine.module, int(engine.micro_batches)
    last = stage == module.num_stages - 1
    parameters = [p for p in holder.parameters() if p.requires_grad]
    loss_fn = module.loss_fn if last else None
    autocast = partial(autocast_if_enabled, engine)
    return Stage(holder, layers, module.parts[stage], parameters, loss_fn, last, micro_batches, seed, autocast)


def as_tuple(value: TensorOrTuple | None) -> tuple[torch.Tensor, ...]:
    """The tensors that pass between stages; none for None."""
    return () if value is None else (value,) if isinstance(value, torch.Tensor) else tuple(value)


def has_running_statistics(module: nn.Module) -> bool:
    """Whether a layer keeps running statistics, which depend on the order of micro-batches and on who computes them."""
    return any(isinstance(m, _NormBase) and m.track_running_stats for m in module.modules())

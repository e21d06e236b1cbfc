"""The layers of another stage of an engine's pipeline, trained beside its own by a worker that computes there."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from deepspeed.pipe import TiedLayerSpec
from deepspeed.runtime.utils import is_model_parallel_parameter
from torch import Tensor, nn
from torch.optim import Optimizer

from shared_core.errors import ReplicaMismatch
from shared_core.job import Job
from shared_core.loaders.randomness import RawRandom, restore_raw
from shared_core.pipeline import compat, stage
from shared_core.pipeline.instrumented_engine import InstrumentedEngine
from shared_core.pipeline.stage import as_tuple
from shared_core.reroute.messages import Tensors
from shared_core.reroute.moving import flat_bytes, from_bytes
from shared_core.reroute.step import StageModel, Tied
from shared_core.reroute.summing import unflatten
from shared_core.worker.state.replicated import Replicated
from shared_core.worker.state.undo import Undo, is_of_torch

_PARAMS = ("params", "param_names")
_OURS = __name__.partition(".")[0]


class StageState:
    """What a worker of an engine's stage gives to one of another stage: parameters, buffers and optimizer state."""

    def __init__(self, engine: InstrumentedEngine) -> None:
        self._engine = engine
        self._possible = _can_be_built(engine)

    @property
    def state_bytes(self) -> int | None:
        """Bytes; None where workers cannot build each other's stages, or hooks would be missed there."""
        return sum(t.nbytes for t in self._tensors()[1]) if self._possible and not self.hooked else None

    @property
    def hooked(self) -> bool:
        """Whether hooks of the script on this stage's optimizer alone keep workers from moving.

        They may belong to this stage's parameters, and a moved worker makes the other optimizer from scratch.
        """
        if not self._possible:
            return False
        optimizer: Any = self._engine.optimizer
        hooks = (*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values())
        return any(hook.__module__.partition(".")[0] != _OURS for hook in hooks)

    def terms(self) -> str:
        """What the optimizers of all stages must have in common, as text."""
        optimizer = self._engine.optimizer
        return repr([type(optimizer).__name__, *(sorted(hyper.items()) for hyper in hyperparameters(optimizer))])

    def export(self) -> tuple[dict[str, Any], Tensor]:
        """Description, plain data, and a copy of the bytes, uint8."""
        module, optimizer = self._engine.module, self._engine.optimizer
        description, tensors = self._tensors()
        replicated = Replicated([module], [optimizer])
        description |= {
            "names": replicated.names,
            "layers": _layers(module),
            "trained": [parameter.requires_grad for parameter in replicated.parameters],
            "groups": [[replicated.index_of(p) for p in group["params"]] for group in optimizer.param_groups],
            "tensors": [[list(t.shape), str(t.dtype).removeprefix("torch.")] for t in tensors],
        }
        return description, flat_bytes(tensors)

    def _tensors(self) -> tuple[dict[str, Any], list[Tensor]]:
        module = self._engine.module
        description, tensors = Replicated([module], [self._engine.optimizer]).export()
        buffers = _buffers(module)
        return description | {"buffers": len(buffers)}, [*tensors, *buffers]


class StageUpdates:
    """Updates of a stage, each of which can be taken back until the next one, or until it is accepted."""

    def __init__(self, optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters, self._updated = parameters, optimizer
        self._undo: Undo | None = None

    def _begin(self, tentative: bool) -> None:
        if tentative and self._undo is None:
            self._undo = Undo([self._updated])
            self._undo.arm()
        self.accept()

    def accept(self) -> None:
        if self._undo is not None:
            self._undo.commit()

    def _scale(self, factor: float) -> None:
        if factor == 1.0:
            return
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad = parameter.grad * factor  # not in place: a peer may still ask for the sum


class HostedStage(StageUpdates):
    """The layers of another stage, as a :class:`shared_core.reroute.step.StageModel`.

    Args:
        home: the layers of this worker's own stage.
        description, state: what :meth:`StageState.export` gave there.

    Raises ReplicaMismatch if the layers built here are others than those that are trained there.
    """

    def __init__(
        self,
        engine: InstrumentedEngine,
        job: Job,
        home: StageModel,
        number: int,
        description: Mapping[str, Any],
        state: Tensor,
    ) -> None:
        self._engine, self._home, self._number = engine, home, number
        before = RawRandom()
        self._stage = stage.clone(engine, number, job.config.seed)
        restore_raw(before)
        module, tensors = self._stage.module, from_bytes(state, description["tensors"])
        named = list(module.named_parameters())
        buffers = _buffers(module)
        if [name for name, _ in named] != description["names"] or len(buffers) != description["buffers"]:
            raise ReplicaMismatch(
                f"rank {job.rank}: stage {number} has other parameters or buffers when it is built again to stand in "
                "for a failed worker. Build layers the same way each time: not by rank, and without counters or random "
                "choices"
            )
        if _layers(module) != description["layers"]:
            raise ReplicaMismatch(
                f"rank {job.rank}: a layer of stage {number} was changed, or given a hook, after it was built, so it "
                "cannot be built again here. Do that in the layer's constructor, or use on_failure='replace'"
            )
        for (_, parameter), trained in zip(named, description["trained"], strict=True):
            parameter.requires_grad_(trained)
        self._optimizer = _like(engine.optimizer, [[named[i][1] for i in group] for group in description["groups"]])
        count = len(tensors) - len(buffers)
        Replicated([module], [self._optimizer]).load(dict(description), tensors[:count], owned=True)
        for own, theirs in zip(buffers, tensors[count:], strict=True):
            own.data.copy_(theirs)
        super().__init__(self._optimizer, [p for p in module.parameters() if p.requires_grad and p.numel()])
        self.module, self.accumulates = module, None
        self.tied: Sequence[Tied] = ()

    def items(self) -> list[tuple[Tensors, Tensors]]:
        return self._home.items()

    def forward(
        self, inputs: Tensors, labels: Tensors | None, pipeline: int, micro_batch: int, step: int | None = None
    ) -> Tensors:
        before = RawRandom()
        copies = tuple(t.clone() for t in inputs)
        number = self._engine.number_of(micro_batch, pipeline, step)
        outputs = self._stage.run(copies if len(copies) > 1 else copies[0], number)
        restore_raw(before)
        if labels is None:
            return as_tuple(outputs)
        loss = outputs
        if self._stage.loss_fn is not None:
            loss = self._stage.loss_fn(outputs, labels if len(labels) > 1 else labels[0])
        return loss.float() / int(self._engine.micro_batches), loss

    def set_gradients(self, flat: Tensor) -> None:
        set_gradients(self.parameters, flat)

    def norm(self) -> float | None:
        if self._engine.gradient_clipping() <= 0.0:
            return None
        return square_sum(self.parameters, self._number == 0)

    def clip(self, norms: Sequence[float | None]) -> float:
        return self._home.clip(norms)

    def update(self, factor: float, tentative: bool) -> None:
        self._begin(tentative)
        self._step(factor)

    def update_again(self, factor: float) -> None:
        assert self._undo is not None
        self._undo.undo()
        self._step(factor)
        self._undo.commit()

    def _step(self, factor: float) -> None:
        """Update with the schedules of this worker's own stage, whose update of the step comes later."""
        for group, values in zip(self._optimizer.param_groups, hyperparameters(self._engine.optimizer), strict=True):
            group.update(values)
        self._scale(factor)
        self._optimizer.step()
        self._optimizer.zero_grad()


def set_gradients(parameters: Sequence[nn.Parameter], flat: Tensor) -> None:
    """Set ``.grad`` to views of a flat sum of gradients."""
    for parameter, gradient in zip(parameters, unflatten(flat, parameters), strict=True):
        parameter.grad = gradient


def square_sum(parameters: Sequence[nn.Parameter], first: bool) -> float:
    """Sum of squares as DeepSpeed counts them: of other stages than the first, only what workers divide."""
    counted = [p for p in parameters if first or is_model_parallel_parameter(p)]
    norms = [p.grad.detach().float().norm(2.0) for p in counted if p.grad is not None]
    return float(torch.stack(norms).pow(2.0).sum().float()) if norms else 0.0


def hyperparameters(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [{name: value for name, value in group.items() if name not in _PARAMS} for group in optimizer.param_groups]


def _layers(module: nn.Module) -> list[str]:
    """Representation and number of hooks of each layer; layers are the children that are named by their place."""
    return [f"{layer!r}, {_hooks_of(layer)} hooks" for name, layer in module.named_children() if name.isdigit()]


def _hooks_of(layer: nn.Module) -> int:
    """Hooks of a layer's parts and parameters: those of its constructor, and what the script has registered since."""
    count = 0
    for part in layer.modules():
        count += len(part._forward_hooks) + len(part._forward_pre_hooks)
        count += len(part._backward_hooks) + len(part._backward_pre_hooks)
    for parameter in layer.parameters():
        count += len(parameter._backward_hooks or ()) + len(parameter._post_accumulate_grad_hooks or ())
    return count


def _buffers(module: nn.Module) -> list[Tensor]:
    """Of the layers, which are named by their place; the loss function has its own everywhere."""
    return [buffer for name, buffer in module.named_buffers() if name.partition(".")[0].isdigit()]


def _like(optimizer: Optimizer, groups: Sequence[Sequence[nn.Parameter]]) -> Optimizer:
    """An optimizer of the same kind for other parameters, made as ``pickle`` would make it: constructors differ."""
    made = type(optimizer).__new__(type(optimizer))
    rows = [{"params": list(group), **hyper} for group, hyper in zip(groups, hyperparameters(optimizer), strict=True)]
    made.__setstate__({"defaults": optimizer.defaults, "state": defaultdict(dict), "param_groups": rows})
    return made


def _can_be_built(engine: InstrumentedEngine) -> bool:
    """Whether a worker of any stage can build any other as it is trained; the same at all workers."""
    module, loss_fn = engine.module, engine.module.loss_fn
    return (
        not any(isinstance(spec, TiedLayerSpec) for spec in compat.layers_of(module))
        and module.activation_checkpoint_interval == 0
        and is_of_torch(engine.optimizer)
        and not (isinstance(loss_fn, nn.Module) and any(True for _ in loss_fn.parameters()))
    )

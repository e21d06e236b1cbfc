"""What a worker has of a step under way, and what the executor needs of the layers it runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shared_core.reroute.messages import DTYPES, MessageKey, Tensors
from shared_core.reroute.split import StageBackward
from shared_core.reroute.summing import SumRule
from shared_core.schedule.schedule import Topology

#: Inputs and labels of a micro-batch; None for what this worker does not have.
Item = tuple[Tensors | None, Tensors | None]
#: From a pipeline's number to its data of the step that this worker has drawn data of.
Reader = Callable[[int], Sequence[tuple[Tensors, Tensors]]]


@dataclass(frozen=True)
class Tied:
    """Parameters that several stages have, and that must stay equal: their gradients are summed over the stages, too.

    Attributes:
        number: from 1, the same at all workers of these stages.
        stages: ascending.
        parameters: indices into :attr:`StageModel.parameters`, in an order that the stages share.
    """

    number: int
    stages: tuple[int, ...]
    parameters: tuple[int, ...]


class StageModel(Protocol):
    @property
    def module(self) -> nn.Module:
        """Holds the layers."""

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """Those that are trained, in the order in which gradients are summed."""

    @property
    def accumulates(self) -> torch.dtype | None:
        """The type in which gradients of micro-batches are added; None where autograd adds them in ``.grad``."""

    @property
    def tied(self) -> Sequence[Tied]:
        """Which parameters other stages have, too, by ascending number."""

    def items(self) -> list[tuple[Tensors, Tensors]]:
        """Inputs and labels of this pipeline's micro-batches of the next step; called at first and last stages."""

    def forward(
        self, inputs: Tensors, labels: Tensors | None, pipeline: int, micro_batch: int, step: int | None = None
    ) -> Tensors:
        """Outputs of a micro-batch of ``pipeline``; at the last stage what is differentiated, and its loss.

        ``inputs`` are leaves. Random numbers are those of ``step``; None for the present one.
        """

    def set_gradients(self, flat: Tensor) -> None:
        """Take the summed gradients of all parameters, concatenated; they must not be changed."""

    def clip(self, norms: Sequence[float | None]) -> float:
        """The factor of the gradients, from the stages' :meth:`norm`; not a number where the update is left out."""

    def norm(self) -> float | None:
        """Sum of the squares of the summed gradients; None where nothing is clipped."""

    def update(self, factor: float, tentative: bool) -> None:
        """Apply the gradients, multiplied by ``factor``; if ``tentative``, so that it can be taken back."""

    def update_again(self, factor: float) -> None:
        """Take the tentative update back, bit for bit, and apply the gradients multiplied by ``factor``."""

    def accept(self) -> None:
        """The tentative update stays."""


class HomeModel(StageModel, Protocol):
    """The layers of the stage to which this worker belongs. It may have to build another one's."""

    @property
    def state_bytes(self) -> int | None:
        """Bytes of parameters and optimizer state; None where workers cannot build each other's stages."""

    @property
    def reader(self) -> Reader | None:
        """Reads the data of the step that was drawn last; None where only the pipeline's own ends can draw."""

    def terms(self) -> str:
        """Hyper-parameters that workers of all stages must have in common before one of them moves."""

    def export(self) -> tuple[dict[str, Any], Tensor]:
        """Description, plain data, and all bytes of parameters, buffers and optimizer state, uint8."""

    def build(self, stage: int, description: Mapping[str, Any], state: Tensor) -> StageModel:
        """Layers of another stage, from an export. Raises Unsupported, ReplicaMismatch where they are others."""


@dataclass
class Step:
    """What this worker has of a step.

    Attributes:
        at: place in the row of the plan.
        reader: of the items of other pipelines; None where this worker cannot read them.
        made: messages that this worker has computed, for readers that need them again.
        records: forwards whose backward is still to be done, by (pipeline, micro-batch), and their outputs.
        losses: of the micro-batches that this worker has computed at the last stage.
        sums: accumulated gradients, by home pipeline; all under -1 where the plan is not ordered.
        reduced: flat sum over all pipelines, once it is there; of tied layers, over their stages, too.
        tied: sums of what stages have in common that others had before a failure, by number of :class:`Tied`.
        reduce_s: seconds of the sum, with waiting for peers of the stage.
        norms: by stage, as far as they are known; see :meth:`StageModel.norm`.
        tentative: the update was made before the norms of all stages were known.
        verdict: the factor of the gradients, once all norms are known.
        home: at a worker that computes elsewhere, the sum of its own stage, once it is there.
        followed: it has made its own stage's update with it.
    """

    number: int
    at: int = 0
    items: dict[tuple[int, int], Item] = field(default_factory=dict)
    reader: Reader | None = None
    made: dict[MessageKey, Tensors] = field(default_factory=dict)
    records: dict[tuple[int, int], tuple[StageBackward, Tensors]] = field(default_factory=dict)
    losses: dict[tuple[int, int], float] = field(default_factory=dict)
    sums: dict[int, list[Tensor | None]] = field(default_factory=dict)
    reduced: Tensor | None = None
    tied: dict[int, Tensor] = field(default_factory=dict)
    reduce_s: float = 0.0
    norms: dict[int, float | None] = field(default_factory=dict)
    updated: bool = False
    tentative: bool = False
    verdict: float | None = None
    admit: int = -1
    loss_type: torch.dtype = torch.float32
    result: StepResult | None = None
    home: Tensor | None = None
    followed: bool = False

    def facts(self) -> dict[str, Any]:
        """What others are told of the step after a failure; plain data, numbers as hexadecimal text."""
        return {
            "reduced": self.reduced is not None,
            "followed": self.home is not None,
            "norms": {str(stage): None if norm is None else norm.hex() for stage, norm in self.norms.items()},
            "losses": [[*place, loss.hex()] for place, loss in self.losses.items()],
            "result": [value.hex() for value in self.result.to_tensor().tolist()] if self.result else None,
        }

    def learn(self, facts: Mapping[str, Any], topology: Topology, last: bool) -> None:
        """Take over the norms and results that another worker has told, and, in the ``last`` stage, its losses."""
        for stage, norm in facts["norms"].items():
            self.norms.setdefault(int(stage), None if norm is None else float.fromhex(norm))
        for d, j, loss in facts["losses"] if last else ():
            self.losses.setdefault((d, j), float.fromhex(loss))
        if facts["result"] is not None and self.result is None:
            values = torch.tensor([float.fromhex(each) for each in facts["result"]], dtype=torch.float64)
            self.result = StepResult.from_tensor(values, topology)

    def go(self, *, from_home: bool, comes_home: bool) -> None:
        """This worker moves when the step has ended: keep what belongs to the stage at which it will compute."""
        self.made.clear()
        if from_home:
            self.home, self.followed = self.reduced, True
        elif comes_home:
            self.reduced = self.home


@dataclass(frozen=True)
class StepResult:
    """Losses by pipeline and micro-batch, and their dtype; ``admit``: survivor group that admits next, or -1."""

    losses: tuple[tuple[float, ...], ...]
    admit: int
    loss_type: torch.dtype = torch.float32

    def to_tensor(self) -> Tensor:
        head = [float(self.admit), float(DTYPES.index(self.loss_type))]
        return torch.tensor([*head, *(loss for row in self.losses for loss in row)], dtype=torch.float64)

    @classmethod
    def from_tensor(cls, values: Tensor, topology: Topology) -> StepResult:
        flag, dtype, *losses = values.tolist()
        count = topology.micro_batches
        rows = tuple(tuple(losses[d * count : (d + 1) * count]) for d in range(topology.pipelines))
        return cls(rows, int(flag), DTYPES[int(dtype)])


@dataclass(frozen=True)
class StepOptions:
    """How steps are run.

    Attributes:
        ordered: gradients of each home pipeline are summed apart and added by ascending pipeline.
        synchronous: no stage makes its update before all have their gradients. Otherwise a stage whose gradients must
            be clipped by the norm over all stages continues as if they need not, and takes its update back if they
            must, before the step is over for the caller.
    """

    ordered: bool = False
    synchronous: bool = False
    rule: SumRule = SumRule()
    moves: bool = True


@contextmanager
def accumulating(model: StageModel, sums: dict[int, list[Tensor | None]], home: int) -> Iterator[None]:
    """Inside, gradients of the parameters are added to those of one home pipeline; ``.grad`` is None afterwards."""
    parameters, dtype = model.parameters, model.accumulates
    own = sums.setdefault(home, [None] * len(parameters))
    for parameter, gradient in zip(parameters, own, strict=True):
        parameter.grad = gradient if dtype is None else None
    try:
        yield
    finally:
        for index, parameter in enumerate(parameters):
            if dtype is None:
                own[index] = parameter.grad
            elif parameter.grad is not None:
                before = own[index]
                # From zero on, as DeepSpeed's buffers, where -0.0 becomes 0.0.
                total = torch.zeros_like(parameter, dtype=dtype) if before is None else before
                own[index] = total.add_(parameter.grad.to(dtype))
            parameter.grad = None


def differentiable(outputs: Tensors, last: bool) -> Tensors:
    return outputs[:1] if last else tuple(t for t in outputs if t.requires_grad)


def leaves_of(inputs: Iterable[Tensor], first: bool) -> Tensors:
    """Leaves that share the memory of a stage's inputs; none of the first stage's, data, is differentiated."""
    return tuple(t.detach().requires_grad_(not first and t.is_floating_point()) for t in inputs)


def detached(parts: Iterable[Tensor]) -> Tensors:
    return tuple(t.detach().requires_grad_(t.requires_grad) for t in parts)


def table_of(losses: Mapping[tuple[int, int], float], topology: Topology) -> Tensor:
    """Flat float64 losses by pipeline and micro-batch, NaN where they are another worker's."""
    values = [losses.get((d, j), math.nan) for d in range(topology.pipelines) for j in range(topology.micro_batches)]
    return torch.tensor(values, dtype=torch.float64)


def merge(losses: dict[tuple[int, int], float], table: Tensor, topology: Topology) -> None:
    """Add losses of a :func:`table_of` that are not known yet."""
    for index, loss in enumerate(table.tolist()):
        if not math.isnan(loss):
            losses.setdefault(divmod(index, topology.micro_batches), loss)


class FormerParameters:
    """Keeps them in one extra copy of the parameters, on their device."""

    def __init__(self, model: StageModel) -> None:
        self._model = model
        self._kept: list[nn.Parameter] = []
        self._step = -1

    def keep(self, step: Step) -> None:
        """Copy the parameters; call it right before the update of ``step``."""
        parameters = self._model.parameters
        if not self._kept:
            self._kept = [nn.Parameter(torch.empty_like(parameter)) for parameter in parameters]
        with torch.no_grad():
            for kept, parameter in zip(self._kept, parameters, strict=True):
                kept.copy_(parameter)
        self._step = step.number

    @contextmanager
    def of(self, step: Step) -> Iterator[None]:
        """Inside, the layers compute as they did in ``step``, which has its sum. Afterwards ``.grad`` is as before."""
        module, parameters = self._model.module, self._model.parameters
        gradients, training = [parameter.grad for parameter in parameters], module.training
        assert not step.updated or self._step == step.number, (self._step, step.number)
        # The layers get other parameters: the present ones stay unchanged for graphs of the next step, and for the
        # thread that copies them to a replacement.
        _exchange(module, dict(zip(parameters, self._kept, strict=True)) if step.updated else {})
        if not training:  # the program evaluates by now; DeepSpeed's calls set all layers at once, too
            module.train()
        try:
            yield
        finally:
            _exchange(module, dict(zip(self._kept, parameters, strict=True)) if step.updated else {})
            if not training:
                module.eval()
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            for kept in self._kept:
                kept.grad = None


def _exchange(module: nn.Module, others: dict[nn.Parameter, nn.Parameter]) -> None:
    for layer in module.modules():
        for name, parameter in list(layer.named_parameters(recurse=False, remove_duplicate=False)):
            if parameter in others:
                setattr(layer, name, others[parameter])

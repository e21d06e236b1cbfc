"""DeepSpeed's engine without a pipeline, whose ZeRO divides optimizer state, gradients and parameters over the ranks.

Each rank publishes all that it has at each step boundary: with stage 3 its partition of the parameters, with stages 1
and 2 all of them, and its partition of the masters and moments. Stage 0 divides nothing, and is published whole. A
replacement takes that, and runs the failed worker's batch again with its updates. Gathers are run again for it;
reductions come from the log, or are run again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import nn
from torch.nn.functional import pad

from shared_core.errors import Unsupported
from shared_core.job import current_job
from shared_core.pipeline import compat
from shared_core.pipeline.sharded import captured, evaluates, put_back
from shared_core.worker.sharded.own import Owner
from shared_core.worker.sharded.shard import LAYOUT, OLD_RANKS

# -- what was divided over another number of ranks, divided again: functions of plain data ----------------------------
#
# Each rank holds flat tensors (masters, moments, gradients). One is a row of pieces: one of each parameter (stage 3),
# or one of all parameters of a group (stages 1 and 2). All ranks have pieces of the same sizes; the last are padded.


class StagePiece(NamedTuple):
    """A rank's piece of what was divided.

    Attributes:
        of: number of the parameter, or group.
        whole: elements of that; padding may be among them.
        size: elements of the piece, padding among them.
    """

    of: int
    whole: int
    size: int


Row = Sequence[StagePiece]


def piece_of(whole: torch.Tensor, size: int, rank: int) -> torch.Tensor:
    """A rank's piece of a flat tensor, padded with zeros to ``size``."""
    part = whole[rank * size : (rank + 1) * size]
    return pad(part, (0, size - part.numel()))


def divided_anew(flats: Sequence[torch.Tensor], old: Row, new: Row, rank: int) -> torch.Tensor:
    """A rank's flat tensor, from those of all old ranks, in the order of their ranks."""
    pieces, at = [], 0
    for before, after in zip(old, new, strict=True):
        whole = torch.cat([flat.narrow(0, at, before.size) for flat in flats])[: before.whole]
        pieces.append(piece_of(whole, after.size, rank))
        at += before.size
    return torch.cat(pieces)


def repartitioned(
    old: Sequence[Mapping[str, Any]], rows: Sequence[Row], sizes: Sequence[int], rank: int
) -> dict[str, Any]:
    """What a new rank would have captured.

    Args:
        old: what each old rank has captured; see :meth:`~shared_core.pipeline.zero.ZeroState.capture`.
        sizes: elements of the new rank's parts of the parameters.

    Raises Unsupported if DeepSpeed groups parameters in another way with this number of ranks.
    """
    first, layout = old[0], old[0]["layout"]
    before = [[StagePiece(*piece) for piece in row] for row in layout["masters"]]
    if [[piece.of for piece in row] for row in before] != [[piece.of for piece in row] for row in rows]:
        raise Unsupported(
            "DeepSpeed groups parameters in another way with this number of workers; a larger sub_group_size in "
            "zero_optimization may help"
        )

    def divided(number: int, flats: Sequence[torch.Tensor]) -> torch.Tensor:
        return divided_anew(flats, before[number], rows[number], rank)

    optimizers = [each["optimizer"] for each in old]
    masters = [divided(number, [each["masters"][number] for each in optimizers]) for number in range(len(rows))]
    states = []
    for number, state in enumerate(first["optimizer"]["state"]):
        shape = first["optimizer"]["masters"][number].shape
        states.append(
            {
                key: divided(number, [each["state"][number][key] for each in optimizers])
                if isinstance(value, torch.Tensor) and value.shape == shape
                else value
                for key, value in state.items()
            }
        )
    partition = dict(first["partition"])
    if partition:
        flats = [each["partition"]["gradients"] for each in old]
        partition["gradients"] = divided_anew(flats, sum(before, []), [one for row in rows for one in row], rank)
    parameters = first["parameters"]
    if layout["parameters"]:
        parts = zip(*(each["parameters"] for each in old), strict=True)
        wholes = [torch.cat(part)[:numel] for part, numel in zip(parts, layout["parameters"], strict=True)]
        parameters = [piece_of(whole, size, rank) for whole, size in zip(wholes, sizes, strict=True)]
    optimizer = dict(first["optimizer"]) | {"masters": masters, "state": states}
    return dict(first) | {"parameters": parameters, "optimizer": optimizer, "partition": partition}


# -- an engine and its state ------------------------------------------------------------------------------------------


_PAGE = "See docs/sharded.md"
#: Of DeepSpeed's optimizers that divide: what each calls the flat tensors that the optimizer inside steps.
_MASTERS = {
    "BF16_Optimizer": "fp32_groups_flat_partition",
    "DeepSpeedZeroOptimizer": "single_partition_of_fp32_groups",
    "DeepSpeedZeroOptimizer_Stage3": "fp32_partitioned_groups_flat",
}
#: Where the optimizer is torch's own, stepping the parameters themselves, nothing is divided: stage 0.
_DIVIDES_NOTHING = 0


class SwiftZeroEngine(Owner, DeepSpeedEngine):  # type: ignore[misc]
    """DeepSpeed's engine, whose workers can be replaced once :func:`shared_core.attach` has it.

    Outside ``swiftrun`` it is DeepSpeed's engine. ``pending`` says that no update has used the gradients yet.
    """

    pending = False

    def own_state(self) -> ZeroState:
        """What this rank has of the model. Raises ``Unsupported`` for what :func:`refuse_zero` refuses."""
        refuse_zero(self)
        if (job := current_job()) is not None:
            job.variables.leave(nn.Module, compat.OF_MODULES)
        return ZeroState(self)

    def holds(self, each: object) -> bool:
        """Whether the engine has this inside: its model, optimizers, or schedule of learning rates."""
        optimizer = self.optimizer
        own = (self.module, optimizer, getattr(optimizer, "optimizer", None), self.lr_scheduler)
        return each is not None and any(each is part for part in own)

    def _backward_epilogue(self) -> None:
        self.pending = True
        super()._backward_epilogue()

    def _take_model_step(self, *args: Any, **kwargs: Any) -> None:
        job = current_job()
        if job is None:
            super()._take_model_step(*args, **kwargs)
            return
        if job.trained.shard is None:
            raise Unsupported(
                "the DeepSpeed engine takes a step, and its batches are not known: write job = "
                f"shared_core.attach(engine), and read the batches through job.steps(loader). {_PAGE}"
            )
        with job.updates.update():
            super()._take_model_step(*args, **kwargs)
        self.pending = False


class ZeroState:
    """What one rank has; see :class:`~shared_core.worker.sharded.own.OwnState`."""

    apart = False

    def __init__(self, engine: SwiftZeroEngine) -> None:
        self._engine, self._optimizer = engine, engine.optimizer
        self.padded = self._divides_parameters = engine.zero_optimization_stage() == 3
        self._divides = type(self._optimizer).__name__ in _MASTERS
        self._order: Any = None
        self._configured = engine.gradient_accumulation_steps()  # the script may set another number later
        self._rows = self._pieces()
        self._layout = self._find_layout()

    @property
    def unsettled(self) -> bool:
        """Whether gradients are pending; between the micro-batches of a step no replacement can begin."""
        return self._engine.pending

    @property
    def step_bytes(self) -> int:
        """Gradients of each micro-batch, and gathered parameters, in fp32 at most."""
        numel: int = sum(getattr(each, "ds_numel", each.numel()) for each in self._engine.module.parameters())
        micro_batches: int = self._engine.gradient_accumulation_steps()
        return 4 * numel * (1 + micro_batches)

    def reshard(self) -> None:
        """Release gathered parameters but those that persist, and what depends on an earlier order of gathering."""
        if self._divides_parameters:
            compat.let_go(self._optimizer)
            self._order = compat.forget_releases(self._optimizer, self._order)

    @property
    def _masters(self) -> list[torch.Tensor]:
        if not self._divides:
            return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        return list(getattr(self._optimizer, _MASTERS[type(self._optimizer).__name__]))

    def _pieces(self) -> list[list[StagePiece]]:
        if not self._divides_parameters:
            ranks = dist.get_world_size()
            return [[StagePiece(i, ranks * each.numel(), each.numel())] for i, each in enumerate(self._masters)]
        places = {id(each): place for place, each in enumerate(self._engine.module.parameters())}
        return [
            [StagePiece(places[id(each)], each.ds_numel, each.partition_numel()) for each in group]
            for group in self._optimizer.fp16_groups
        ]

    def _parameters(self) -> Iterator[tuple[torch.Tensor, int]]:
        """What is here of each parameter, and elements of the whole; without those that are masters (fp32, stage 3)."""
        masters = {each.untyped_storage().data_ptr() for each in self._masters}
        for parameter in self._engine.module.parameters():
            part = getattr(parameter, "ds_tensor", parameter).detach()
            if part.untyped_storage().data_ptr() not in masters:
                yield part, getattr(parameter, "ds_numel", parameter.numel())

    def _find_layout(self) -> dict[str, Any]:
        """What another number of ranks needs to know; nothing where the order depends on it, and with stage 0."""
        if not self._divides or getattr(self._optimizer, "round_robin_gradients", False):
            return {}
        divided = self._divides_parameters
        wholes = [numel for _, numel in self._parameters()] if divided else []
        return {LAYOUT: {"masters": [[list(piece) for piece in row] for row in self._rows], "parameters": wholes}}

    def capture(self) -> dict[str, Any]:
        """Parameters, masters, moments, hyper-parameters, counters: live tensors, to be written at once."""
        schedule = self._engine.lr_scheduler
        return self._layout | {
            "parameters": [part for part, _ in self._parameters()],
            "optimizer": captured(self._optimizer, self._masters),
            "engine": compat.remembered(self._engine),
            "micro_batches": [self._configured, self._engine.gradient_accumulation_steps()],
            "schedule": schedule.state_dict() if schedule is not None else None,
            "partition": self._of_partition() if self._divides_parameters else {},
        }

    def restore(self, values: Mapping[str, Any]) -> None:
        """Put a captured state in place, or this rank's part of what another number of ranks has captured."""
        self.reshard()
        if self._divides_parameters:
            self._optimizer.empty_partition_cache()
        parts = [part for part, _ in self._parameters()]
        if OLD_RANKS in values:
            sizes = [part.numel() for part in parts]
            values = repartitioned(values[OLD_RANKS], self._rows, sizes, dist.get_rank())
        for part, stored in zip(parts, values["parameters"], strict=True):
            part.copy_(stored)
        put_back(self._optimizer, self._masters, values["optimizer"])
        if self._divides and not self._divides_parameters:
            compat.link_moments(self._optimizer, there=any(values["optimizer"]["state"]))
        engine, (configured, micro_batches) = values["engine"], values["micro_batches"]
        if configured == self._configured:
            compat.set_micro_batches(self._engine, micro_batches)
        else:
            engine = compat.in_micro_batches(self._engine, engine)
        compat.remember(self._engine, engine)
        if values["schedule"] is not None:
            self._engine.lr_scheduler.load_state_dict(values["schedule"])
        if self._divides_parameters:
            self._put_back_of_partition(values["partition"])

    def gradients(self) -> dict[int, Any]:
        """None are pending where a replacement can begin."""
        return {}

    def left_over(self) -> dict[int, Any]:
        """The engine lets go of them in each step."""
        return {}

    def set_gradients(self, gradients: Mapping[int, Any]) -> None:
        """See :meth:`gradients`."""

    # -- stage 3 alone -------------------------------------------------------------------------------------------------

    def _of_partition(self) -> dict[str, Any]:
        """What DeepSpeed remembers of parameters; live tensors.

        Gradients of the last step, which it uses again for parameters that a batch does not reach; parameters that a
        module uses without holding them, or returns, by DeepSpeed's numbers; the order in which modules gather; and
        parameters that persist, whole.
        """
        module = self._engine.module
        places = {id(each): place for place, each in enumerate(module.parameters())}
        uses = {each.ds_id: [p.ds_id for _, p in each.ds_external_parameters()] for each in _numbered(module)}
        return {
            "gradients": self._optimizer.grad_partitions_flat_buffer,
            "uses": {number: found for number, found in uses.items() if found},
            "returned": [p.ds_id for p in module.parameters() if p.is_external_param],
            "order": compat.gathering_order(self._optimizer, module),
            "whole": {places[id(each)]: each.detach() for each in compat.whole_parameters(self._optimizer)},
        }

    def _put_back_of_partition(self, values: Mapping[str, Any]) -> None:
        self._optimizer.grad_partitions_flat_buffer.copy_(values["gradients"])
        module = self._engine.module
        parameters = {parameter.ds_id: parameter for parameter in module.parameters()}
        for each in _numbered(module):
            for number in values["uses"].get(each.ds_id, ()):
                deepspeed.zero.register_external_parameter(each, parameters[number])
        for number in values["returned"]:
            parameters[number].is_external_param = True
        compat.set_gathering_order(self._optimizer, module, values["order"])
        in_order = list(module.parameters())
        for place, whole in values["whole"].items():
            compat.put_whole(in_order[place], whole.clone())


def _numbered(module: Any) -> list[Any]:
    return [each for each in module.modules() if hasattr(each, "ds_id")]


def refuse_zero(engine: Any) -> None:
    """Refuse what cannot be exact, or is not built yet. Raises Unsupported, naming it, and what to do instead."""
    for name, wrong in _found(engine):
        if wrong:
            raise Unsupported(f"{name}. {_PAGE}")


def _found(engine: Any) -> Iterator[tuple[str, bool]]:
    zero, optimizer = engine.zero_optimization_stage(), engine.optimizer
    yield "an engine without an optimizer cannot be recovered: only training is", evaluates(optimizer)
    yield (
        "fp16 with its loss scale cannot be recovered in this version: train in bf16 or fp32",
        engine.fp16_enabled()
        or getattr(optimizer, "torch_autocast_gradscaler", None) is not None
        or getattr(engine, "torch_autocast_z0_gradscaler", None) is not None,
    )
    offloads = (engine.zero_offload_optimizer(), engine.zero_offload_param())
    yield (
        "offload of optimizer or parameters cannot be recovered: leave offload_optimizer and offload_param out",
        any(each is not None and each.device != "none" for each in offloads),
    )
    yield (
        "the parts of ZeRO++ cannot be recovered: leave zero_hpz_partition_size and zero_quantized_* out",
        engine.zero_hpz_partition_size() > 1
        or bool(
            engine.zero_quantized_weights()
            or engine.zero_quantized_nontrainable_weights()
            or engine.zero_quantized_gradients()
        ),
    )
    yield "experts cannot be recovered", bool(engine.has_moe_layers)
    yield (
        "only data parallelism can be recovered: leave tensor, sequence and expert parallelism out",
        engine.mpu is not None or dist.get_world_size(engine.seq_data_parallel_group) != dist.get_world_size(),
    )
    yield (
        "data efficiency and DeepCompile cannot be recovered: leave data_efficiency and compile out",
        bool(engine.data_efficiency_enabled() or engine.is_deepcompile_enabled()),
    )
    inner = getattr(optimizer, "optimizer", optimizer)
    known = type(optimizer).__name__ in _MASTERS or (zero == _DIVIDES_NOTHING and inner is optimizer)
    yield (
        f"{type(optimizer).__name__} around {type(inner).__name__} cannot be recovered: use an optimizer of torch, or "
        "torch_adam in the DeepSpeed configuration, and ZeRO without additions",
        not known or not type(inner).__module__.startswith("torch.optim"),
    )

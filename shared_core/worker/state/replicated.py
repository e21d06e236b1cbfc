"""Replicated state: parameters and optimizer state, described as JSON and moved tensor by tensor."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shared_core.devices import apart, await_all
from shared_core.errors import CorruptFile, ReplicaMismatch, Unsupported, UnsupportedOptimizer
from shared_core.plain_json import parse

_ZERO = "torch.distributed.optim.zero_redundancy_optimizer"
#: What a description says of an entry of an optimizer's state: plain data, a tensor that is where its parameter is, or
#: one in host memory whose parameter is on another device.
VALUE, _TENSOR, _ON_HOST = "value", "tensor", "host"


def beside(parameter: torch.Tensor, value: torch.Tensor, kind: str) -> torch.Tensor:
    """A tensor of an optimizer's state where a description says that it is; itself if it is there."""
    return value if kind == _ON_HOST else value.to(parameter.device)


def entries_of(optimizer: Optimizer, parameter: torch.Tensor, tensors: list[torch.Tensor]) -> list[list[Any]]:
    """What an optimizer keeps of a parameter: key, kind, and the value or the place of the tensor in ``tensors``, to
    which it is added, live. Raises UnsupportedOptimizer for what is neither a tensor nor a number nor text.
    """
    entries: list[list[Any]] = []
    for key, value in optimizer.state.get(parameter, {}).items():
        if isinstance(value, torch.Tensor):
            entries.append([key, _ON_HOST if value.is_cpu and not parameter.is_cpu else _TENSOR, len(tensors)])
            tensors.append(value.detach())
        elif value is None or isinstance(value, (bool, int, float, str)):
            entries.append([key, VALUE, value])
        else:
            raise UnsupportedOptimizer(
                f"{type(optimizer).__name__} keeps {key!r} as {type(value).__name__}; only tensors, numbers and text "
                "can be moved to a replacement: keep it as a tensor"
            )
    return entries


class Replicated:
    """Parameters of modules and state of optimizers, in an order that all replicas share. A parameter that several
    modules share counts once. Raises UnsupportedOptimizer if an optimizer cannot be moved.
    """

    def __init__(self, modules: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        self.modules, self.optimizers = list(modules), list(optimizers)
        for optimizer in optimizers:
            refuse_optimizer(optimizer)
        self.parameters: list[nn.Parameter] = []
        self.names: list[str] = []
        seen: set[int] = set()
        named = [(name, p) for module in modules for name, p in module.named_parameters()]
        named += [
            (f"optimizer {i} parameter", p)
            for i, o in enumerate(optimizers)
            for group in o.param_groups
            for p in group["params"]
        ]
        for name, parameter in named:
            if id(parameter) not in seen:
                seen.add(id(parameter))
                self.parameters.append(parameter)
                self.names.append(name)
        self._places = {id(p): i for i, p in enumerate(self.parameters)}
        self._divided: set[int] = set()

    def divide(self, optimizer: Optimizer) -> None:
        """What this optimizer keeps may be another on each rank: its step asks the others, as Muon's does, where each
        rank updates some parameters and is given the rest.
        """
        self._divided.add(next(i for i, each in enumerate(self.optimizers) if each is optimizer))

    def divided(self) -> dict[int, list[tuple[int, dict[str, Any]]]]:
        """What each optimizer of :meth:`divide` keeps, by its number and the parameters' places. Live."""
        return {
            number: [(self.index_of(p), dict(state)) for p, state in self.optimizers[number].state.items()]
            for number in sorted(self._divided)
        }

    def restore_divided(self, values: Mapping[int, Sequence[tuple[int, Mapping[str, Any]]]]) -> None:
        """Put back what :meth:`divided` has returned, in the place of what a donor keeps."""
        for number, states in values.items():
            if number < len(self.optimizers):
                self.divide(self.optimizers[number])
                self.optimizers[number].state.clear()
                for place, state in states:
                    self.optimizers[number].state[self.parameters[place]].update(
                        (sys.intern(key), value) for key, value in state.items()
                    )

    def places_of(self, parameters: Sequence[torch.Tensor]) -> list[int]:
        places = [self._places.get(id(each), -1) for each in parameters]
        return [self.index_of(each) for each in parameters] if -1 in places else places

    def index_of(self, parameter: torch.Tensor) -> int:
        """Place in the shared order. Raises Unsupported for one in no module, and at first in no group."""
        place = self._places.get(id(parameter))
        if place is None:
            raise Unsupported(
                f"an optimizer was given a parameter of shape {tuple(parameter.shape)} that is in no attached model, "
                "so a replacement could not be given it: make all parameters before attach(), freeze those that are "
                "not trained yet (requires_grad_(False)), and add_param_group() them later"
            )
        return place

    def versions_in(self, optimizer: Optimizer) -> dict[str, int]:
        """Version counters, by name, of those parameters that an optimizer, attached or not, has in a group."""
        there = [p for group in optimizer.param_groups for p in group["params"]]
        return {self.names[self._places[id(p)]]: p._version for p in there if id(p) in self._places}

    def stepped(self) -> set[int]:
        """Identities (``id``) of the parameters that an optimizer has in a group."""
        return {id(p) for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"]}

    @property
    def nbytes(self) -> int:
        """Bytes of the parameters, without optimizer state."""
        return sum(p.nbytes for p in self.parameters)

    def export(self) -> tuple[dict[str, Any], list[torch.Tensor]]:
        """(description, tensors): parameters first, then optimizer state. The tensors are live; the caller keeps
        updates away meanwhile.

        The description is plain data: ``parameters``, their number; ``states``, of each parameter with optimizer state
        ``[number of the optimizer, place, entries]``; see :func:`entries_of`, also for what is raised.
        """
        tensors = [p.detach() for p in self.parameters]
        states = [
            [number, self.index_of(parameter), entries_of(optimizer, parameter, tensors)]
            for number, optimizer in enumerate(self.optimizers)
            for parameter in optimizer.state
        ]
        return {"parameters": len(self.parameters), "states": states}, tensors

    def load(self, description: dict[str, Any], tensors: Sequence[torch.Tensor], *, owned: bool = False) -> None:
        """Copy exported state into the parameters and put optimizer state in place. That is left alone when no
        optimizer is attached (between two entry calls). Blocks until devices have it.

        Args:
            tensors: of the state, on any device; some may be the parameters here, which are as they should be.
            owned: nobody else uses the tensors, so optimizers get them without a copy.

        Raises:
            ReplicaMismatch: if the parameters here differ in number, shape or dtype from the donor's.
        """
        count = description["parameters"]
        if self.optimizers and count != len(self.parameters):
            raise ReplicaMismatch(
                f"the donor has {count} parameters, this rank {len(self.parameters)}: the models differ between ranks"
            )
        for name, own, theirs in zip(self.names, self.parameters, tensors[:count], strict=False):
            if own.shape != theirs.shape or own.dtype != theirs.dtype:
                raise ReplicaMismatch(
                    f"parameter {name} has shape {tuple(own.shape)} and {own.dtype} here, "
                    f"and {tuple(theirs.shape)} and {theirs.dtype} at the donor"
                )
            if own.data_ptr() != theirs.data_ptr():
                own.data.copy_(theirs)
        if not self.optimizers:
            return
        for optimizer in self.optimizers:
            optimizer.state.clear()
        for number, place, entries in description["states"]:
            stepped = self.parameters[place]
            state = self.optimizers[number].state[stepped]
            for key, kind, value in entries:
                if kind != VALUE:
                    moved = beside(stepped, tensors[value], kind)
                    value = moved if owned or moved is not tensors[value] else moved.clone()
                # As an optimizer's own keys are: a file of the same state then has the same bytes.
                state[sys.intern(key)] = value
        await_all(apart(self.parameters))

    def summed(self, leave_out: Collection[int] = ()) -> list[tuple[int, str, torch.Tensor]]:
        """What replicas have in common, in an order that all share: each tensor, live, with its parameter's place and
        its name in the optimizer's state, empty for the parameter. Plain values of optimizers come as tensors of bytes.
        Parameters at places in ``leave_out`` may differ, and what :meth:`divide` names.
        """
        found = [((i, -1, ""), p.detach()) for i, p in enumerate(self.parameters) if i not in leave_out]
        for number, optimizer in enumerate(self.optimizers):
            for parameter, state in optimizer.state.items() if number not in self._divided else ():
                place = self.index_of(parameter)
                for key, value in state.items():
                    data = value.detach() if isinstance(value, torch.Tensor) else pack(repr(value))
                    found.append(((place, number, key), data))
        found.sort(key=lambda each: each[0])  # optimizers have their parameters in the order of first gradients
        return [(place, key, data) for (place, _, key), data in found]


def pack(description: Any) -> torch.Tensor:
    """A description, plain data that JSON can hold, as a uint8 tensor on the CPU."""
    return torch.frombuffer(bytearray(json.dumps(description).encode()), dtype=torch.uint8)


def unpack(data: torch.Tensor) -> Any:
    """Inverse of :func:`pack`; raises CorruptFile if it is none."""
    try:
        return parse(data.numpy().tobytes())
    except ValueError as error:
        raise CorruptFile(f"a description that came from another worker is damaged: {error}") from error


def refuse_optimizer(optimizer: Optimizer) -> None:
    """Raises UnsupportedOptimizer for one whose state no other rank could give to a replacement."""
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UnsupportedOptimizer(
            "LBFGS evaluates its closure several times in a step, so a replacement cannot take over in the "
            "middle; use another optimizer"
        )
    zero = sys.modules.get(_ZERO)  # what is not imported is not used
    if zero is not None and isinstance(optimizer, zero.ZeroRedundancyOptimizer):
        raise UnsupportedOptimizer(
            f"{name} divides the optimizer's state over the ranks, so nobody has that of a failed one: use the "
            "optimizer inside by itself, or fully_shard() (docs/sharded.md)"
        )
    if not hasattr(optimizer, "_optimizer_step_post_hooks"):
        raise UnsupportedOptimizer(
            f"{name} wraps another optimizer and is none itself (its class does not call Optimizer.__init__), so its "
            "updates cannot be seen: attach the one inside. Where it lets ranks have different parameters between "
            "averages, as PostLocalSGDOptimizer does, nobody can give a replacement its own: use a plain optimizer"
        )

"""One rank's shard: its part of each parameter and of the optimizers' state.

No replica has it, so it is rank-local state: published with every step boundary, in the shared memory of the machine. A
replacement takes it from there, and makes every update of the failed worker's batch itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from shared_core.errors import Unsupported, UnsupportedOptimizer
from shared_core.worker.comm.compat import reduce_scatter_single
from shared_core.worker.comm.results import CollectiveResults
from shared_core.worker.sharded import compat
from shared_core.worker.sharded.local import is_distributed, local_part
from shared_core.worker.sharded.regroup import LAYOUT, OLD_RANKS, Layout, regrouped
from shared_core.worker.state.replicated import Replicated


class LeftoverShards:
    """Gradients of a shard that a batch with a whole update leaves behind: state of the step boundary where the next
    batch adds to them.

    Most programs let go of them first. Then they are no state, and a copy at each boundary would cost time for nothing:
    so those of a parameter are published until the program has let go of them in each batch so far. No other rank could
    tell that one of them is missing in a replacement. So there they are not a number, until the program lets go of
    them. ``missing``: places of gradients that were not published and must not be used.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = parameters
        self._released: dict[int, bool] = {}  # whether in each batch so far; by place
        self._held: Collection[int] = ()  # at the boundary that no reduction has come after yet
        self.missing: Collection[int] = ()

    def left(self) -> dict[int, bool]:
        """The gradients at this step boundary, by place, and whether they have to be published."""
        self._held = [place for place, parameter in enumerate(self._parameters) if parameter.grad is not None]
        return {place: place not in self.missing and not self._released.get(place, False) for place in self._held}

    def expect(self, missing: Iterable[int]) -> None:
        """Have gradients that were not published, and that the program is to let go of."""
        self.missing = [*missing]
        for place in self.missing:
            parameter = self._parameters[place]
            parameter.grad = torch.full_like(parameter.detach(), torch.nan)

    def reducing(self) -> None:
        """Gradients of this batch are about to be added to what is there, for the first time.

        Raises:
            Unsupported: to what was not published.
        """
        missing, self.missing = self.missing, ()
        for place in missing:
            grad = self._parameters[place].grad
            if grad is not None and bool(local_part(grad).isnan().any()):
                raise Unsupported(
                    f"gradients of earlier batches were not given to this replacement (parameter {place}, of shape "
                    f"{tuple(grad.shape)}): the program let go of them in each batch before and adds to them in this "
                    "one. Call zero_grad() in every batch, or in none"
                )
        held, self._held = self._held, ()
        for place in held:
            self._released[place] = self._released.get(place, True) and self._parameters[place].grad is None


#: Name of the registered state.
SHARD = "swift.shard"
#: A placement of a DTensor as a number: the dimension that is sharded, or this.
_REPLICATED = -1


class TrainedShard:
    """The shard of one rank of ``fully_shard`` modules; see :class:`~shared_core.worker.sharded.own.OwnState`. Making
    one has FSDP reduce gradients from memory of their own, which the log keeps without a copy.
    """

    padded = False

    def __init__(self, modules: Sequence[Any], replicated: Replicated, results: CollectiveResults) -> None:
        self._modules, self._replicated = list(modules), replicated
        self._leftover = LeftoverShards(replicated.parameters)
        compat.reduce_by(modules, ReduceFromOwnMemory(results, self._leftover.reducing))
        self._layouts = [_layout(each) for each in replicated.parameters]

    @property
    def unsettled(self) -> bool:
        return compat.unsettled(self._modules)

    @property
    def apart(self) -> bool:
        """With HSDP gradients are summed within shards, and then within replicas."""
        divided: list[Any] = [each for each in self._replicated.parameters if is_distributed(each)]
        meshes = [each.device_mesh for each in divided]
        return any(mesh.ndim > 1 or mesh.size() < dist.get_world_size() for mesh in meshes)

    @property
    def step_bytes(self) -> int:
        return self._replicated.nbytes

    def reshard(self) -> None:
        """Free gathered parameters, as after a backward, and clear the order of forwards. An evaluation leaves both,
        and a replacement that begins after it must gather where its peers do.
        """
        for module in self._modules:
            module.reshard()
        compat.forget_forward(self._modules)

    def capture(self) -> dict[str, Any]:
        """Parameters and optimizer state: live tensors, to be written before the next update. Raises
        UnsupportedOptimizer if an optimizer's state holds anything but tensors, numbers and text.
        """
        replicated = self._replicated
        with torch.no_grad():  # once, as there are many tensors
            states = [
                [
                    number,
                    replicated.index_of(parameter),
                    {key: _packed(key, each) for key, each in state.items()},
                ]
                for number, optimizer in enumerate(replicated.optimizers)
                for parameter, state in optimizer.state.items()
            ]
            parameters = [local_part(each).detach() for each in replicated.parameters]
        return {"parameters": parameters, "states": states, LAYOUT: self._layouts}

    def restore(self, values: Mapping[str, Any]) -> None:
        """Put a captured shard in place, or this rank's part of the shards of another number of ranks. Parameters are
        copied into; optimizers get the tensors themselves.
        """
        self.reshard()
        replicated = self._replicated
        if OLD_RANKS in values:
            values = regrouped(values[OLD_RANKS], self._layouts)
        with torch.no_grad():
            for parameter, stored in zip(replicated.parameters, values["parameters"], strict=True):
                local_part(parameter).copy_(stored)
        for optimizer in replicated.optimizers:
            optimizer.state.clear()
        for number, place, entries in values["states"]:
            parameter = replicated.parameters[place]
            state = replicated.optimizers[number].state[parameter]
            for key, packed in entries.items():
                state[key] = _unpacked(parameter, packed)

    # -- gradients that are accumulated, or left over -----------------------------------------------------------------

    def gradients(self) -> dict[int, Any]:
        found = ((place, p.grad) for place, p in enumerate(self._replicated.parameters) if p.grad is not None)
        return {place: None if place in self._leftover.missing else _distributed(grad) for place, grad in found}

    def left_over(self) -> dict[int, Any]:
        """Those that are there after a whole update; None for what the program lets go of before it adds to it."""
        wanted, found = self._leftover.left(), self.gradients()
        return {place: found[place] if published else None for place, published in wanted.items()}

    def set_gradients(self, gradients: Mapping[int, Any]) -> None:
        for place, packed in gradients.items():
            if packed is not None:
                parameter = self._replicated.parameters[place]
                parameter.grad = _unpacked(parameter, packed)
        self._leftover.expect(place for place, packed in gradients.items() if packed is None)


def _layout(parameter: Any) -> Layout:
    if not is_distributed(parameter):
        return None
    mesh, last = parameter.device_mesh, parameter.device_mesh.ndim - 1  # replicas come before shards
    return parameter.placements[last].dim, mesh.size(last), mesh.get_local_rank(last)


def _packed(key: str, value: Any) -> Any:
    """A value of an optimizer's state as plain data; a tensor becomes a tuple, which no other value is."""
    if isinstance(value, torch.Tensor):
        return _distributed(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise UnsupportedOptimizer(
        f"the optimizer keeps {key!r} as {type(value).__name__}; only tensors and numbers can be given to a replacement"
    )


def _distributed(value: Any) -> tuple[Any, ...]:
    """A plain tensor as (tensor, whether on the host); a DTensor as (local part, shape, strides, placements)."""
    if not is_distributed(value):
        return value.detach(), value.is_cpu
    if any(placement.is_partial() for placement in value.placements):
        raise UnsupportedOptimizer(f"a state of placements {tuple(value.placements)} cannot be given to a replacement")
    places = [placement.dim if placement.is_shard() else _REPLICATED for placement in value.placements]
    return local_part(value).detach(), list(value.shape), list(value.stride()), places


def _unpacked(parameter: Any, packed: Any) -> Any:
    if not isinstance(packed, tuple):
        return packed
    if len(packed) <= 2:
        value, on_host = (*packed, True)[:2]  # older checkpoints hold CPU tensors only
        return value if on_host else value.to(parameter.device)
    from torch.distributed.tensor import DTensor, Placement, Replicate
    from torch.distributed.tensor import Shard as Sharded

    local, shape, stride, places = packed
    mesh = parameter.device_mesh
    # Another number of ranks may have had no replicas, or some: their dimension comes first.
    places = ([_REPLICATED] * mesh.ndim + list(places))[-mesh.ndim :]
    placements: list[Placement] = [Replicate() if place == _REPLICATED else Sharded(place) for place in places]
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=tuple(stride))


class ReduceFromOwnMemory:
    """What FSDP does by itself, as its ``set_custom_reduce_scatter`` hook: each reduction has an input of its own.
    Nobody writes to that memory again, so the log keeps the input itself and no copy. ``before`` is called before each
    reduction, which adds to the gradients of the shard.
    """

    def __init__(self, results: CollectiveResults, before: Callable[[], None]) -> None:
        self._results, self._before = results, before

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        self._before()
        with self._results.lending():
            return reduce_scatter_single(
                output=output_tensor, input=input_tensor, group=group, op=op, async_op=async_op
            )

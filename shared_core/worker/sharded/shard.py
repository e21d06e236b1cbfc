"""One rank's shard: its part of each parameter and of the optimizers' state.

No replica has it, so it is rank-local state: published with every step boundary, in the shared memory of the machine. A
replacement takes it from there, and makes every update of the failed worker's batch itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from shared_core.errors import CorruptFile, Unsupported, UnsupportedOptimizer
from shared_core.worker.comm.compat import reduce_scatter_single
from shared_core.worker.comm.results import CollectiveResults
from shared_core.worker.sharded import compat
from shared_core.worker.sharded.own import is_distributed, local_part
from shared_core.worker.state.replicated import Replicated

#: Key of a captured state that stands for the states of all old ranks. Key of the layouts; it is missing where another
#: number of ranks could not continue.
OLD_RANKS, LAYOUT = "old ranks", "layout"
#: Where a tensor's part belongs: (dimension that is divided, number of parts, this part); None for a whole tensor.
Layout = tuple[int, int, int] | None


def joined(parts: Mapping[int, torch.Tensor], layout: Layout) -> torch.Tensor:
    """The whole tensor (a copy if it is divided) of its parts by number; raises CorruptFile if one is missing."""
    if layout is None:
        return parts[0]
    dim, count, _ = layout
    if missing := [number for number in range(count) if number not in parts]:
        raise CorruptFile(f"part {missing[0]} of {count} of a tensor is in no rank's shard")
    return torch.cat([parts[number] for number in range(count)], dim)


def part_of(whole: torch.Tensor, layout: Layout) -> torch.Tensor:
    """A contiguous copy of one part, divided as ``fully_shard`` does: the first parts as long as those of
    ``torch.chunk``, the last ones shorter or empty. A whole tensor is returned itself.
    """
    if layout is None:
        return whole
    dim, count, number = layout
    chunks = torch.chunk(whole, count, dim)
    part = chunks[number] if number < len(chunks) else whole.narrow(dim, 0, 0)
    return part.clone(memory_format=torch.contiguous_format)  # so that the whole can be freed


def regrouped(old: Sequence[Mapping[str, Any]], layouts: Sequence[Layout]) -> dict[str, Any]:
    """What a new rank would have captured, from what each old rank has; ``layouts`` are of its parameters. Raises
    CorruptFile if the old shards do not belong together.
    """
    theirs: list[list[Layout]] = [[tuple(one) if one else None for one in each[LAYOUT]] for each in old]
    if any(len(each) != len(layouts) for each in theirs):
        raise CorruptFile(f"the shards have {len(theirs[0])} parameters, the model has {len(layouts)}")

    def again(place: int, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """This rank's part of a tensor that is divided as the parameter is, given each old rank's part."""
        parts = {(each[place] or (0, 1, 0))[2]: part for each, part in zip(theirs, tensors, strict=True)}
        return part_of(joined(parts, theirs[0][place]), layouts[place])

    parameters = [again(place, [each["parameters"][place] for each in old]) for place in range(len(layouts))]
    by_place = [{(number, place): entries for number, place, entries in each["states"]} for each in old]
    states = []
    for number, place, entries in old[0]["states"]:
        mine = {}
        for key, packed in entries.items():
            if isinstance(packed, tuple) and len(packed) > 2 and any(dim >= 0 for dim in packed[3]):
                local = again(place, [each[number, place][key][0] for each in by_place])
                packed = (local, *packed[1:])
            mine[key] = packed
        states.append([number, place, mine])
    return {"parameters": parameters, "states": states, LAYOUT: list(layouts)}


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
        """Gradients of this batch are about to be added for the first time; raises Unsupported to what was not
        published.
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
        value, on_host = packed
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

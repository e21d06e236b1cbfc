"""How many micro-batches a worker may hold at once, from their bytes and from the memory that is free."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import Tensor

from shared_core.kinds import whole_of_environment
from shared_core.reroute.autograd_graph import kept_tensors
from shared_core.schedule.schedule import Topology, held_without_failure
from shared_core.system.process import machine_bytes

#: Share of the free memory that plans may use: messages are kept until a step is over, and others need memory, too.
_SHARE = 0.5


class MemoryUse(NamedTuple):
    """Bytes that a micro-batch holds on the host until its backward, None if unknown; bytes that are to spare."""

    held: int | None
    spare: int


def room_of(topology: Topology, held: int, found: Iterable[tuple[int, MemoryUse]] = ()) -> tuple[int, ...]:
    """Micro-batches that a worker of each stage may hold; never fewer than 1F1B does.

    What is spare is measured between two steps, so what 1F1B holds may have been given back and count as free: it is
    not added. A stage of which somebody knows nothing holds what it does under 1F1B. ``held``: chosen for all stages; 0
    for what fits.
    """
    most = topology.pipelines * topology.micro_batches
    fits: dict[int, int] = {}
    for stage, use in found:
        here = use.spare // max(1, use.held) if use.held is not None else 0
        fits[stage] = min(fits.get(stage, most), here)
    return tuple(
        min(most, max(held_without_failure(topology, stage), held or fits.get(stage, 0)))
        for stage in range(topology.stages)
    )


def bytes_held(inputs: Iterable[Tensor], outputs: Sequence[Tensor], parameters: Iterable[Tensor]) -> int | None:
    """Bytes that a forward holds until its backward: inputs, outputs and what the graph has saved, without parameters.

    What a user's ``autograd.Function`` keeps in places of its own is not seen. None for tensors that are not in the
    host's memory.
    """
    own = {one.untyped_storage().data_ptr() for one in parameters}
    tensors = [*inputs, *outputs, *kept_tensors(outputs)]
    if any(one.device.type != "cpu" for one in tensors):
        return None
    sizes = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}
    return sum(size for place, size in sizes.items() if place not in own)


def spare_bytes() -> int:
    """Bytes of the machine's free memory that this worker may use; its workers share them."""
    return int(_SHARE * machine_bytes()[0]) // max(1, whole_of_environment("LOCAL_WORLD_SIZE", 1))

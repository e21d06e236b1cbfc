"""What sharded state needs of ``torch.distributed.fsdp`` that is not public; :data:`NAMES` says why.

FSDP is imported inside functions only: a script that has no sharded model does not pay for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from shared_core.versions import Tested

TESTED = Tested("torch", "2.11", "2.15")

_FULLY_SHARD = "torch.distributed.fsdp._fully_shard"
_GROUP = f"{_FULLY_SHARD}._fsdp_param_group:FSDPParamGroup"
_PARAM = f"{_FULLY_SHARD}._fsdp_param:FSDPParam"

#: ``module:name``, with its parameters where it is called by name; why it is needed.
NAMES: tuple[tuple[str, str], ...] = (
    ("torch.distributed.fsdp:FSDPModule._get_fsdp_state(self)", "what a module waits for at a step boundary"),
    (
        f"{_FULLY_SHARD}._fsdp_state:FSDPState._fsdp_param_groups or "
        f"{_FULLY_SHARD}._fsdp_state:FSDPState._fsdp_param_group",
        "the same; torch 2.11 has but one",
    ),
    (f"{_GROUP}._all_gather_result", "parameters that are being gathered ahead of the next forward"),
    (f"{_GROUP}._post_forward_indices", "what a forward without a backward leaves behind, by which FSDP gathers ahead"),
    (f"{_GROUP}.comm_ctx", "the same: post_forward_order"),
    (f"{_GROUP}._partial_reduce_output", "gradients that replicas have not summed yet"),
    (f"{_GROUP}._reduce_scatter_comm", "whether the script has set its own way to reduce"),
    (f"{_FULLY_SHARD}._fsdp_collectives:DefaultReduceScatter", "the same"),
    (f"{_GROUP}.fsdp_params", "gradients that are not reduced yet"),
    (f"{_GROUP}.offload_policy", "offload to the CPU is refused"),
    (f"{_PARAM}.unsharded_accumulated_grad", "gradients that are not reduced yet"),
    (f"{_PARAM}._unsharded_param", "the same"),
)


def _groups(modules: Iterable[Any]) -> Iterator[Any]:
    for module in modules:
        state = module._get_fsdp_state()
        if hasattr(state, "_fsdp_param_groups"):
            yield from state._fsdp_param_groups
        elif state._fsdp_param_group is not None:  # torch 2.11: at most one
            yield state._fsdp_param_group


def offloads(modules: Iterable[Any]) -> bool:
    """Whether parameters of these FSDP modules are kept on the CPU and computed with elsewhere."""
    from torch.distributed.fsdp import CPUOffloadPolicy

    return any(isinstance(group.offload_policy, CPUOffloadPolicy) for group in _groups(modules))


def reduce_by(modules: Iterable[Any], reduce_scatter: Any) -> None:
    """Have these FSDP modules reduce gradients with ``reduce_scatter``, except where the script has set its own way."""
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

    for module in modules:
        groups = list(_groups([module]))
        if len(groups) == 1 and type(groups[0]._reduce_scatter_comm) is DefaultReduceScatter:
            module.set_custom_reduce_scatter(reduce_scatter)


def forget_forward(modules: Iterable[Any]) -> None:
    """Clear the order of the last forwards: no backward follows (an evaluation), and FSDP would gather ahead by it."""
    for group in _groups(modules):
        group._post_forward_indices.clear()
        if hasattr(group.comm_ctx, "post_forward_order"):  # from the first forward on
            group.comm_ctx.post_forward_order.clear()


def unsettled(modules: Iterable[Any]) -> bool:
    """Whether these FSDP modules hold what belongs to no shard: gradients of earlier micro-batches that are not reduced
    yet, or parameters that are being gathered for the next.
    """
    return any(
        group._all_gather_result is not None
        or group._partial_reduce_output is not None
        or any(_pending(parameter) for parameter in group.fsdp_params)
        for group in _groups(modules)
    )


def _pending(parameter: Any) -> bool:
    unsharded = getattr(parameter, "_unsharded_param", None)
    return parameter.unsharded_accumulated_grad is not None or (unsharded is not None and unsharded.grad is not None)

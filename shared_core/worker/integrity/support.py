"""What goes with ``state.verify_every``: anything else is refused."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch.nn.parallel import DistributedDataParallel

from shared_core.config import SwiftConfig
from shared_core.errors import Unsupported
from shared_core.worker.state.replicated import Replicated


def refuse(
    config: SwiftConfig,
    modules: Sequence[DistributedDataParallel],
    replicated: Replicated,
    summed: Collection[int],
    *,
    whole: bool,
    operates: bool,
) -> None:
    """Raises Unsupported where replicas cannot be compared before their gradients are used.

    Args:
        summed: identities of the parameters whose gradients DDP sums.
        whole: each rank trains the whole model.
        operates: the backend ``swift`` reduces them, and not one of torch's own.
    """
    why = ""
    if not whole:
        why = "here each rank trains a part of the model"
    elif not replicated.stepped() <= set(summed):
        why = "an optimizer steps parameters that DistributedDataParallel does not keep alike on all ranks"
    elif any(ddp.static_graph for ddp in modules):
        why = "DistributedDataParallel with static_graph=True reduces gradients later than others"
    elif config.state.overlapped_update:
        why = "with state.overlapped_update gradients are used before all are there"
    elif not operates:
        why = "here torch's own backend reduces them, out of sight"
    if why:
        raise Unsupported(f"state.verify_every compares replicas before their gradients are used, and {why}")

"""Which sharded models can be recovered, and what is refused of them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shared_core.config import SwiftConfig
from shared_core.errors import Unsupported
from shared_core.versions import check_version
from shared_core.worker.sharded import compat
from shared_core.worker.sharded.local import is_distributed
from shared_core.worker.sharded.own import Owner

_PAGE = "See docs/sharded.md"


def sharded_modules(modules: Sequence[nn.Module]) -> list[Any]:
    """The engines among these modules that divide their models themselves; if there are none, all ``fully_shard``
    modules in these.

    Raises Unsupported for FSDP1, for DeepSpeed engines made without recovery, and for DTensors that ``fully_shard`` has
    not made.
    """
    owners = [each for each in modules if isinstance(each, Owner)]
    if owners:
        return owners
    # What is not imported is not used.
    fsdp, deepspeed = sys.modules.get("torch.distributed.fsdp"), sys.modules.get("deepspeed")
    if deepspeed is not None and any(isinstance(each, deepspeed.DeepSpeedEngine) for each in modules):
        raise Unsupported(
            'this DeepSpeed engine was made without recovery: add "swift_recovery": {} to its configuration, where '
            f"swiftrun finds it before the program runs. {_PAGE}"
        )
    every = [child for module in modules for child in module.modules()] if fsdp is not None else []
    if fsdp is not None and any(isinstance(each, fsdp.FullyShardedDataParallel) for each in every):
        raise Unsupported(
            "FullyShardedDataParallel (FSDP1) cannot be recovered: use fully_shard() of torch.distributed.fsdp (FSDP2) "
            f"instead. {_PAGE}"
        )
    found = [each for each in every if fsdp is not None and isinstance(each, fsdp.FSDPModule)]
    if not found:
        for module in modules:
            for name, parameter in module.named_parameters():
                if is_distributed(parameter):
                    raise Unsupported(
                        f"parameter {name} is a DTensor that fully_shard() has not made (tensor parallelism?), which "
                        f"cannot be recovered. {_PAGE}"
                    )
    return found


def refuse(
    modules: Sequence[nn.Module],
    sharded: Sequence[Any],
    config: SwiftConfig,
    optimizers: Sequence[Any] = (),
) -> None:
    """Raises Unsupported for what cannot be exact, or is not built yet, and says what to do instead. ``modules`` are
    all that are trained; ``sharded`` are the ``fully_shard`` modules in them, or the engine.
    """
    if config.reroutes or config.resizes:
        chosen = "resize.replace_timeout_s" if config.replaces else f"on_failure={config.on_failure!r}"
        raise Unsupported(
            f"{chosen} does not work with sharded models: use on_failure='replace' alone, or 'restart'. {_PAGE}"
        )
    if config.state.overlapped_update:
        raise Unsupported(f"state.overlapped_update is for DistributedDataParallel: leave it out. {_PAGE}")
    if isinstance(sharded[0], Owner):
        if len(modules) > 1 or optimizers:
            raise Unsupported(
                f"a job with a DeepSpeed engine trains nothing else: attach the engine, loaders and counters. {_PAGE}"
            )
        return
    if compat.offloads(sharded):
        raise Unsupported(f"CPUOffloadPolicy cannot be recovered: leave offload_policy out. {_PAGE}")
    check_version(compat.TESTED, compat.NAMES)
    if any(isinstance(each, DistributedDataParallel) for each in modules):
        raise Unsupported(f"a job has sharded models or models in DistributedDataParallel, not both. {_PAGE}")
    for module in modules:
        named: Iterator[tuple[str, Any]] = module.named_parameters()
        for name, parameter in named:
            if is_distributed(parameter) and not _of_fsdp(parameter):
                raise Unsupported(
                    f"parameter {name} has placements {tuple(parameter.placements)}: only FSDP2 (one mesh dimension) "
                    f"and HSDP (two) can be recovered, without tensor parallelism. {_PAGE}"
                )


def _of_fsdp(parameter: Any) -> bool:
    from torch.distributed.tensor import Replicate, Shard

    kinds = [type(placement) for placement in parameter.placements]
    return kinds in ([Shard], [Replicate, Shard])

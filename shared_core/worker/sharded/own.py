"""What one rank has of a model that is divided over the ranks, whoever has divided it; which can be recovered, and what
is refused of them.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shared_core.config import SwiftConfig
from shared_core.errors import Unsupported
from shared_core.versions import check_version
from shared_core.worker.sharded import compat


def is_distributed(tensor: torch.Tensor) -> bool:
    """Whether this is a ``DTensor``, without importing that class."""
    return hasattr(tensor, "to_local")


def local_part(tensor: Any) -> torch.Tensor:
    """All of a tensor, or this rank's part of a ``DTensor``. It shares memory with the tensor."""
    if not is_distributed(tensor):
        return tensor  # type: ignore[no-any-return]
    if not torch.is_grad_enabled():
        return tensor.to_local()  # type: ignore[no-any-return]
    with torch.no_grad():  # with gradients it would be another tensor at each call
        return tensor.to_local()  # type: ignore[no-any-return]


class OwnState(Protocol):
    """Parameters and optimizer state that this rank publishes, because no other rank has all of them.

    Attributes:
        unsettled: there is what belongs to no shard (gradients that are not reduced yet), so no replacement can begin
            here. All ranks agree, because it follows from the script.
        step_bytes: about what the logs of one step take of memory.
        padded: inputs of reductions have places that nobody has written.
        apart: no operation of the model is of all ranks.
    """

    @property
    def unsettled(self) -> bool: ...
    @property
    def step_bytes(self) -> int: ...
    @property
    def padded(self) -> bool: ...
    @property
    def apart(self) -> bool: ...

    def reshard(self) -> None:
        """Free gathered parameters, so that a replacement and its peers gather the same from here on."""

    def capture(self) -> dict[str, Any]:
        """All of it: live tensors, to be written before the next update."""

    def restore(self, values: Mapping[str, Any]) -> None:
        """Inverse of :meth:`capture`."""

    def gradients(self) -> dict[int, Any]:
        """Pending gradients by place, as plain data; only where nothing is ``unsettled``."""

    def left_over(self) -> dict[int, Any]:
        """Those that a batch with a whole update has left behind, by place; None for one that needs no copy."""

    def set_gradients(self, gradients: Mapping[int, Any]) -> None:
        """Inverse of :meth:`gradients` and :meth:`left_over`."""


class Owner(ABC):
    """Base of modules that divide a model themselves: engines."""

    @abstractmethod
    def own_state(self) -> OwnState:
        """What this rank has; raises Unsupported if it cannot be recovered."""

    @abstractmethod
    def holds(self, each: object) -> bool:
        """Whether :meth:`own_state` covers this object, the engine's optimizer for instance."""


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

"""Backend ``swift`` in ``torch.distributed``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shared_core.errors import Unsupported
from shared_core.worker.comm import compat
from shared_core.worker.comm.group import SwiftProcessGroup
from shared_core.worker.comm.runtime import Runtime

_runtime: Runtime | None = None


def install(runtime: Runtime) -> None:
    """Make every gloo group that is created from now on a swift one. Calling it again does nothing.

    Args:
        runtime: what the groups share.
    """
    global _runtime
    if _runtime is not None:
        return
    _runtime = runtime
    if not compat.is_registered("swift"):
        dist.Backend.register_backend("swift", _create, extended_api=True, devices=["cpu"])
    compat.replace_group_creation(_new_process_group)


def _new_process_group(torch_helper: Callable[..., Any], given: Mapping[str, Any]) -> Any:
    """A group that asks for "swift" and is recorded as "gloo"; see :func:`compat.replace_group_creation`."""
    backend = str(given["backend"] or "undefined").lower()
    if backend == "nccl" or (torch.cuda.is_available() and ("nccl" in backend or backend == "undefined")):
        raise Unsupported(
            "swift recovery supports CPU training over gloo in this version: NCCL needs the host to wait for a "
            "step's collectives before the update, and "
            "that has not been run on hardware. Choose accelerator='cpu', or train without this plugin."
        )
    if backend not in ("undefined", "gloo", "swift", "cpu:gloo", "cpu:gloo,cuda:nccl", "cpu:swift"):
        return torch_helper(**given)
    group, store = torch_helper(**{**given, "backend": dist.Backend("swift")})
    if isinstance(group, SwiftProcessGroup):
        compat.record_as_gloo(group, store)
    return group, store


def _create(options: Any, _: Any) -> SwiftProcessGroup:
    assert _runtime is not None
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    group = SwiftProcessGroup(
        _runtime,
        options.group_id,
        options.group_rank,
        options.group_size,
        ranks,
        options.timeout or timedelta(minutes=30),
    )
    _runtime.generations.add_group(group._state)
    return group

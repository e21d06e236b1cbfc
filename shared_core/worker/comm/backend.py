"""Backend ``swift`` in ``torch.distributed``."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from shared_core.errors import Unsupported
from shared_core.worker.comm.group import SwiftProcessGroup
from shared_core.worker.comm.runtime import Runtime

_runtime: Runtime | None = None
_torch_helper = c10d._new_process_group_helper


def install(runtime: Runtime) -> None:
    """Make every gloo group that is created from now on a swift one. Calling it again does nothing.

    Args:
        runtime: what the groups share.
    """
    global _runtime
    if _runtime is not None:
        return
    _runtime = runtime
    if "SWIFT" not in dist.Backend._plugins:
        dist.Backend.register_backend("swift", _create, extended_api=True, devices=["cpu"])
    # The one patch of torch. Frameworks branch on the name of the backend in dozens of places (Lightning replaces AVG
    # by SUM and a division only for "gloo"),
    # so the recorded name must stay "gloo" for the same bits; but new_group() inherits the recorded name, and would
    # make plain gloo groups. torch has no hook
    # between the two, so the function in which both meet asks for "swift" and records "gloo".
    c10d._new_process_group_helper = _new_process_group


def _new_process_group(*args: Any, **kwargs: Any) -> Any:
    names = _torch_helper.__code__.co_varnames[: _torch_helper.__code__.co_argcount]
    bound = {**dict(zip(names, args, strict=False)), **kwargs}
    backend = str(bound["backend"] or "undefined").lower()
    if backend == "nccl" or (torch.cuda.is_available() and ("nccl" in backend or backend == "undefined")):
        raise Unsupported(
            "swift recovery supports CPU training over gloo in this version: NCCL needs the host to wait for a "
            "step's collectives before the update, and "
            "that has not been run on hardware. Choose accelerator='cpu', or train without this plugin."
        )
    if backend not in ("undefined", "gloo", "swift", "cpu:gloo", "cpu:gloo,cuda:nccl", "cpu:swift"):
        return _torch_helper(*args, **kwargs)
    bound["backend"] = dist.Backend("swift")
    group, store = _torch_helper(**bound)
    if isinstance(group, SwiftProcessGroup):
        gloo = dist.Backend("gloo")
        c10d._world.pg_map[group] = (gloo, store)
        c10d._world.pg_backend_config[group] = str(c10d.BackendConfig(gloo))
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
    _runtime.add_group(group._state)
    return group

"""Registers backend ``swift`` with ``torch.distributed``, and has groups for gloo made with it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from shared_core.devices import REFUSED, runs_on_devices
from shared_core.errors import Unsupported
from shared_core.versions import check_version
from shared_core.worker.comm import compat
from shared_core.worker.comm.group import SwiftProcessGroup
from shared_core.worker.comm.runtime import Runtime

#: What torch gives operations by default.
_TIMEOUT = timedelta(minutes=30)
_runtime: Runtime | None = None
#: Makes the runtime with the program's first group, in this process only; None where it is there, or nothing is wanted.
_make: Callable[[], Runtime] | None = None
_owner = 0
#: The backend of a group that was left to torch because nobody had asked; empty if there is none.
_left = ""
#: The program has asked for groups that survive: one that cannot is an error, and not torch's own.
_asked = False
#: What groups are asked for that become swift ones.
_TAKEN = frozenset({"undefined", "gloo", "swift", "nccl", "cpu:gloo", "cuda:nccl", "cpu:gloo,cuda:nccl", "cpu:swift"})


def install(runtime: Runtime) -> None:
    """Make every gloo group that is created from now on a swift one. A second call does nothing, whatever its runtime.

    Raises:
        Unsupported: this version of torch cannot be used, or there is a group that cannot survive.
    """
    global _runtime, _asked
    _asked = True
    if _left:
        raise _refused(_left)
    if _runtime is not None:
        return
    prepared = _make is not None
    check_version(compat.TESTED, () if prepared else compat.NAMES)  # some names are ours once groups are prepared
    _runtime = runtime
    if not prepared:
        _patch()


def prepare(make: Callable[[], Runtime]) -> None:
    """As :func:`install`, for a program that may not ask for it: ``make`` is called when it makes its first group, and
    what cannot be a swift group is torch's own. Nothing is done for a torch that cannot be used.
    """
    global _make, _owner
    try:
        check_version(compat.TESTED, compat.NAMES)
    except Unsupported:
        return  # it is said where the program asks
    _make, _owner = make, os.getpid()
    _patch()


def _refused(backend: str) -> Unsupported:
    return Unsupported(f"a process group of backend {backend} is made, {REFUSED}")


def _patch() -> None:
    if not compat.is_registered("swift"):
        dist.Backend.register_backend("swift", _create, extended_api=True, devices=["cpu"])
    compat.replace_group_creation(_new_process_group)
    compat.log_as_gloo()


def _new_process_group(torch_helper: Callable[..., Any], given: Mapping[str, Any]) -> Any:
    """A group that asks for "swift" and is recorded as "gloo"; see :func:`compat.replace_group_creation`."""
    global _runtime, _left
    if not _asked and os.getpid() != _owner:
        return torch_helper(**given)  # of a child of the worker, which is a job of its own
    if _runtime is None:
        assert _make is not None
        _runtime = _make()
    backend = str(given["backend"] or "undefined").lower()
    if runs_on_devices(backend) and not _runtime.stages:
        if not _runtime.restarts:
            wanted = str(given["backend"] or "nccl")
            if _asked:
                raise _refused(wanted)
            _left = wanted
            return torch_helper(**given)
        return _beside(torch_helper, given)
    if backend not in _TAKEN:
        return torch_helper(**given)
    if given.get("device_id") is not None:  # torch would connect at once, and there is nothing to connect to
        given = {**given, "device_id": None}
    group, store = torch_helper(**{**given, "backend": dist.Backend("swift")})
    if isinstance(group, SwiftProcessGroup):
        compat.record_as_gloo(group, store)
    return group, store


def _beside(torch_helper: Callable[..., Any], given: Mapping[str, Any]) -> Any:
    """torch's own group. Beside the first one the workers have a group for what they agree on by themselves."""
    assert _runtime is not None
    made = torch_helper(**given)
    if _runtime.world is None:
        size = given["group_size"]
        own = _runtime.new_group(
            given["group_name"], given["group_rank"], size, range(size), given["timeout"] or _TIMEOUT
        )
        _runtime.generations.add_group(own)
        _runtime.stand_aside()
    return made


def _create(options: Any, _: Any) -> SwiftProcessGroup:
    assert _runtime is not None
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    group = SwiftProcessGroup(
        _runtime,
        options.group_id,
        options.group_rank,
        options.group_size,
        ranks,
        options.timeout or _TIMEOUT,
    )
    _runtime.generations.add_group(group._state)
    return group

"""What the program's thread waits for, and what this rank has done that others may wait for."""

from __future__ import annotations

import time
from typing import Any

from shared_core.protocol.frontier import channel_key
from shared_core.protocol.standstill import ANY_SOURCE, WaitStatus
from shared_core.worker.comm.groups import GroupState
from shared_core.worker.comm.op import KeptResults, Op, describe
from shared_core.worker.comm.runtime import Runtime


def wait_status(runtime: Runtime, look: int, *, idle: bool) -> WaitStatus | None:
    """What the program waits for in the live generation; None if it does not wait, or if a recovery is under way, which
    says itself whom it waits for. ``look`` is the number of the report; ``idle``: the process does nothing else.
    """
    with runtime.lock:
        live = not runtime.broken and runtime.generation == runtime.latest
        # With ranks absent no generation is formed, and the program waits on survivor groups.
        if runtime.starting or runtime.generation < 0 or not (live or runtime.beside):
            return None
        found = _wait(runtime)
        if found is None:
            return None
        begun, wait = found
        waited_s = time.monotonic() - begun
        return WaitStatus(runtime.rank, runtime.latest, look, waited_s=waited_s, idle=idle, **wait, **_done(runtime))


def finished(runtime: Runtime, look: int) -> WaitStatus:
    with runtime.lock:
        return WaitStatus(runtime.rank, runtime.generation, look, **_done(runtime))


def _wait(runtime: Runtime) -> tuple[float, dict[str, Any]] | None:
    """Since when (``time.monotonic()``) the program waits, and fields of :class:`WaitStatus`."""
    world = runtime.world
    if runtime.beside is not None:
        begun, members, call = runtime.beside
        limit_s = world.timeout.total_seconds() if world is not None else runtime.wait_timeout_s
        return begun, {"call": call, "members": members, "limit_s": limit_s}
    for group in runtime.groups.values():
        if (message := group.channels.waits()) is not None:
            source = group.ranks[message.channel[0]] if message.channel[0] >= 0 else ANY_SOURCE
            place = {"channel": channel_key(message.channel), "number": message.index, "source": source}
            return message.begun, _named(runtime, group) | place | {"call": "recv"}
    if (waited := _collective(runtime)) is not None:
        group, op = waited
        return op.begun, _named(runtime, group) | {"call": describe(op.signature), "number": op.seq}
    return None


def _named(runtime: Runtime, group: GroupState) -> dict[str, Any]:
    limit_s = group.timeout.total_seconds()
    return {"group": group.name, "called": runtime.groups.called(group), "members": group.ranks, "limit_s": limit_s}


def _collective(runtime: Runtime) -> tuple[GroupState, Op] | None:
    """The one that the program waits for. DDP waits in C++ for the first of its buckets, and does nothing before."""
    pending = [
        (group, group.pending[seq])
        for group in runtime.groups.values()
        if group.size > 1
        for seq in sorted(group.pending)
    ]
    asked = [each for each in pending if each[1].awaited]
    buckets = [each for each in pending if each[1].lazy or each[1].keeps is KeptResults.BUCKET]
    return next(iter(asked or buckets), None)


def _done(runtime: Runtime) -> dict[str, Any]:
    groups = runtime.groups
    return {
        "issued": {name: group.next for name, group in groups.items()},
        "pending": {
            name: {str(seq): describe(op.signature) for seq, op in group.pending.items()}
            for name, group in groups.items()
            if group.pending
        },
        "sent": {name: sent for name, group in groups.items() if (sent := group.channels.watermarks()[1])},
    }

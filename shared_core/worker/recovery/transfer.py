"""Plain data and tensors between two members of a group that is being formed, in chunks."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch

from shared_core.waiting import Wait
from shared_core.worker.comm.gloo import InnerGroup, finish_message
from shared_core.worker.state.replicated import pack, unpack

_TAG = 2**30
#: Gloo's own time-out of a message; ours ends it before, and a loss at once.
_FOREVER = timedelta(days=10)
_CHUNK = 32 << 20


def _chunks(sizes: list[int]) -> list[list[int]]:
    """Consecutive places whose sizes add up to at most one chunk (or a single larger one)."""
    out: list[list[int]] = []
    total = _CHUNK
    for place, size in enumerate(sizes):
        if total + size > _CHUNK or not out:
            out.append([])
            total = 0
        out[-1].append(place)
        total += size
    return out


def _wait(inner: InnerGroup, place: int, what: str, limit_s: float | None = None, *, idle: bool = False) -> Wait:
    """For one chunk."""
    return Wait(
        f"rank {inner.rank}",
        f"rank {inner.members[place]} {what}",
        inner.wait_timeout_s if limit_s is None else limit_s,
        bound="wait_timeout_s" if limit_s is None else "a fixed limit",
        advice="It may hang, or the network is too slow: raise wait_timeout_s.",
        speaks=lambda: not idle,
    )


def send(inner: InnerGroup, destination: int, head: dict[str, Any], tensors: list[torch.Tensor]) -> None:
    """Send plain data and tensors to a rank of the group, which calls :func:`receive`.

    Raises:
        RuntimeError: if a connection breaks.
        GenerationAbandoned: if the group was cut.
        WaitTimeout: if the other does not take part in time.
    """

    def put(tensor: torch.Tensor) -> None:
        wait = _wait(inner, destination, "to take over what this one sends it in the recovery")
        finish_message(inner.pg.send([tensor], destination, _TAG), inner, _FOREVER, wait)

    layout = [[list(t.shape), str(t.dtype).removeprefix("torch.")] for t in tensors]
    packed = pack({"head": head, "layout": layout})
    put(torch.tensor([packed.numel()]))
    put(packed)
    views = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in tensors]
    for places in _chunks([v.numel() for v in views]):
        chunk = torch.cat([views[p] for p in places]) if len(places) > 1 else views[places[0]]
        if chunk.numel():
            put(chunk)


def receive(
    inner: InnerGroup,
    source: int,
    what: str = "to send state and logged messages in the recovery",
    limit_s: float | None = None,
    *,
    idle: bool = False,
) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """What :func:`send` was given.

    Args:
        inner: the group.
        source: place of the sender in it.
        what: the sender is to do, for the line that a long wait prints.
        limit_s: of one chunk; ``wait_timeout_s`` if None.
        idle: nothing depends on this message, so that a long wait is not worth a line.

    Raises:
        RuntimeError: if a connection breaks.
        GenerationAbandoned: if the group was cut.
        WaitTimeout: if the other does not take part in time.
    """

    def get(tensor: torch.Tensor) -> torch.Tensor:
        wait = _wait(inner, source, what, limit_s, idle=idle)
        finish_message(inner.pg.recv([tensor], source, _TAG), inner, _FOREVER, wait)
        return tensor

    size = get(torch.zeros(1, dtype=torch.int64))
    described = unpack(get(torch.empty(int(size), dtype=torch.uint8)))
    tensors = [torch.empty(shape, dtype=getattr(torch, dtype)) for shape, dtype in described["layout"]]
    sizes = [t.numel() * t.element_size() for t in tensors]
    for places in _chunks(sizes):
        total = sum(sizes[p] for p in places)
        if not total:
            continue
        chunk = get(torch.empty(total, dtype=torch.uint8))
        at = 0
        for place in places:
            tensors[place].view(-1).view(torch.uint8).copy_(chunk[at : at + sizes[place]])
            at += sizes[place]
    return described["head"], tensors

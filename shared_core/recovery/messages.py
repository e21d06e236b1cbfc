"""Plain data and tensors between two members of a group that is being formed, in chunks."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch

from shared_core.comm.gloo import InnerGroup, finish_message
from shared_core.recovery.state import pack, unpack

_TAG = 2**30
#: Longest time for one message of an exchange; a loss ends it at once.
_TRANSFER = timedelta(minutes=30)
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


def send(inner: InnerGroup, destination: int, head: dict[str, Any], tensors: list[torch.Tensor]) -> None:
    """Send plain data and tensors to a rank of the group, which calls :func:`receive`.

    Raises:
        RuntimeError: if a connection breaks.
        GenerationAbandoned: if the group was cut.
    """

    def put(tensor: torch.Tensor) -> None:
        finish_message(inner.pg.send([tensor], destination, _TAG), inner, _TRANSFER, f"a message to {destination}")

    layout = [[list(t.shape), str(t.dtype).removeprefix("torch.")] for t in tensors]
    packed = pack({"head": head, "layout": layout})
    put(torch.tensor([packed.numel()]))
    put(packed)
    views = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in tensors]
    for places in _chunks([v.numel() for v in views]):
        chunk = torch.cat([views[p] for p in places]) if len(places) > 1 else views[places[0]]
        if chunk.numel():
            put(chunk)


def receive(inner: InnerGroup, source: int) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """What :func:`send` was given.

    Raises:
        RuntimeError: if a connection breaks.
        GenerationAbandoned: if the group was cut.
    """

    def get(tensor: torch.Tensor) -> torch.Tensor:
        finish_message(inner.pg.recv([tensor], source, _TAG), inner, _TRANSFER, f"a message from {source}")
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

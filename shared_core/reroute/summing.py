"""Sums of gradients over the pipelines, in an order that does not depend on who computed what."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from shared_core.errors import Unsupported
from shared_core.reroute.messages import MessageChannel, MessageKey, MessageKind
from shared_core.schedule.schedule import PlannedWorker
from shared_core.worker.messages.group_log import BufferPool

# -- the order in which gloo's all-reduce adds on CPUs, found with torch 2.13 and compared with it by the tests -------
#
# It is a ring. The elements are divided into as many chunks as there are ranks. The sum of chunk c begins at rank
# c - 1, goes down the ranks, each of which adds its own, and ends at rank c.

#: Most bytes of a segment; gloo sends a chunk in segments.
_SEGMENT = 1 << 20


def chunk_size(numel: int, itemsize: int, ranks: int) -> int:
    """Elements of a chunk of a tensor of ``numel`` elements of ``itemsize`` bytes; the last may have fewer, or none."""
    size, longest = numel * itemsize, itemsize * max(1, _SEGMENT // itemsize)
    # Each rank has as many segments, at least two.
    each = max(-(-size // (longest * ranks)), 2)
    return each * -(-size // (each * ranks * itemsize))


def gloo_order(chunk: int, ranks: int) -> list[int]:
    """Ranks in the order in which they are added in this chunk."""
    return [(chunk - 1 - turn) % ranks for turn in range(ranks)]


def spans(start: int, stop: int, size: int) -> Iterator[tuple[int, slice]]:
    """The chunks in elements ``start`` to ``stop`` of a tensor, and where in that part, for chunks of ``size``."""
    at = start
    while at < stop:
        end = min(stop, (at // size + 1) * size)
        yield at // size, slice(at - start, end - start)
        at = end


def add_as_gloo(addends: Sequence[Tensor], start: int, numel: int) -> Tensor:
    """Sum of a part of a tensor, with the bits of gloo's.

    Args:
        addends: that part of each rank's tensor, one-dimensional; unchanged.
        start: of the part, in elements.
        numel: elements of the whole tensor.
    """
    ranks, total = len(addends), addends[0].clone()
    size = chunk_size(numel, total.element_size(), ranks)
    for chunk, span in spans(start, start + total.numel(), size):
        first, *others = gloo_order(chunk, ranks)
        total[span] = addends[first][span]
        for rank in others:
            total[span] += addends[rank][span]
    return total


# -- sums over the pipelines ------------------------------------------------------------------------------------------


#: Sums that can be under way together: tags of messages have room for as many.
GROUPS = len(MessageKind)


@dataclass(frozen=True)
class SumRule:
    """How gradients of the pipelines are summed, to the bits of an optimizer's own reduction.

    Attributes:
        divisor: each pipeline's gradients are divided by this before they are added.
        dtype: they are rounded to this type then, and added in it; None for their own.
        scale: the sum is multiplied by this, unless it is 1.
        as_gloo: they are added in the order of gloo's all-reduce over the pipelines; else by ascending pipeline.
    """

    divisor: int = 1
    dtype: torch.dtype | None = None
    scale: float = 1.0
    as_gloo: bool = False

    def add(self, addends: Sequence[Tensor], start: int, numel: int) -> Tensor:
        """Sum of a part of the pipelines' gradients, times the scale; arguments as in :func:`add_as_gloo`."""
        if self.as_gloo:
            total = add_as_gloo(addends, start, numel)
        else:
            total = addends[0].clone()
            for addend in addends[1:]:
                total.add_(addend)
        return total if self.scale == 1.0 else total.mul_(self.scale)

    def addend(self, gradients: Tensor) -> Tensor:
        """A pipeline's gradients, divided and rounded; the argument itself where nothing is to be done."""
        divided = gradients / float(self.divisor) if self.divisor != 1 else gradients
        return divided.to(self.dtype or gradients.dtype)


def reduce_in_order(
    channel: MessageChannel,
    step: int,
    group: int,
    me: PlannedWorker,
    holders: Mapping[PlannedWorker, PlannedWorker],
    mine: Mapping[PlannedWorker, Tensor],
    ranks: Mapping[PlannedWorker, int],
    rule: SumRule,
    like: Tensor | None = None,
    pool: BufferPool | None = None,
) -> Tensor:
    """Sum of what the workers of a stage hold, or those of several stages with tied layers; the same bits at each.

    Each worker sums a part and sends it to the others, as a ring does, with as many bytes; but the addends of each home
    pipeline are added by ascending stage, and the pipelines' sums as ``rule`` says.

    Args:
        group: 0 for what belongs to one stage, else the number of what several have in common, below :data:`GROUPS`.
        holders: for every addend, by home pipeline and stage, the worker that holds it.
        mine: addends held here; one-dimensional, all of one length; unchanged.
        ranks: ranks of the workers that take part, which are all that are there.
        like: of the size and type of the sum, at a worker that holds no addend.
        pool: has memory for the sum, which the caller gives back, and for what is received. Fresh memory may take
            longer than the sum.
    """
    pool = pool or BufferPool()
    peers = sorted(ranks)
    like = next(iter(mine.values())) if like is None else like
    bounds = [round(i * like.numel() / len(peers)) for i in range(len(peers) + 1)]
    parts = {peer: slice(bounds[i], bounds[i + 1]) for i, peer in enumerate(peers)}
    for peer in peers:
        if peer != me:
            for home, held in mine.items():
                channel.send(_key(step, MessageKind.SHARE, home, group), [held[parts[peer]]], ranks[peer])
    own, result = parts[me], pool.take(like)
    received = []
    for home, holder in holders.items():
        if holder != me:
            received.append(pool.take(like[own]))
            channel.post_into(_key(step, MessageKind.SHARE, home, group), (received[-1],), ranks[holder])
    for peer in peers:
        if peer != me:
            channel.post_into(_key(step, MessageKind.SUM, peer, group), (result[parts[peer]],), ranks[peer])
    addends = []
    for pipeline in sorted({home.pipeline for home in holders}):
        addend: Tensor | None = None
        for home in sorted(home for home in holders if home.pipeline == pipeline):
            part = mine[home][own] if home in mine else channel.finish(_key(step, MessageKind.SHARE, home, group))[0]
            addend = part if addend is None else addend + part
        assert addend is not None
        addends.append(rule.addend(addend))
    assert addends, "nobody holds a gradient"
    result[own] = rule.add(addends, own.start, like.numel())
    for peer in peers:
        if peer != me:
            channel.send(_key(step, MessageKind.SUM, me, group), [result[own]], ranks[peer])
    for peer in peers:
        if peer != me:
            channel.finish(_key(step, MessageKind.SUM, peer, group))
    pool.give(received)
    return result


def _key(step: int, what: MessageKind, place: PlannedWorker, group: int) -> MessageKey:
    return MessageKey(step, what, place.stage, place.pipeline, group)


def hand_over(
    channel: MessageChannel,
    key: MessageKey,
    me: int,
    giver: int,
    takers: Collection[int],
    held: Tensor | None,
    like: Tensor,
) -> Tensor | None:
    """After a failure, ``giver`` sends the sum ``held`` to the ``takers``: made again it may have other bits.

    ``like`` has its shape and type. Returns what this rank has got; None at the giver and all that are no takers.
    """
    if me == giver:
        assert held is not None
        for rank in takers:
            channel.send(key, [held], rank)
        return None
    return channel.fetch_like(key, [like], giver)[0] if me in takers else None


def flat_gradients(parameters: Sequence[Tensor], pool: BufferPool | None = None) -> Tensor:
    """Gradients concatenated, zeros where there is none; then 1 for each that there is, 0 for the others.

    One-dimensional, of the promoted dtype of the parameters; a copy, in the pool's memory. Raises Unsupported for
    sparse gradients.
    """
    parts = []
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None and gradient.layout != torch.strided:
            raise Unsupported(
                "a step that is shared among all workers needs dense gradients: pass sparse=False to the embedding"
            )
        parts.append(torch.zeros_like(parameter) if gradient is None else gradient)
    used = torch.tensor([float(p.grad is not None) for p in parameters], dtype=parts[0].dtype)
    parts = [*(part.detach().flatten() for part in parts), used]
    out = (pool or BufferPool()).take(like_flat(parameters))
    return torch.cat(parts, out=out)


def like_flat(parameters: Sequence[Tensor]) -> Tensor:
    """A meta tensor of the size and type of :func:`flat_gradients`."""
    size = sum(parameter.numel() for parameter in parameters) + len(parameters)
    return torch.empty(size, dtype=reduce(torch.promote_types, (p.dtype for p in parameters)), device="meta")


def set_mean_gradients(flat: Tensor, parameters: Sequence[Tensor], world: int) -> None:
    """Set ``.grad`` to the mean, from a sum of :func:`flat_gradients`, unchanged; None where no rank had one."""
    count = len(parameters)
    gradients = unflatten(flat[: flat.numel() - count], parameters)
    used = flat[flat.numel() - count :].tolist()
    for parameter, gradient, ranks in zip(parameters, gradients, used, strict=True):
        parameter.grad = (gradient / world).to(parameter.dtype) if ranks else None


def flatten(gradients: Sequence[Tensor | None], parameters: Sequence[Tensor], dtype: torch.dtype | None) -> Tensor:
    """Gradients concatenated; zeros where there is none, as DeepSpeed has it. ``dtype`` None: the parameters'."""
    parts = [
        torch.zeros_like(p, dtype=dtype).flatten() if g is None else g.flatten()
        for g, p in zip(gradients, parameters, strict=True)
    ]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=dtype)


def unflatten(flat: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Views of ``flat`` in the shapes of the parameters."""
    sizes = [p.numel() for p in parameters]
    return [part.view_as(p) for part, p in zip(flat.split(sizes), parameters, strict=True)]

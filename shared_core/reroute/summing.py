"""Sums of gradients over the pipelines, in an order that does not depend on who computed what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from shared_core.reroute.mail import Key, Mail, What


def reduce_in_order(
    mail: Mail,
    step: int,
    stage: int,
    me: int,
    holders: Mapping[int, int],
    mine: Mapping[int, Tensor],
    ranks: Mapping[int, int],
    scale: float,
) -> Tensor:
    """Sum of what the workers of a stage hold, the same bits at each of them.

    Each worker sums a part and sends it to the others, as a ring does, with as many bytes; but the addends are added
    by ascending home pipeline.

    Args:
        mail: the lane.
        step: number of the step.
        stage: this stage.
        me: pipeline of this worker.
        holders: for every addend, by home pipeline, the pipeline of the worker that holds it.
        mine: addends held here, by home pipeline; one-dimensional, all of one length.
        ranks: the workers of the stage that are there: pipeline to rank.
        scale: the sum is multiplied by this, unless it is 1.

    Raises:
        LaneBroken: after a loss.
    """
    peers = sorted(ranks)
    like = next(iter(mine.values()))
    bounds = [round(i * like.numel() / len(peers)) for i in range(len(peers) + 1)]
    parts = {peer: slice(bounds[i], bounds[i + 1]) for i, peer in enumerate(peers)}
    for peer in peers:
        if peer != me:
            for home, addend in mine.items():
                mail.send(Key(step, What.SHARE, stage, home), [addend[parts[peer]]], ranks[peer])
    own = parts[me]
    for home, holder in holders.items():
        if holder != me:
            mail.post_like(Key(step, What.SHARE, stage, home), [like[own]], ranks[holder])
    for peer in peers:
        if peer != me:
            mail.post_like(Key(step, What.SUM, stage, peer), [like[parts[peer]]], ranks[peer])
    result = torch.empty_like(like)
    total = None
    for home in sorted(holders):
        if home in mine:
            addend = mine[home][own]
        else:
            (addend,) = mail.fetch_like(Key(step, What.SHARE, stage, home), [like[own]], ranks[holders[home]])
        total = addend.clone() if total is None else total.add_(addend)
    assert total is not None, "nobody holds a gradient"
    if scale != 1.0:
        total.mul_(scale)
    result[own] = total
    for peer in peers:
        if peer != me:
            mail.send(Key(step, What.SUM, stage, me), [total], ranks[peer])
    for peer in peers:
        if peer != me:
            (result[parts[peer]],) = mail.fetch_like(Key(step, What.SUM, stage, peer), [like[parts[peer]]], ranks[peer])
    return result


def flatten(gradients: Sequence[Tensor | None], parameters: Sequence[Tensor]) -> Tensor:
    """Gradients one after the other; zeros where a parameter has none, as DeepSpeed has it."""
    parts = [
        torch.zeros_like(p).flatten() if g is None else g.flatten() for g, p in zip(gradients, parameters, strict=True)
    ]
    return torch.cat(parts) if parts else torch.zeros(0)


def unflatten(flat: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Views of ``flat`` in the shapes of the parameters."""
    sizes = [p.numel() for p in parameters]
    return [part.view_as(p) for part, p in zip(flat.split(sizes), parameters, strict=True)]

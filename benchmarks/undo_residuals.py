"""The way that was not taken: the inverse formula of AdamW, and residuals that keep what rounding lost.

After a step the old values are compared with what the inverse formula makes of the new ones; the difference of the bit
patterns is kept as one byte an element, and the few that do not fit are kept whole. It needs the gradient, and the old
values until the difference is taken, so for one tensor at a time. Exact, and smaller than copies; slower.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch
from torch import nn

from benchmarks.common import Row, at_least, say

BETA1, BETA2, EPS, LR, DECAY = 0.9, 0.999, 1e-8, 1e-3, 1e-2
#: Elements handled at once: their values stay in the second-level cache.
BLOCK = 1 << 14


@dataclass
class Residual:
    """What is added to the bits of the inverse's result: one byte an element, and what does not fit in it."""

    small: torch.Tensor
    places: torch.Tensor
    large: torch.Tensor

    @property
    def nbytes(self) -> int:
        return self.small.nbytes + self.places.nbytes + self.large.nbytes


def inverse(
    p: torch.Tensor, m: torch.Tensor, v: torch.Tensor, g: torch.Tensor, step: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Parameter and moments before AdamW's step ``step``, up to rounding (1-dimensional, float32)."""
    denominator = (v.sqrt() / (1 - BETA2**step) ** 0.5).add_(EPS)
    old_p = p.addcdiv(m, denominator, value=LR / (1 - BETA1**step)).div_(1 - LR * DECAY)
    old_m = m.sub(g, alpha=1 - BETA1).div_(BETA1)
    old_v = v.addcmul(g, g, value=-(1 - BETA2)).div_(BETA2)
    return old_p, old_m, old_v


def residual(old: torch.Tensor, guess: torch.Tensor) -> Residual:
    """What makes ``old`` of ``guess``, bit by bit."""
    difference = old.view(torch.int32) - guess.view(torch.int32)  # wraps, as adding does
    small = difference.to(torch.int8)
    places = (difference != small).nonzero().view(-1).to(torch.int32)
    return Residual(small, places, difference[places])


def apply(guess: torch.Tensor, kept: Residual) -> torch.Tensor:
    """Inverse of :func:`residual`."""
    difference = kept.small.to(torch.int32)
    difference[kept.places] = kept.large
    return (guess.view(torch.int32) + difference).view(torch.float32)


def residual_rows(width: int, count: int, rounds: int) -> list[Row]:
    """Rows of AdamW's fused path with residuals, at ``count`` matrices of ``width`` x ``width``."""
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(width, width) * 0.02) for _ in range(count)]
    optimizer = torch.optim.AdamW(params, lr=LR, betas=(BETA1, BETA2), eps=EPS, weight_decay=DECAY, fused=True)

    def gradients() -> None:
        for p in params:
            p.grad = torch.randn(width, width) * 1e-3

    for _ in range(20):  # moments as they are amid training
        gradients()
        optimizer.step()
    steps, making, restoring, sizes, exact = [], [], [], [], True
    for turn in range(min(rounds, 5)):
        gradients()
        old = [_values(optimizer, p) for p in params]
        begin = time.perf_counter()
        optimizer.step()
        steps.append(time.perf_counter() - begin)
        begin = time.perf_counter()
        kept: list[list[Residual]] = []
        for p, before in zip(params, old, strict=True):
            for at in range(0, p.numel(), BLOCK):
                now = [t[at : at + BLOCK] for t in _flat(optimizer, p)]
                assert p.grad is not None
                guesses = inverse(*now, p.grad.view(-1)[at : at + BLOCK], 21 + turn)
                pairs = zip(before, guesses, strict=True)
                kept.append([residual(was[at : at + BLOCK], guess) for was, guess in pairs])
        making.append(time.perf_counter() - begin)
        sizes.append(sum(r.nbytes for three in kept for r in three) / sum(p.numel() for p in params))
        begin = time.perf_counter()
        blocks = iter(kept)
        for p, before in zip(params, old, strict=True):
            for at in range(0, p.numel(), BLOCK):
                now = [t[at : at + BLOCK] for t in _flat(optimizer, p)]
                assert p.grad is not None
                guesses = inverse(*now, p.grad.view(-1)[at : at + BLOCK], 21 + turn)
                for was, guess, one in zip(before, guesses, next(blocks), strict=True):
                    same = apply(guess, one).view(torch.int32) == was[at : at + BLOCK].view(torch.int32)
                    exact = exact and bool(same.all())
        restoring.append(time.perf_counter() - begin)
    case = f"inverse with residuals (not used), AdamW, fused, {sum(p.numel() for p in params) / 1e6:.0f} M"
    ratio = statistics.median(1 + made / step for made, step in zip(making, steps, strict=True))
    say(f"{case}: {ratio:.2f} of a step, {statistics.median(sizes):.2f} B/parameter")
    return [
        Row(case, "step and residuals, without the copies that they need / step", ratio, "ratio"),
        Row(case, "undo", 1e3 * statistics.median(restoring), "ms"),
        Row(case, "memory of residuals", statistics.median(sizes), "B/parameter"),
        at_least(case, "bits as before the step after undo (1 = all)", float(exact), "", 1.0),
    ]


def _flat(optimizer: torch.optim.Optimizer, p: nn.Parameter) -> list[torch.Tensor]:
    state = optimizer.state[p]
    return [p.detach().view(-1), state["exp_avg"].view(-1), state["exp_avg_sq"].view(-1)]


def _values(optimizer: torch.optim.Optimizer, p: nn.Parameter) -> list[torch.Tensor]:
    return [t.clone() for t in _flat(optimizer, p)]

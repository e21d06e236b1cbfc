"""Bits of the replicated state that flip on purpose, for the fault injector."""

from __future__ import annotations

import torch

from shared_core.worker.state.replicated import Replicated


def flip(replicated: Replicated, kind: str, bit: int) -> None:
    """Flip one bit of a tensor on the CPU as faulty memory does: no version counter and no hook sees it.

    Args:
        kind: ``flip.parameter`` or ``flip.optimizer``.
        bit: its number in all parameters, or in all tensors of optimizers one behind the other; taken modulo their
            number. Raises IndexError if there are none.
    """
    description, tensors = replicated.export()
    count = description["parameters"]
    chosen = tensors[:count] if kind == "flip.parameter" else tensors[count:]
    sizes = [8 * tensor.nbytes for tensor in chosen]
    bit = bit % sum(sizes) if any(sizes) else 0
    place = 0
    while bit >= sizes[place]:
        bit, place = bit - sizes[place], place + 1
    chosen[place].view(-1).view(torch.uint8).numpy()[bit // 8] ^= 1 << bit % 8

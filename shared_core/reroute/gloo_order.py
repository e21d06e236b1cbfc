"""The order in which gloo's all-reduce adds on CPUs, found with torch 2.13 and compared with it by the tests.

It is a ring. The elements are divided into as many chunks as there are ranks. The sum of chunk c begins at rank c - 1,
goes down the ranks, each of which adds its own, and ends at rank c.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

#: Most bytes of a segment; gloo sends a chunk in segments.
_SEGMENT = 1 << 20


def chunk_size(numel: int, itemsize: int, ranks: int) -> int:
    """Elements of a chunk of a tensor of ``numel`` elements of ``itemsize`` bytes; the last may have fewer, or none."""
    size, longest = numel * itemsize, itemsize * max(1, _SEGMENT // itemsize)
    # Each rank has as many segments, at least two.
    each = max(-(-size // (longest * ranks)), 2)
    return each * -(-size // (each * ranks * itemsize))


def order(chunk: int, ranks: int) -> list[int]:
    """Ranks in the order in which they are added in this chunk."""
    return [(chunk - 1 - turn) % ranks for turn in range(ranks)]


def spans(start: int, stop: int, size: int) -> Iterator[tuple[int, slice]]:
    """The chunks in elements ``start`` to ``stop`` of a tensor, and where in that part, for chunks of ``size``."""
    at = start
    while at < stop:
        end = min(stop, (at // size + 1) * size)
        yield at // size, slice(at - start, end - start)
        at = end


def add(addends: Sequence[Tensor], start: int, numel: int) -> Tensor:
    """Sum of a part of a tensor, with the bits of gloo's.

    Args:
        addends: that part of each rank's tensor, one-dimensional; unchanged.
        start: of the part, in elements.
        numel: elements of the whole tensor.
    """
    ranks, total = len(addends), addends[0].clone()
    size = chunk_size(numel, total.element_size(), ranks)
    for chunk, span in spans(start, start + total.numel(), size):
        first, *others = order(chunk, ranks)
        total[span] = addends[first][span]
        for rank in others:
            total[span] += addends[rank][span]
    return total

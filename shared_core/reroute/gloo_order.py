"""The order in which gloo's all-reduce adds on CPUs, found with torch 2.13 and compared with it by the tests.

It is a ring. The elements are divided into as many chunks as there are ranks. The sum of chunk c begins at rank c - 1,
goes down the ranks, each of which adds its own, and ends at rank c.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

#: Gloo sends a chunk in segments of at most so many bytes.
_SEGMENT = 1 << 20


def chunk_size(numel: int, itemsize: int, ranks: int) -> int:
    """Elements of a chunk; the last ones may have fewer, or none.

    Args:
        numel: elements of the tensor.
        itemsize: bytes of an element.
        ranks: how many add.
    """
    size, longest = numel * itemsize, itemsize * max(1, _SEGMENT // itemsize)
    # Each rank has as many segments, at least two.
    each = max(-(-size // (longest * ranks)), 2)
    return each * -(-size // (each * ranks * itemsize))


def order(chunk: int, ranks: int) -> list[int]:
    """Ranks in the order in which theirs are added."""
    return [(chunk - 1 - turn) % ranks for turn in range(ranks)]


def spans(start: int, stop: int, size: int) -> Iterator[tuple[int, slice]]:
    """Of a part of a tensor: the chunks in it, and where they are in the part.

    Args:
        start: of the part, in elements.
        stop: where it ends.
        size: elements of a chunk.
    """
    at = start
    while at < stop:
        end = min(stop, (at // size + 1) * size)
        yield at // size, slice(at - start, end - start)
        at = end


def add(addends: Sequence[Tensor], start: int, numel: int) -> Tensor:
    """Sum of a part of a tensor, with the bits of gloo's.

    Args:
        addends: that part of each rank's, one-dimensional; they are left as they are.
        start: of the part, in elements.
        numel: elements of the tensor.
    """
    ranks, total = len(addends), addends[0].clone()
    size = chunk_size(numel, total.element_size(), ranks)
    for chunk, span in spans(start, start + total.numel(), size):
        first, *others = order(chunk, ranks)
        total[span] = addends[first][span]
        for rank in others:
            total[span] += addends[rank][span]
    return total

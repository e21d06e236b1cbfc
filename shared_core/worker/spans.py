"""Lists of tensors as one sequence of bytes, and how it is cut. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Span:
    tensor: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


def divided(sizes: Sequence[int], count: int, unit: int) -> list[list[Span]]:
    """Divide tensors of these sizes in bytes into ``count`` parts, in order, that differ by less than ``unit`` bytes.
    Tensors are cut at multiples of ``unit``. The last parts are empty where there is too little.
    """
    found: list[list[Span]] = [[] for _ in range(count)]
    share = -(-sum(sizes) // count)
    part, room = 0, share
    for tensor, size in enumerate(sizes):
        start = 0
        while start < size:
            if room <= 0:
                part, room = part + 1, room + share
                continue
            stop = min(size, start + -(-room // unit) * unit)
            found[part].append(Span(tensor, start, stop))
            room -= stop - start
            start = stop
    return found


def bundled(spans: Iterable[Span], alone: int, most: int) -> Iterator[list[Span]]:
    """Consecutive spans that travel together: those of ``alone`` bytes or more alone, others up to ``most`` bytes."""
    bundle: list[Span] = []
    for span in spans:
        if bundle and (span.size >= alone or sum(each.size for each in bundle) + span.size > most):
            yield bundle
            bundle = []
        if span.size >= alone:
            yield [span]
        else:
            bundle.append(span)
    if bundle:
        yield bundle

"""Checksums of tensors, at the speed of the memory they are in, and of state too large to be summed between two steps.

The bytes are taken as 64-bit words in blocks of 64 rows and 64 columns. All sums are of integers modulo 2^64, so that
neither threads nor the way in which a tensor is cut change the result. Each row and each column of a block is added up;
each of these sums is mixed with its place in the tensor (the finaliser of SplitMix64, Steele et al., OOPSLA 2014, which
maps 64 bits to 64 bits one to one), and what comes out is added up. What is left behind the last whole block has its
CRC-32 and Adler-32.

A changed bit or word changes one row and one column. Two words that swap places change two rows or two columns, and
rows and blocks that do are mixed with other places. Each of these is missed with a chance of 2^-64. What is always
missed leaves the sums of all rows and all columns as they were: at least four words of one block, at the corners of a
rectangle, are changed by +d, -d, -d and +d. No likely fault of memory, order or arithmetic does that. Somebody who
wants to deceive can do it: the sums protect from errors, not from people.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch

from shared_core.devices import to_host
from shared_core.worker.spans import Span, divided

_SIDE = 64
#: Bytes of a block.
BLOCK = 8 * _SIDE * _SIDE
#: Blocks that are summed by one call: half a megabyte, which stays in the cache between rows and columns.
_SUMMED = 16
#: Blocks whose sums are mixed by one call: 16 MB.
_MIXED = 512
_MASK = 0xFFFF_FFFF_FFFF_FFFF
#: SplitMix64's constants, as signed numbers.
_GOLDEN, _FIRST, _SECOND = (each - (1 << 64) for each in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
#: State is summed in at most this many parts.
_PARTS = 8
#: Less than this is not worth a part of its own, in bytes: half a millisecond.
_LEAST = 4 << 20


def checksum(tensor: torch.Tensor) -> int:
    """64-bit checksum of a tensor's values. Equal bytes give equal sums, whatever the shape and the device."""
    raw = raw_bytes(tensor)
    return _between(raw, 0, raw.numel())


def parts(sizes: Sequence[int], least: int = _LEAST) -> list[list[Span]]:
    """Divide tensors of so many bytes into at most eight about equal parts, none below ``least``."""
    return divided(sizes, max(1, min(_PARTS, sum(sizes) // least)), BLOCK)


class RunningSums:
    """Checksums of a list of tensors of ``sizes`` bytes, made part by part: what is between two calls may change the
    values, and ranks whose tensors are equal at each call get equal sums.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = list(sizes)
        self._sums = [0] * len(self.sizes)
        self._left = parts(self.sizes)

    def add_part(self, tensors: Sequence[torch.Tensor]) -> None:
        for span in self._left.pop(0) if self._left else []:
            found = _between(raw_bytes(tensors[span.tensor]), span.start, span.stop)
            self._sums[span.tensor] = (self._sums[span.tensor] + found) & _MASK

    @property
    def complete(self) -> list[int] | None:
        """A checksum for each tensor; None until all parts are summed."""
        return None if self._left else self._sums


def combined(count: int, places: Sequence[int], sums: Sequence[int]) -> list[int]:
    """One checksum for each of ``count`` places, of the ``sums`` that belong to it, whose order counts."""
    found = [0] * count
    for place, each in zip(places, sums, strict=True):
        found[place] = (found[place] * 1_000_003 + each) & _MASK
    return found


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The values as flat uint8: the same memory where they are contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _between(raw: torch.Tensor, start: int, stop: int) -> int:
    """The share of bytes ``start``, a multiple of ``BLOCK``, to ``stop`` in the sum; shares add up."""
    total = 0
    blocks, end = stop // BLOCK, stop == raw.numel()
    for first in range(start // BLOCK, blocks, _MIXED):
        last = min(first + _MIXED, blocks)
        sums = torch.empty(2, last - first, _SIDE, dtype=torch.int64, device=raw.device)
        for at in range(first, last, _SUMMED):
            until = min(at + _SUMMED, last)
            piece = raw[at * BLOCK : until * BLOCK]
            if piece.storage_offset() % 8:  # words begin at a multiple of their size
                piece = piece.clone()
            words = piece.view(torch.int64).view(-1, _SIDE, _SIDE)
            torch.sum(words, 2, out=sums[0, at - first : until - first])
            torch.sum(words, 1, out=sums[1, at - first : until - first])
        total += _mixed(sums[0], first, 1) + _mixed(sums[1], first, 2)
    if end and stop % BLOCK:
        tail: Any = to_host(raw[blocks * BLOCK :]).numpy()
        total += (zlib.crc32(tail) << 32) | zlib.adler32(tail)
    return total & _MASK


def _mixed(sums: torch.Tensor, first: int, kind: int) -> int:
    """The sum of what the sums of rows or columns become when their places are mixed in (SplitMix64's finaliser).

    Args:
        sums: int64, by block and row or column; overwritten.
        first: number of the first block.
        kind: 1 for rows, 2 for columns.
    """
    flat = sums.view(-1)
    begin, end = 2 * first * _SIDE + kind, 2 * (first * _SIDE + flat.numel()) + kind
    places = torch.arange(begin, end, 2, device=sums.device)
    flat += places.mul_(_GOLDEN)
    flat ^= _shifted(flat, 30, places)
    flat *= _FIRST
    flat ^= _shifted(flat, 27, places)
    flat *= _SECOND
    flat ^= _shifted(flat, 31, places)
    return int(flat.sum())


def _shifted(values: torch.Tensor, by: int, out: torch.Tensor) -> torch.Tensor:
    """Logical shift to the right, into ``out``: zeros come in from the left, whatever the sign."""
    return torch.bitwise_right_shift(values, by, out=out).bitwise_and_((1 << (64 - by)) - 1)

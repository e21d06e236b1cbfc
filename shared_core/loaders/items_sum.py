"""Checksums of what a stream has given: they tell whether it gives the same when it is read again."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

#: Of arrays of more bytes the sums of rows and of columns of so many integers are taken, which is several times faster
#: than a checksum of each byte.
_LARGE, _COLUMNS = 1 << 16, 1 << 10
_PLAIN = (int, float, complex, str, bytes, bool, type(None))


def summed(item: Any, before: int) -> int:
    """The checksum of all items up to this one; ``before`` is that of the items before. Tensors, arrays and plain data,
    in containers; of other objects only the type counts.
    """
    if isinstance(item, torch.Tensor):
        return _of_tensor(item, before)
    if isinstance(item, np.ndarray) and item.dtype != object:
        return _of_array(np.ascontiguousarray(item).reshape(-1).view(np.uint8), f"{item.dtype}{item.shape}", before)
    if isinstance(item, _PLAIN):
        return zlib.crc32(repr(item).encode(), before)
    found = zlib.crc32(type(item).__name__.encode(), before)
    if isinstance(item, Mapping):
        for key, value in item.items():
            found = summed(value, summed(key, found))
    elif isinstance(item, (list, tuple)):
        for each in item:
            found = summed(each, found)
    return found


def _of_tensor(tensor: torch.Tensor, before: int) -> int:
    if tensor.layout is not torch.strided or tensor.device.type == "meta":
        return zlib.crc32(str(tensor.shape).encode(), before)
    data = tensor.detach().contiguous().cpu().reshape(-1)
    what = f"{tensor.dtype}{tuple(tensor.shape)}"
    return _of_array(data.view(torch.uint8).numpy(), what, before)


def _of_array(data: np.ndarray[Any, np.dtype[np.uint8]], what: str, before: int) -> int:
    found = zlib.crc32(what.encode(), before)
    if data.nbytes <= _LARGE:
        return zlib.crc32(data.data, found)
    size = data.nbytes // (8 * _COLUMNS) * (8 * _COLUMNS)
    table = data[:size].view(np.uint64).reshape(-1, _COLUMNS)
    for axis in (0, 1):
        found = zlib.crc32(table.sum(axis, dtype=np.uint64).data, found)
    return zlib.crc32(data[size:].data, found)

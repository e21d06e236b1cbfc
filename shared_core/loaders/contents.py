"""What a pass reads, as far as torch's own data sets and lists show it: a replacement must read the same."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset

from shared_core.errors import Unsupported

#: Bytes of a batch that is published whole at each step boundary.
MOST_WHOLE = 1 << 16
#: So many items of each data set are looked at.
_LOOKED_AT = 16


def contents_of(loader: Any, *, values: bool) -> str:
    """How many items of which kinds are read, for people and to be compared; empty where that does not show.

    Args:
        loader: a ``DataLoader``, or a list or tuple.
        values: look at some of the items, too. Those of a data set that is there while training changes may be restored
            only later.
    """
    read = loader.dataset if isinstance(loader, DataLoader) else loader
    kinds = _kinds(read)
    if not kinds or not values:
        return kinds
    return f"{kinds} with checksum {_sum(read, 0):08x}"


def _kinds(read: Any) -> str:
    cls = type(read)
    if cls is TensorDataset or cls is list or cls is tuple:
        return f"{cls.__name__} of {len(read)}"
    if cls is Subset:
        return f"Subset of {len(read.indices)}"
    if cls is ConcatDataset:
        return f"ConcatDataset of {len(read.datasets)} ({', '.join(filter(None, map(_kinds, read.datasets)))})"
    return ""


def _some(items: Sequence[Any]) -> list[Any]:
    count = len(items)
    return [items[place] for place in range(0, count, max(1, count // _LOOKED_AT))]


def _sum(read: Any, before: int) -> int:
    cls = type(read)
    if cls is TensorDataset:
        for tensor in read.tensors:
            before = summed([str(tensor.shape), *_some(tensor)], before)
    elif cls is Subset:
        before = _sum(read.dataset, summed([int(each) for each in _some(read.indices)], before))
    elif cls is ConcatDataset:
        for each in read.datasets:
            before = _sum(each, before)
    elif cls is list or cls is tuple:
        before = summed(_some(read), before)
    return before


#: Of arrays of more bytes the sums of rows and of columns of so many integers are taken, which is several times faster
#: than a checksum of each byte.
_LARGE, _COLUMNS = 1 << 16, 1 << 10
_PLAIN = (int, float, complex, str, bytes, bool, type(None))


def summed(item: Any, before: int) -> int:
    """The checksum of all items up to this one, which tells whether a stream gives the same when it is read again.
    ``before`` is that of the items before. Tensors, arrays and plain data, in containers; of other objects only the
    type counts.
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


def published(item: Any, most: float) -> tuple[str, Any]:
    """An item, where it is plain data of at most ``most`` bytes, else its checksum. Tensors are not copied."""
    size = _size(item)
    return ("item", item) if size <= most and size < math.inf else ("sum", summed(item, 0))


def _size(item: Any) -> float:
    """Bytes in tensors and arrays, and entries; infinite where there is something else than plain data."""
    if type(item) in (list, tuple):
        return len(item) + sum(map(_size, item))
    if type(item) is dict:
        return len(item) + sum(map(_size, item.values())) if all(type(key) in (str, int) for key in item) else math.inf
    if type(item) is torch.Tensor:
        plain = item.is_cpu and item.layout is torch.strided and not item.requires_grad and not item.is_quantized
        return item.nbytes if plain else math.inf
    if type(item) is np.ndarray:
        return item.nbytes if item.dtype.kind in "biufc" else math.inf
    return len(item) if type(item) is str else 0 if item is None or type(item) in (bool, int, float) else math.inf


def as_published(hand: Sequence[tuple[str, Any]], again: Iterable[Any], rank: int) -> list[Any]:
    """The items that a failed worker had fetched ahead of their use: its own, where they were :func:`published` whole.

    Args:
        hand: the newest of them, as published.
        again: the items, read again.

    Raises:
        Unsupported: an item that was published as a checksum is another one when it is read again.
    """
    items = list(again)
    for number, (kind, value) in enumerate(hand[-len(items) :] if items else (), max(0, len(items) - len(hand))):
        if kind == "item":
            items[number] = value
        elif summed(items[number], 0) != value:
            raise Unsupported(
                f"rank {rank}: a batch that the failed worker had fetched ahead of its use is another one when it is "
                "read again: it depends on something that training or reading changes, such as a stage, a counter or "
                "a generator of the script. Let it depend on what the data set holds, and change that between epochs "
                "(docs/loops.md)"
            )
    return items


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

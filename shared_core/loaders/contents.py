"""What a pass reads, as far as torch's own data sets and lists show it: a replacement must read the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset

from shared_core.loaders.items_sum import summed

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

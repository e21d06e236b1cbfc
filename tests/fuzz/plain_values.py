"""Plain data of every kind, and whether two of them are alike."""

from __future__ import annotations

import collections
import pathlib
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.support.digest import digest

FACTORIES = [None, int, float, list, dict, set, collections.Counter, collections.OrderedDict]
keys = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.binary() | st.floats(allow_nan=False) | st.datetimes(),
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3),
    max_leaves=4,
)
arrays = hnp.arrays(
    hnp.scalar_dtypes() | hnp.byte_string_dtypes(min_len=1) | hnp.unicode_string_dtypes(min_len=1),
    hnp.array_shapes(min_dims=0, min_side=0, max_dims=3, max_side=4),
)
tensors = st.builds(
    lambda shape, dtype, seed: torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype),
    st.lists(st.integers(0, 4), max_size=3),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8, torch.complex64]),
    st.integers(0, 1 << 30),
)
leaves = (
    keys
    | st.floats()
    | st.complex_numbers()
    | st.text(st.characters(exclude_categories=()))
    | st.binary().map(bytearray)
    | st.timedeltas()
    | st.lists(st.text("ab/.", min_size=1), min_size=1, max_size=3).map(lambda parts: pathlib.PosixPath(*parts))
    | st.sampled_from([torch.float16, torch.Size([2, 3]), torch.Size([]), int, np.float32(0.5), np.datetime64(3, "ns")])
    | st.builds(lambda n: n << 9000, st.integers(-3, 3))
    | arrays
    | tensors
)


def _nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    few = st.lists(inner, max_size=5)
    table = st.dictionaries(keys, inner, max_size=4)
    return (
        few
        | few.map(tuple)
        | table
        | table.map(collections.OrderedDict)
        | st.builds(collections.deque, few, st.none() | st.integers(5, 9))
        | st.builds(collections.defaultdict, st.sampled_from(FACTORIES), table)
        | st.dictionaries(keys, st.integers(), max_size=4).map(collections.Counter)
        | st.sets(keys, max_size=4)
        | inner.map(lambda one: [one, one])
    )


values = st.recursive(leaves, _nested, max_leaves=12)


def alike(one: Any, other: Any) -> bool:
    """Equal with all types and bits; NaN equals itself."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and digest(one) == digest(other)
    if isinstance(one, np.ndarray | np.generic):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, dict):
        factories = getattr(one, "default_factory", None), getattr(other, "default_factory", None)
        return factories[0] is factories[1] and alike(list(one.items()), list(other.items()))
    if isinstance(one, collections.deque) and one.maxlen != other.maxlen:
        return False
    if isinstance(one, list | tuple | collections.deque):
        return len(one) == len(other) and all(map(alike, one, other))
    return bool(one == other) or repr(one) == repr(other)

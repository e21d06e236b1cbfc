"""Plain data with tensors, as it is published and put into checkpoints, and the tagged values inside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st

from shared_core.encoding import values as tagged
from shared_core.encoding.plain import dumps, loads, pieces

from ..harness import Target, only_errors, stable
from ..plain_values import values

_TAGS = ("scalar", "tuple", "enum", "generator", "set", "frozen", "array", "deque", "OrderedDict", "Counter", "dict")
_LARGE = torch.arange(1 << 13, dtype=torch.float64)
words = st.text(max_size=5) | st.sampled_from(["float32", "bfloat16", "enum", "Enum", "load", "int64", "__class__"])
#: Values that only look like what encoding makes.
forged = st.recursive(
    st.none()
    | st.integers(-2, 300)
    | st.floats()
    | st.binary(max_size=16)
    | words
    | st.lists(st.integers(0, 9)).map(tuple),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.builds(lambda tag, rest: (f"\0{tag}", *rest), st.sampled_from(_TAGS), st.lists(inner, max_size=3))
        | st.builds(
            lambda tag, pairs: (f"\0{tag}", pairs),
            st.sampled_from(_TAGS),
            st.lists(st.tuples(inner, inner), max_size=3),
        )
    ),
    max_leaves=8,
)


def _load(data: bytes, _folder: Path) -> Any:
    return loads(data)


def _decode_tagged(data: bytes, _folder: Path) -> Any:
    return tagged.decode(loads(data))


def _encode_tagged(value: Any, _folder: Path) -> bytes:
    try:
        return dumps(tagged.encode(value))
    except tagged.NotPlain:
        return dumps(value)


TARGETS = [
    Target("plain.bytes", values, lambda value, _: dumps(value), _load, stable(dumps, loads), count=80),
    Target(
        "plain.pieces",
        values.map(lambda value: [_LARGE, value, _LARGE[::2]]),
        lambda value, _: b"".join(pieces(value)),
        _load,
        stable(dumps, loads),
        count=10,
    ),
    Target("plain.tagged", values, _encode_tagged, _decode_tagged, only_errors, count=60),
    Target(
        "plain.tagged_forged", forged, lambda value, _: dumps(value), _decode_tagged, only_errors, count=150, whole=2
    ),
]

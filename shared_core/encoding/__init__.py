"""State as bytes, and back, without executing what is read.

``values``: attributes of the user's objects as plain data, and back in place; ``attributes``: all of an object's.
``plain``: plain data, tensors and arrays as bytes; ``unpacking``: the reader.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shared_core.lazy import lazily

if TYPE_CHECKING:
    from shared_core.encoding.attributes import Holder, Holders, user_defined
    from shared_core.encoding.plain import dumps, loads, pieces
    from shared_core.encoding.values import NotPlain, assign, decode, encode, encode_state, holds_more, holds_weights

__all__ = [
    "Holder",
    "Holders",
    "NotPlain",
    "assign",
    "decode",
    "dumps",
    "encode",
    "encode_state",
    "holds_more",
    "holds_weights",
    "loads",
    "pieces",
    "user_defined",
]

__getattr__ = lazily(
    __name__,
    {
        "shared_core.encoding.attributes": ("Holder", "Holders", "user_defined"),
        "shared_core.encoding.plain": ("dumps", "loads", "pieces"),
        "shared_core.encoding.values": (
            "NotPlain",
            "assign",
            "decode",
            "encode",
            "encode_state",
            "holds_more",
            "holds_weights",
        ),
    },
)

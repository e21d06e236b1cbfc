"""Bytes that are read: every value comes back with its types, and nothing but plain data can come out of others."""

from __future__ import annotations

import collections
import datetime
import pathlib
import struct
from typing import Any

import numpy as np
import pytest
import torch
from fuzz.plain_values import alike, values
from hypothesis import example, given, settings

from shared_core.encoding import dumps, loads, pieces
from shared_core.errors import CorruptFile, SwiftError


@settings(max_examples=150, deadline=None, derandomize=True)
@given(values)
@example([torch.arange(1 << 14, dtype=torch.float64), (1, (2.0, {"a": b""}))])
@example([0.0, -0.0, float("nan"), float("inf"), 2**70, -(2**5000), "\ud800", np.zeros((0, 3), "S4")])
def test_every_value_comes_back_with_its_types(value: Any) -> None:
    assert alike(loads(dumps(value)), value)
    assert alike(loads(b"".join(pieces(value))), value)


def _text(text: str) -> bytes:
    return b"\x8c" + bytes([len(text)]) + text.encode()


def _name(module: str, name: str) -> bytes:
    return _text(module) + _text(name) + b"\x93"


def _twice(before: bytes, after: bytes) -> bytes:
    """Containers that hold the one before twice, 60 times over."""
    return b"".join(before + b"h" + bytes([n]) + b"h" + bytes([n]) + after + b"\x94" for n in range(60))


HEAD = b"\x80\x05"
TENSOR = _name("shared_core.encoding.plain", "_tensor")
EMPTY = HEAD + TENSOR + b"C\0" + _text("float32") + b"J"
STATE = b"N}" + _text("_str") + _text("/elsewhere") + b"s\x86b."
FORGED = {
    "attributes of a class": HEAD + _name("pathlib", "PosixPath") + STATE,
    "attributes of a class, old names": HEAD + b"cpathlib\nPosixPath\n" + STATE,
    "attributes of a function": HEAD + TENSOR + STATE,
    "a function as a value": HEAD + TENSOR + b".",
    "an object of a class": HEAD + _name("pathlib", "PosixPath") + b")\x81.",
    "an extension": HEAD + b"\x82\x01.",
    "a persistent value": HEAD + _text("x") + b"Q.",
    "a call that copies": HEAD + _name("builtins", "list") + b"](K\x01e\x85R.",
    "a long text that is not there": HEAD + b"\x8d" + struct.pack("<Q", 1 << 62) + b".",
    "bytes that are not there": HEAD + b"\x8e" + struct.pack("<Q", 1 << 40) + b".",
    "a byte array that is not there": HEAD + b"\x96" + struct.pack("<Q", 1 << 40) + b".",
    "a frame that is not there": HEAD + b"\x95" + struct.pack("<Q", 1 << 62) + b"N.",
    "a place in the memo that is far": HEAD + b"Nr" + struct.pack("<I", 1 << 31) + b".",
    "a tensor without data": EMPTY + struct.pack("<i", 1 << 30) + b"\x85\x87R.",
    "a negative shape": EMPTY + struct.pack("<i", -1) + b"\x85\x87R.",
    "one piece of data for many tensors": HEAD
    + b"](B"
    + struct.pack("<I", 4096)
    + bytes(4096)
    + b"\x94"
    + (TENSOR + b"h\x00" + _text("uint8") + b"M\x00\x10\x85\x87R") * 200
    + b"e.",
    "a key that takes for ever to hash": HEAD + b"}()\x94" + _twice(b"", b"\x86") + b"Nu.",
    "a list that doubles": HEAD + b"](]\x94" + _twice(b"](", b"e") + b"e.",
    "tuples that double": HEAD + b"]()\x94" + _twice(b"", b"\x86") + b"e.",
    "lists inside each other": HEAD + b"]" * 200_000 + b"a" * 199_999 + b".",
    "tuples inside each other": HEAD + b")" + b"\x85" * 200_000 + b".",
    "a list in itself": HEAD + b"]\x94h\x00a.",
    "more after the end": dumps(1) + b"N.",
    "pieces of any number": b"S" + struct.pack("<Q", 1 << 60) + bytes(64),
    "pieces longer than the whole": b"S" + struct.pack("<QQQ", 2, 4, 1 << 60) + b"\x80\x05N.",
}  # fmt: skip


@pytest.mark.parametrize("what", FORGED)
def test_forged_bytes_are_refused(what: str) -> None:
    with pytest.raises(CorruptFile):
        loads(FORGED[what])
    assert str(pathlib.Path("/a")) == "/a" and collections.Counter("aa") == {"a": 2}


def test_paths_in_one_folder() -> None:
    """Their common parts stand once in the bytes."""
    paths = [pathlib.PosixPath(f"/data/a_name_of_a_folder_that_is_long/another_one_of_them/{n}") for n in range(3000)]
    many = [pathlib.PosixPath(*["a" * 200] * 20, str(n)) for n in range(3000)]
    assert loads(dumps(paths)) == paths
    with pytest.raises(CorruptFile, match="grow"):
        loads(dumps(many))


def test_a_datetime_that_cannot_be() -> None:
    written = dumps(datetime.datetime(2026, 1, 2, 3, 4, 5))
    assert loads(written).hour == 3
    place = written.index(bytes([7, 234, 1, 2, 3]))
    with pytest.raises(CorruptFile):
        loads(written[: place + 4] + bytes([25]) + written[place + 5 :])


@pytest.mark.parametrize("value", [np.zeros(2, [("a", "i4")]), np.zeros(1, [("a", "i4")])[0]])
def test_an_array_whose_type_would_be_lost_is_refused_when_it_is_written(value: Any) -> None:
    with pytest.raises(SwiftError):
        dumps(value)


@pytest.mark.parametrize("coalesced", [False, True])
def test_a_sparse_tensor_comes_back(coalesced: bool) -> None:
    indices, values = torch.tensor([[3, 1, 3]]), torch.arange(6.0).view(3, 2)
    sparse = torch.sparse_coo_tensor(indices, values, (9, 2), check_invariants=True)
    sparse = sparse.coalesce() if coalesced else sparse
    found = loads(dumps([sparse]))[0]
    assert found.is_coalesced() == coalesced and found.shape == sparse.shape
    assert torch.equal(found._indices(), sparse._indices()) and torch.equal(found._values(), sparse._values())

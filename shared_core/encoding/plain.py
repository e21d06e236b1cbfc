"""Plain data with tensors as bytes, and back, quickly and without executing what is read.

The standard library's pickler writes; tensors and numpy arrays are written by their bytes.
:mod:`shared_core.encoding.unpacking` reads, and makes plain data only.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from shared_core.encoding.raw_memory import memory_of
from shared_core.encoding.unpacking import array_kind, unpack
from shared_core.errors import CorruptFile, SwiftError

Piece = bytes | memoryview
#: Bytes from which on a tensor is a piece of its own.
_LARGE = 1 << 16
#: First byte of what consists of several pieces; a pickle begins with another.
_SEVERAL = b"S"
_LENGTH = struct.Struct("<Q")


# Their names stand in the bytes for what the reader makes; nobody calls them.
def _tensor(data: Any, dtype: str, shape: Any) -> None: ...
def _sparse(indices: Any, values: Any, shape: Any, coalesced: bool) -> None: ...
def _array(data: Any, dtype: str, shape: Any) -> None: ...
def _scalar(data: Any, dtype: str) -> None: ...
def _dtype(name: str) -> None: ...
def _numbered(number: int) -> None: ...


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, apart: Callable[[pickle.PickleBuffer], Any] | None) -> None:
        super().__init__(file, protocol=5, buffer_callback=apart)
        self._limit = _LARGE if apart is not None else None

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor) and obj.layout is torch.sparse_coo:
            return _sparse, (obj._indices(), obj._values(), tuple(obj.shape), obj.is_coalesced())
        if isinstance(obj, torch.Tensor):
            bits = obj.is_conj() or obj.is_neg()  # their values are not what lies in memory
            dense = obj if obj.is_cpu and obj.is_contiguous() and not bits else _dense(obj)
            size = dense.nbytes
            view = memory_of(dense)[:size] if size else memoryview(b"")
            apart = self._limit is not None and size >= self._limit
            data = pickle.PickleBuffer(view) if apart else view.tobytes()
            return _tensor, (data, str(obj.dtype).removeprefix("torch."), tuple(obj.shape))
        if isinstance(obj, np.ndarray) and obj.dtype != object:
            return _array, (obj.tobytes(), array_kind(obj.dtype.str).str, obj.shape)
        if isinstance(obj, np.generic):
            return _scalar, (obj.tobytes(), array_kind(obj.dtype.str).str)
        if isinstance(obj, torch.dtype):
            return _dtype, (str(obj).removeprefix("torch."),)
        return NotImplemented


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().resolve_conj().resolve_neg()


def dumps(value: Any) -> bytes:
    """Plain data (containers, numbers, text, tensors, numpy arrays, paths, time deltas) as bytes; else SwiftError.

    Tensors of a device are copied to the host; what is read back is on the CPU and requires no gradient.
    """
    return _dump(value, None)


def pieces(value: Any) -> list[Piece]:
    """As :func:`dumps`, in pieces. Large tensors on the CPU are not copied: write the pieces before they change."""
    apart: list[memoryview] = []
    main = _dump(value, lambda each: apart.append(each.raw()))
    if not apart:
        return [main]
    lengths = (len(main), *(each.nbytes for each in apart))
    table = _SEVERAL + b"".join(map(_LENGTH.pack, (len(lengths), *lengths)))
    return [table, main, *apart]


def _dump(value: Any, apart: Callable[[pickle.PickleBuffer], Any] | None) -> bytes:
    buffer = io.BytesIO()
    try:
        _Pickler(buffer, apart).dump(value)
    except Exception as error:
        raise SwiftError(
            f"cannot publish {type(value).__name__}: {error}. Register plain data and tensors only."
        ) from error
    return buffer.getvalue()


def loads(data: bytes | memoryview, *, cyclic: bool = False) -> Any:
    """Inverse of :func:`dumps`, and of :func:`pieces` joined. Nothing in the result shares memory with ``data``.

    ``cyclic``: containers may contain themselves. Who asks for this must not follow them for ever. Raises CorruptFile
    if the bytes are damaged or name anything but plain data.
    """
    try:
        main, *apart = _split(memoryview(data))
        return unpack(main, apart, len(data), cyclic=cyclic)
    except CorruptFile:
        raise
    except Exception as error:
        raise CorruptFile(f"damaged publication: {error}") from error


def _split(data: memoryview) -> Sequence[memoryview]:
    if data[:1] != _SEVERAL:
        return [data]
    at = 1 + _LENGTH.size
    (count,) = _LENGTH.unpack_from(data, 1)
    if count > len(data) // _LENGTH.size:
        raise CorruptFile("damaged publication: it ends too early")
    lengths = struct.unpack_from(f"<{count}Q", data, at)
    at += count * _LENGTH.size
    if at + sum(lengths) != len(data):
        raise CorruptFile("damaged publication: its pieces have other lengths")
    found = []
    for length in lengths:
        found.append(data[at : at + length])
        at += length
    return found

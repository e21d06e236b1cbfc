"""Plain data with tensors as bytes, and back, quickly and without executing what is read.

A restricted pickle: writing handles tensors and numpy arrays by their bytes; reading looks up nothing but the few
    constructors named here.
"""

from __future__ import annotations

import collections
import datetime
import io
import pathlib
import pickle
from typing import Any

import numpy as np
import torch

from shared_core.errors import CorruptFile, SwiftError


def _tensor(data: bytes, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    kind = _dtype(dtype)
    if not data:
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(kind).view(shape)


def _array(data: bytes, dtype: str, shape: tuple[int, ...]) -> Any:
    return np.frombuffer(bytearray(data), dtype=np.dtype(dtype)).reshape(shape)


def _scalar(data: bytes, dtype: str) -> Any:
    return np.frombuffer(data, dtype=np.dtype(dtype))[0]


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):  # what is returned here could be called by a forged pickle
        raise CorruptFile(f"refused to read torch.{name}: it is no dtype")
    return found


_ALLOWED: dict[tuple[str, str], Any] = {
    (__name__, "_tensor"): _tensor,
    (__name__, "_array"): _array,
    (__name__, "_scalar"): _scalar,
    (__name__, "_dtype"): _dtype,
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("collections", "defaultdict"): collections.defaultdict,
    ("collections", "deque"): collections.deque,
    ("collections", "Counter"): collections.Counter,
    ("datetime", "timedelta"): datetime.timedelta,
    ("datetime", "datetime"): datetime.datetime,
    ("pathlib", "PosixPath"): pathlib.PosixPath,
    ("torch", "Size"): torch.Size,
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
    ("builtins", "complex"): complex,
    ("builtins", "list"): list,
    ("builtins", "dict"): dict,
    ("builtins", "int"): int,
    ("builtins", "float"): float,
}


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):
            flat = obj.detach().cpu().contiguous()
            data = flat.reshape(-1).view(torch.uint8).numpy().tobytes() if flat.numel() else b""
            return _tensor, (data, str(obj.dtype).removeprefix("torch."), tuple(obj.shape))
        if isinstance(obj, np.ndarray) and obj.dtype != object:
            return _array, (obj.tobytes(), obj.dtype.str, obj.shape)
        if isinstance(obj, np.generic):
            return _scalar, (obj.tobytes(), obj.dtype.str)
        if isinstance(obj, torch.dtype):
            return _dtype, (str(obj).removeprefix("torch."),)
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ALLOWED[(module, name)]
        except KeyError:
            raise CorruptFile(f"refused to read {module}.{name}: only plain data and tensors are stored") from None


def dumps(value: Any) -> bytes:
    """Plain data (containers, numbers, text, tensors, numpy arrays, paths, time deltas) as bytes.

    Raises:
        SwiftError: if the value holds something else.
    """
    buffer = io.BytesIO()
    try:
        _Pickler(buffer, protocol=5).dump(value)
    except Exception as error:
        raise SwiftError(
            f"cannot publish {type(value).__name__}: {error}. Register plain data and tensors only."
        ) from error
    return buffer.getvalue()


def loads(data: bytes | memoryview) -> Any:
    """Inverse of :func:`dumps`.

    Raises:
        CorruptFile: if the bytes are damaged or name anything but plain data.
    """
    try:
        return _Unpickler(io.BytesIO(data)).load()
    except CorruptFile:
        raise
    except Exception as error:
        raise CorruptFile(f"damaged publication: {error}") from error

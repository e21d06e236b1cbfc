"""Bitwise digests of training state, to compare a run with failures with one without."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from shared_core.worker.sharded.own import is_distributed, local_part

_HEX_DIGITS = 16  # 64 bits


class _Hasher:
    """Feeds nested plain data into one hash; every value is preceded by its type, every container by its length."""

    def __init__(self) -> None:
        self.hash = hashlib.sha256()

    def tag(self, text: str) -> None:
        raw = text.encode()
        self.hash.update(struct.pack("<Q", len(raw)))
        self.hash.update(raw)

    def add(self, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            self._tensor(value)
        elif isinstance(value, np.ndarray):
            self.tag(f"array {value.dtype.str} {value.shape}")
            self.hash.update(np.ascontiguousarray(value).tobytes())
        elif isinstance(value, np.generic):
            self.tag(f"scalar {value.dtype.str}")
            self.hash.update(value.tobytes())
        elif isinstance(value, float):
            self.tag("float")
            self.hash.update(struct.pack("<d", value))
        elif value is None or isinstance(value, bool | int | complex | torch.dtype | torch.device | torch.Size):
            self.tag(f"{type(value).__name__} {value!r}")
        elif isinstance(value, str):
            self.tag("str")
            self.tag(value)
        elif isinstance(value, bytes | bytearray):
            self.tag(f"bytes {len(value)}")
            self.hash.update(value)
        elif isinstance(value, Mapping):
            self.tag(f"mapping {len(value)}")
            for key in value:
                self.add(key)
                self.add(value[key])
        elif isinstance(value, list | tuple):
            self.tag(f"sequence {len(value)}")
            for item in value:
                self.add(item)
        elif isinstance(value, set | frozenset):
            self.tag(f"set {len(value)}")
            for text in sorted(digest(item) for item in value):
                self.tag(text)
        else:
            raise TypeError(f"cannot digest a {type(value).__name__}; give tensors, arrays or plain data")

    def _tensor(self, tensor: Any) -> None:
        if is_distributed(tensor):  # its shape, and what this rank has of it
            self.tag(f"shard {tuple(tensor.shape)} {tensor.placements}")
            tensor = local_part(tensor)
        self.tag(f"tensor {tensor.dtype} {tuple(tensor.shape)}")
        flat = tensor.detach().to("cpu", copy=False).contiguous().reshape(-1)
        # Bytes, not values: NaN equals NaN only if its bits are the same, and -0.0 differs from 0.0.
        self.hash.update(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")


def digest(value: Any) -> str:
    """Hash of nested plain data, tensors and arrays, by their bits: type, shape and bytes.

    Args:
        value: tensors (of a ``DTensor`` the part that is here), NumPy arrays and scalars, ``None``, numbers, text,
            bytes, and mappings (order matters), lists, tuples (equal to lists) and sets of them.

    Returns:
        16 hexadecimal digits.

    Raises:
        TypeError: for anything else.
    """
    hasher = _Hasher()
    hasher.add(value)
    return hasher.hash.hexdigest()[:_HEX_DIGITS]


def optimizer_digest_data(optimizer: torch.optim.Optimizer) -> list[Any]:
    """State and hyper-parameters of an optimizer as plain data, parameters in the order of its groups."""
    data: list[Any] = []
    for group in optimizer.param_groups:
        data.append({key: value for key, value in sorted(group.items()) if key not in ("params", "param_names")})
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            data.append({key: state[key] for key in sorted(state)})
    return data


def training_digest(
    module: nn.Module | Sequence[nn.Module],
    optimizers: Iterable[torch.optim.Optimizer] = (),
    schedulers: Iterable[Any] = (),
    metrics: Mapping[str, Any] | None = None,
) -> dict[str, str]:
    """Hashes of the parts of a rank's training state.

    Args:
        module: one module or several.
        optimizers: their state, one hash a parameter in order, scalars and hyper-parameters included.
        schedulers: objects with ``state_dict()``.
        metrics: epoch metrics by name.

    Returns:
        ``parameters``, ``buffers``, ``optimizers``, ``schedulers``, ``metrics``, and ``all`` over them.

    Raises:
        TypeError: if state holds something other than tensors and plain data.
    """
    modules = [module] if isinstance(module, nn.Module) else list(module)
    parts = {
        "parameters": digest([list(m.named_parameters()) for m in modules]),
        "buffers": digest([list(m.named_buffers()) for m in modules]),
        "optimizers": digest([optimizer_digest_data(o) for o in optimizers]),
        "schedulers": digest([_plain(s.state_dict()) for s in schedulers]),
        "metrics": digest(sorted((metrics or {}).items())),
    }
    return parts | {"all": digest(parts)}


def _plain(state: Any) -> Any:
    """A scheduler's state without the callables some keep in it (a code object has no stable bits)."""
    if isinstance(state, Mapping):
        return {k: _plain(v) for k, v in state.items() if not callable(v)}
    if isinstance(state, list | tuple):
        return [_plain(v) for v in state if not callable(v)]
    return state

"""Whether two decoded values are the same, with all types and bits."""

from __future__ import annotations

import dataclasses
import hashlib
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch


def fingerprint(value: Any) -> str:
    """Equal for equal values; a container that is found again counts as its first place."""
    digest = hashlib.sha256()
    for part in _parts(value):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def _parts(value: Any) -> Iterator[bytes]:
    todo, seen, kept = [value], {}, []
    while todo:
        one = todo.pop()
        kept.append(one)  # alive, so that no other object gets its id
        yield type(one).__qualname__.encode()
        if isinstance(one, torch.Tensor):
            flat = one.detach().contiguous().reshape(-1)
            yield f"{one.dtype} {tuple(one.shape)}".encode()
            yield flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
        elif isinstance(one, np.ndarray | np.generic):
            yield f"{one.dtype.str} {one.shape}".encode() + one.tobytes()
        elif isinstance(one, bytes | bytearray):
            yield bytes(one)
        elif dataclasses.is_dataclass(one) and not isinstance(one, type):
            todo.extend(getattr(one, field.name) for field in dataclasses.fields(one) if field.compare)
        elif isinstance(one, set | frozenset):
            yield "".join(sorted(map(fingerprint, one))).encode()
        elif isinstance(one, Mapping | list | tuple | deque):
            yield f"{len(one)} {getattr(one, 'maxlen', '')} {getattr(one, 'default_factory', '')}".encode()
            if one and id(one) in seen:
                yield str(seen[id(one)]).encode()
                continue
            seen[id(one)] = len(seen)
            todo.extend([*one, *one.values()] if isinstance(one, Mapping) else one)
        else:
            yield repr(one).encode(errors="surrogatepass")

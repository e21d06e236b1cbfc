"""Snapshots of tensors: safetensors files, as bytes and as a file."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st

from shared_core.checkpoint.image import DTYPES, Image, load

from ..harness import Target, stable

_KINDS = [getattr(torch, name) for name, _ in DTYPES.values()]
tensors = st.builds(
    lambda shape, kind, byte: (
        torch.full((*shape[:-1], shape[-1] * kind.itemsize), byte, dtype=torch.uint8).view(kind)
        if shape and 0 not in shape
        else torch.zeros(shape, dtype=kind)
    ),
    st.lists(st.integers(0, 4), max_size=3),
    st.sampled_from([kind for kind in _KINDS if kind is not torch.bool]),
    st.integers(0, 255),
)
images = st.tuples(
    st.dictionaries(st.text(min_size=1, max_size=8), tensors, max_size=6),
    st.dictionaries(st.sampled_from(["names", "description", "x"]), st.text(max_size=12), max_size=2),
    st.booleans(),
)


def _write(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str], folder: Path) -> bytes:
    image = Image(folder / "image.safetensors", tensors, metadata)
    image.seal()
    return image.path.read_bytes()


def _encode(value: Any, folder: Path) -> bytes:
    tensors, metadata, shared = value
    if shared and tensors:
        tensors = {**tensors, "shared": next(iter(tensors.values()))}
    return _write(tensors, metadata, folder)


def _of_bytes(data: bytes, _folder: Path | None = None) -> Any:
    tensors, metadata = load(data)
    return dict(sorted(tensors.items())), metadata


def _of_file(data: bytes, folder: Path) -> Any:
    path = folder / "read.safetensors"
    path.write_bytes(data)
    tensors, metadata = load(path)
    return {name: one.clone() for name, one in sorted(tensors.items())}, metadata


def _again(value: Any) -> bytes:
    tensors, metadata = value
    rest = {name: text for name, text in metadata.items() if name != "shared"}
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        return _write(tensors, rest, Path(folder))


def _without_names(data: bytes) -> Any:
    """Of two names for one tensor the first may be stored: what they hold counts."""
    tensors, metadata = _of_bytes(data)
    return tensors, metadata


def _rule(value: Any, data: bytes, corpus: Any) -> str:
    tensors, metadata = value
    if not all(isinstance(text, str) for text in (*metadata, *metadata.values())):
        return f"metadata {metadata!r:.200} is no text"
    json.loads(metadata.get("shared", "{}"))
    apart = {name: one.clone() for name, one in tensors.items()}
    rest = {name: text for name, text in metadata.items() if name != "shared"}
    return stable(_again, _without_names)((apart, rest), data, corpus)


TARGETS = [
    Target("image.bytes", images, _encode, _of_bytes, _rule),
    Target("image.file", images, _encode, _of_file, _rule),
]

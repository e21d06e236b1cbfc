"""Lightning's own checkpoint files with a checksum, and DeepSpeed's configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st

from lightning_swift.checkpoint_io import SwiftCheckpointIO
from lightning_swift.pipeline import read_config

from ..harness import Target, exact, only_errors
from ..json_values import plain_json, text_keys

checkpoints = st.builds(
    lambda epoch, weight, more: {"epoch": epoch, "state_dict": {"w": torch.full((2, 3), weight)}, "more": more},
    st.integers(0, 9),
    st.floats(-9, 9, width=32),
    st.dictionaries(text_keys, plain_json, max_size=2),
)


def _save(value: Any, folder: Path) -> bytes:
    SwiftCheckpointIO().save_checkpoint(value, folder / "epoch.ckpt")
    return (folder / "epoch.ckpt").read_bytes()


def _load(data: bytes, folder: Path) -> Any:
    (folder / "read.ckpt").write_bytes(data)
    return SwiftCheckpointIO().load_checkpoint(folder / "read.ckpt", weights_only=True)


def _config(data: bytes, folder: Path) -> Any:
    (folder / "ds.json").write_bytes(data)
    return read_config(folder / "ds.json")


TARGETS = [
    Target("lightning.checkpoint", checkpoints, _save, _load, exact, count=10),
    Target(
        "lightning.deepspeed",
        st.dictionaries(text_keys, plain_json, max_size=3),
        lambda value, _: json.dumps(value).encode(),
        _config,
        only_errors,
    ),
]

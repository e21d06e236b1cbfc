"""Checkpoints that are either complete or absent, and the storage they lie on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shared_core.lazy import lazily

if TYPE_CHECKING:
    from shared_core.checkpoint.storage import CHUNK, TEMPORARY, LocalStorage, Storage, absolute, open_storage

__all__ = ["CHUNK", "TEMPORARY", "LocalStorage", "Storage", "absolute", "open_storage"]

__getattr__ = lazily(
    __name__,
    {"shared_core.checkpoint.storage": ("CHUNK", "TEMPORARY", "LocalStorage", "Storage", "absolute", "open_storage")},
)

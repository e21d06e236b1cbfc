"""Checkpoints that are either complete or absent, and the storage they lie on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shared_core.lazy import lazily

if TYPE_CHECKING:
    from shared_core.checkpoint.spool import Sealed, Spool, Status, Target
    from shared_core.checkpoint.storage import CHUNK, TEMPORARY, LocalStorage, Storage, absolute, open_storage
    from shared_core.checkpoint.store import Checkpoint, commit, committed, prune, read_part

__all__ = [
    "CHUNK",
    "Checkpoint",
    "LocalStorage",
    "Sealed",
    "Spool",
    "Status",
    "Storage",
    "TEMPORARY",
    "Target",
    "absolute",
    "commit",
    "committed",
    "open_storage",
    "prune",
    "read_part",
]

__getattr__ = lazily(
    __name__,
    {
        "shared_core.checkpoint.spool": ("Sealed", "Spool", "Status", "Target"),
        "shared_core.checkpoint.storage": (
            "CHUNK",
            "TEMPORARY",
            "LocalStorage",
            "Storage",
            "absolute",
            "open_storage",
        ),
        "shared_core.checkpoint.store": ("Checkpoint", "commit", "committed", "prune", "read_part"),
    },
)

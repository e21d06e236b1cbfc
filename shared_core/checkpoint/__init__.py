"""Checkpoints that are either complete or absent."""

from shared_core.checkpoint.spool import Sealed, Spool, Status, Target
from shared_core.checkpoint.store import Checkpoint, commit, committed, newest_valid, prune, read_part, write_part

__all__ = [
    "Checkpoint",
    "Sealed",
    "Spool",
    "Status",
    "Target",
    "commit",
    "committed",
    "newest_valid",
    "prune",
    "read_part",
    "write_part",
]

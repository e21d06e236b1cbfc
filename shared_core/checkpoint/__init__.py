"""Checkpoints that are either complete or absent."""

from shared_core.checkpoint.store import Checkpoint, commit, newest_valid, prune, read_part, write_part

__all__ = ["Checkpoint", "commit", "newest_valid", "prune", "read_part", "write_part"]

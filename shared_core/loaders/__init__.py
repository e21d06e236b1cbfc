"""Loaders that can be put back to where a failed worker was; knows ``torch.utils.data``, no framework."""

from shared_core.loaders.engine import Orders
from shared_core.loaders.position import Position
from shared_core.loaders.randomness import RandomParts, changed, read_random, seed_random, write_random
from shared_core.loaders.resumable import ResumableLoader, wrap_loader
from shared_core.loaders.shards import Shards
from shared_core.loaders.tracked import Loaders, TrackedLoader, restarting

__all__ = [
    "Loaders",
    "Orders",
    "Position",
    "RandomParts",
    "ResumableLoader",
    "Shards",
    "TrackedLoader",
    "changed",
    "read_random",
    "restarting",
    "seed_random",
    "wrap_loader",
    "write_random",
]

"""What adapters of frameworks use besides the public names of :mod:`shared_core`. No name for users."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shared_core.config import CHECKPOINT_OPTIONS
from shared_core.lazy import lazily

if TYPE_CHECKING:
    from shared_core.handover import (
        hand_over,
        launched_by_swiftrun,
        leave_torchrun,
        say_alone_once,
        started_alone,
        under_plain_torchrun,
        warn_plain_torchrun_once,
        warn_srun_once,
    )
    from shared_core.loaders import TrackedLoader
    from shared_core.loop import LoopProgress

__all__ = [
    "CHECKPOINT_OPTIONS",
    "LoopProgress",
    "TrackedLoader",
    "hand_over",
    "launched_by_swiftrun",
    "leave_torchrun",
    "say_alone_once",
    "started_alone",
    "under_plain_torchrun",
    "warn_plain_torchrun_once",
    "warn_srun_once",
]

__getattr__ = lazily(
    __name__,
    {
        "shared_core.handover": (
            "hand_over",
            "launched_by_swiftrun",
            "leave_torchrun",
            "say_alone_once",
            "started_alone",
            "under_plain_torchrun",
            "warn_plain_torchrun_once",
            "warn_srun_once",
        ),
        "shared_core.loaders": ("TrackedLoader",),
        "shared_core.loop": ("LoopProgress",),
    },
)

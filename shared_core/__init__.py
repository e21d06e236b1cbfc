"""Training that does not notice failures: the framework-agnostic core.

The public names are those in ``__all__``, in ``shared_core.errors`` and ``shared_core.events``, and in the ``__all__``
of the packages below; adapters use nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shared_core.config import CHECKPOINT_OPTIONS, SwiftConfig
from shared_core.lazy import lazily

if TYPE_CHECKING:
    from shared_core.checkpointer import Checkpointer
    from shared_core.handover import (
        hand_over,
        launched_by_swiftrun,
        say_alone_once,
        under_plain_torchrun,
        warn_plain_torchrun_once,
        warn_srun_once,
    )
    from shared_core.job import Job, current_job, install
    from shared_core.loaders import TrackedLoader
    from shared_core.loop import TrainingLoop, attach
    from shared_core.sharing import SharedStep

__all__ = [
    "CHECKPOINT_OPTIONS",
    "Checkpointer",
    "Job",
    "SharedStep",
    "SwiftConfig",
    "TrackedLoader",
    "TrainingLoop",
    "attach",
    "current_job",
    "hand_over",
    "install",
    "launched_by_swiftrun",
    "say_alone_once",
    "under_plain_torchrun",
    "warn_plain_torchrun_once",
    "warn_srun_once",
]

__getattr__ = lazily(
    __name__,
    {
        "shared_core.checkpointer": ("Checkpointer",),
        "shared_core.handover": (
            "hand_over",
            "launched_by_swiftrun",
            "say_alone_once",
            "under_plain_torchrun",
            "warn_plain_torchrun_once",
            "warn_srun_once",
        ),
        "shared_core.job": ("Job", "current_job", "install"),
        "shared_core.loaders": ("TrackedLoader",),
        "shared_core.loop": ("TrainingLoop", "attach"),
        "shared_core.sharing": ("SharedStep",),
    },
)

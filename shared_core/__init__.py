"""Training that does not notice failures: the framework-agnostic core.

The public names are those listed in ``__all__``, in ``shared_core.errors`` and ``shared_core.events``, and in the
``__all__`` of the packages below; adapters use nothing else, and of the latter mostly ``shared_core.adapters``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shared_core.config import SwiftConfig
from shared_core.lazy import lazily

if TYPE_CHECKING:
    from shared_core.checkpointer import Checkpointer
    from shared_core.job import Job, current_job, install
    from shared_core.loop import TrainingLoop, attach
    from shared_core.sharing import SharedStep

__all__ = [
    "Checkpointer",
    "Job",
    "SharedStep",
    "SwiftConfig",
    "TrainingLoop",
    "attach",
    "current_job",
    "install",
]

__getattr__ = lazily(
    __name__,
    {
        "shared_core.checkpointer": ("Checkpointer",),
        "shared_core.job": ("Job", "current_job", "install"),
        "shared_core.loop": ("TrainingLoop", "attach"),
        "shared_core.sharing": ("SharedStep",),
    },
)

"""Training that does not notice failures: the framework-agnostic core.

The public names are those listed in ``__all__``; adapters use nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shared_core.config import SwiftConfig

if TYPE_CHECKING:
    from shared_core.checkpointer import Checkpointer
    from shared_core.handover import hand_over, launched_by_swiftrun
    from shared_core.job import EntryDecision, Job, current_job, install
    from shared_core.loaders import TrackedLoader
    from shared_core.loop import TrainingLoop, attach
    from shared_core.sharing import SharedStep

__all__ = [
    "Checkpointer",
    "EntryDecision",
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
]

_HOMES = {
    "Checkpointer": "shared_core.checkpointer",
    "EntryDecision": "shared_core.job",
    "Job": "shared_core.job",
    "current_job": "shared_core.job",
    "install": "shared_core.job",
    "SharedStep": "shared_core.sharing",
    "TrackedLoader": "shared_core.loaders",
    "TrainingLoop": "shared_core.loop",
    "attach": "shared_core.loop",
    "hand_over": "shared_core.handover",
    "launched_by_swiftrun": "shared_core.handover",
}


def __getattr__(name: str) -> Any:
    """Import on first use: the launcher and ``swiftctl`` need no torch."""
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

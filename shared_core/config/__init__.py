"""Options of the suite: from code, a YAML or JSON file, or ``SWIFT_RECOVERY_*`` in the environment."""

from shared_core.config.config import (
    CHECKPOINT_OPTIONS,
    ENV_PREFIX,
    SCRIPT_OPTIONS,
    SECTIONS,
    SwiftConfig,
    full_names,
    variable_of,
)
from shared_core.config.sections import (
    CheckpointOptions,
    DetectionOptions,
    LogOptions,
    ReplayOptions,
    RerouteOptions,
    ResizeOptions,
    StandbyOptions,
    StateOptions,
    ranges_of,
)

__all__ = [
    "CHECKPOINT_OPTIONS",
    "ENV_PREFIX",
    "SCRIPT_OPTIONS",
    "SECTIONS",
    "CheckpointOptions",
    "DetectionOptions",
    "LogOptions",
    "ReplayOptions",
    "RerouteOptions",
    "ResizeOptions",
    "StandbyOptions",
    "StateOptions",
    "SwiftConfig",
    "full_names",
    "ranges_of",
    "variable_of",
]

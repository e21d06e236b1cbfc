"""Pipelines: DeepSpeed's engine with stages that survive (``initialize``, ``SwiftPipelineEngine``), and which messages
are logged (``grouping``, pure functions of plain data).

DeepSpeed is imported on first use: ``swiftctl`` plans where neither torch nor DeepSpeed is installed.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shared_core.pipeline.engine import SwiftPipelineEngine, engines, initialize, install

__all__ = ["SwiftPipelineEngine", "engines", "import_deepspeed", "initialize", "install"]


def import_deepspeed() -> Any:
    """The module ``deepspeed``, set up as recovery needs it. Call it before the process group is created.

    DeepSpeed trains on the CPU, also where there is a GPU, and leaves out its all-reduce through shared memory, which
    training does not use: that is compiled at start-up under a lock that a killed worker leaves behind, for which all
    later ones on the machine would wait for ever.

    Raises:
        ConfigError: if DeepSpeed was imported already and has chosen another device.
        MissingExtra: if it is not installed.
    """
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        import deepspeed
        from deepspeed.accelerator import get_accelerator
    except ImportError as error:
        from shared_core.errors import MissingExtra

        raise MissingExtra("pipelines need DeepSpeed: pip install 'swift-recovery[deepspeed]'") from error
    chosen = get_accelerator().device_name()
    if chosen != "cpu":
        from shared_core.errors import ConfigError

        raise ConfigError(
            f"DeepSpeed has chosen {chosen!r} when it was imported, and this version trains on CPUs only: set "
            "DS_ACCELERATOR=cpu in the environment, or import DeepSpeed later"
        )
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    import_deepspeed()
    return getattr(importlib.import_module("shared_core.pipeline.engine"), name)

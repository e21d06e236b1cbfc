"""Pipelines: DeepSpeed's engine with stages that survive (``initialize``, ``SwiftPipelineEngine``), and which messages
are logged (``grouping``, pure functions of plain data).

DeepSpeed is imported on first use: ``swiftctl`` plans where neither torch nor DeepSpeed is installed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shared_core.pipeline.deepspeed_import import import_deepspeed

if TYPE_CHECKING:
    from shared_core.pipeline.engine import SwiftPipelineEngine, engines, initialize, install

__all__ = ["SwiftPipelineEngine", "engines", "import_deepspeed", "initialize", "install"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    import_deepspeed()
    return getattr(importlib.import_module("shared_core.pipeline.engine"), name)

"""Pipelines: DeepSpeed's engine with stages that survive (``initialize``, ``SwiftPipelineEngine``), and which messages
are logged (``grouping``, pure functions of plain data).

DeepSpeed is imported on first use: ``swiftctl`` plans where neither torch nor DeepSpeed is installed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shared_core.pipeline.engine import SwiftPipelineEngine, initialize, install

__all__ = ["SwiftPipelineEngine", "initialize", "install"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    try:
        import deepspeed  # noqa: F401
    except ImportError as error:
        from shared_core.errors import MissingExtra

        raise MissingExtra("pipelines need DeepSpeed: pip install 'swift-recovery[deepspeed]'") from error
    return getattr(importlib.import_module("shared_core.pipeline.engine"), name)

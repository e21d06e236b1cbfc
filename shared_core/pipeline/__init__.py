"""DeepSpeed: a pipeline engine whose stages survive failures, one with ZeRO, and the plans of which messages
are logged.

DeepSpeed is imported on first use: ``swiftctl`` plans where neither torch nor DeepSpeed is installed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shared_core.lazy import lazily
from shared_core.pipeline.compat import engines, import_deepspeed

if TYPE_CHECKING:
    from shared_core.pipeline.engine import SwiftPipelineEngine, initialize, install
    from shared_core.pipeline.sharded import Shard, is_sharded
    from shared_core.pipeline.shared_data import SharedData
    from shared_core.pipeline.zero import SwiftZeroEngine

__all__ = [
    "Shard",
    "SharedData",
    "SwiftPipelineEngine",
    "SwiftZeroEngine",
    "engines",
    "import_deepspeed",
    "initialize",
    "install",
    "is_sharded",
]

_find = lazily(
    __name__,
    {
        "shared_core.pipeline.engine": ("SwiftPipelineEngine", "initialize", "install"),
        "shared_core.pipeline.sharded": ("Shard", "is_sharded"),
        "shared_core.pipeline.shared_data": ("SharedData",),
        "shared_core.pipeline.zero": ("SwiftZeroEngine",),
    },
)


def __getattr__(name: str) -> Any:
    if name in __all__:
        import_deepspeed()
    return _find(name)

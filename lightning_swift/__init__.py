"""PyTorch Lightning runs that survive the failure of workers.

Examples:
    >>> import lightning.pytorch as pl
    >>> import lightning_swift
    >>> trainer = pl.Trainer(strategy="swift_ddp", accelerator="cpu", devices=4)  # doctest: +SKIP
"""

from __future__ import annotations

try:
    import lightning.pytorch as _lightning  # noqa: F401
except ImportError as error:
    from shared_core.errors import MissingExtra

    raise MissingExtra("lightning_swift needs PyTorch Lightning: pip install 'swift-recovery[lightning]'") from error

from lightning_swift.callback import SwiftCallback
from lightning_swift.checkpoint import SwiftCheckpoint
from lightning_swift.checkpoint_io import SwiftCheckpointIO
from lightning_swift.fabric import FabricLoop, SwiftFabricFSDPStrategy, SwiftFabricStrategy, attach, register_fabric
from lightning_swift.pipeline import SwiftPipelineStrategy
from lightning_swift.sharded import SwiftFSDPStrategy
from lightning_swift.strategy import SWIFT_NAMES, SwiftDDPStrategy, register, register_one
from lightning_swift.support import refuse_pytorch_lightning

register(SWIFT_NAMES)
register_one(SwiftPipelineStrategy, "a DeepSpeed pipeline that survives the failure of workers")
register_one(SwiftFSDPStrategy, "FSDP2 and HSDP that survive the failure of workers")
register_fabric()
refuse_pytorch_lightning()

__all__ = [
    "FabricLoop",
    "SwiftCallback",
    "SwiftCheckpoint",
    "SwiftCheckpointIO",
    "SwiftDDPStrategy",
    "SwiftFSDPStrategy",
    "SwiftFabricFSDPStrategy",
    "SwiftFabricStrategy",
    "SwiftPipelineStrategy",
    "attach",
]

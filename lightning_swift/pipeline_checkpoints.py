"""Checkpoints of a pipeline under Lightning: a folder with one file a stage."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from lightning_swift.pipeline_parts import StageFiles
from lightning_swift.strategy import SwiftDDPStrategy
from shared_core.errors import ConfigError
from shared_core.faults import point

if TYPE_CHECKING:
    from shared_core.pipeline import Shard, SwiftPipelineEngine


class StageCheckpoints(SwiftDDPStrategy):
    """How :class:`~lightning_swift.pipeline.SwiftPipelineStrategy` saves and loads; and the places of its ranks."""

    stages: int
    _engine: SwiftPipelineEngine | None
    #: This rank's part of the optimizer, in bf16 and with ZeRO; else None.
    _shard: Shard | None

    @property
    def pipelines(self) -> int:
        """Data-parallel degree."""
        return self.world_size // self.stages

    @property
    def data_index(self) -> int:
        return self.global_rank % self.pipelines

    @property
    def stage(self) -> int:
        return self.global_rank // self.pipelines

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """There are no layers to load before."""
        return True

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """In bf16 and with ZeRO that of this rank alone, with the fp32 weights."""
        return super().optimizer_state(optimizer) if self._shard is None else self._shard.capture()

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if self._shard is None:
            super().load_optimizer_state_dict(checkpoint)
            return
        for state in checkpoint["optimizer_states"]:
            if "masters" not in state:
                raise ConfigError(
                    "the optimizer in the checkpoint is that of a pipeline without ZeRO, in 32-bit: train on with the "
                    "same precision and zero_optimization"
                )
            self._shard.restore(state)
        if self._engine is not None:
            self._engine.optimizer_loaded()

    def _files(self, filepath: str | Path) -> StageFiles:
        shards = 0 if self._shard is None else self.pipelines
        return StageFiles(str(filepath), self.checkpoint_io, self.stage, self.stages, self.data_index, shards)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Write a folder: one file a stage, one a rank for sharded optimizers, one of all. A collective."""
        point("checkpoint.write")
        files = self._files(self.broadcast(filepath))
        files.write_parts(checkpoint, storage_options)
        self.barrier()
        if self.is_global_zero:
            files.commit(checkpoint, storage_options)
        self.barrier()
        files.drop_older(checkpoint["global_step"])

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        return self._files(checkpoint_path).read(weights_only)

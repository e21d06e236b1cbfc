"""``strategy="swift_fsdp"``: Lightning's ``ModelParallelStrategy``, for models that ``configure_model`` shards."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch.distributed.constants import default_pg_timeout

from lightning_swift import compat
from lightning_swift.launching import LaunchingStrategy, given_options
from shared_core.errors import ConfigError, Unsupported


class SwiftFSDPStrategy(LaunchingStrategy, ModelParallelStrategy):
    """``ModelParallelStrategy`` that keeps a run going through the failure of workers, bit for bit.

    The module's ``configure_model`` calls ``fully_shard`` of ``torch.distributed.fsdp`` with
    ``self.device_mesh["data_parallel"]``, which is all workers. Lightning calls it before each fit, validate, test and
    predict, so it must leave alone what is sharded already. For HSDP give a mesh of two dimensions, made there.

    Args:
        standbys: processes kept ready to replace a failed worker, when this strategy starts ``swiftrun`` itself.
        data: ``restore``, ``refetch`` or ``seeded``; see :class:`shared_core.SwiftConfig`.
        seed: seed of ``data="seeded"``.
        options: further options of :class:`shared_core.SwiftConfig`, by name.

    All others are as in ``ModelParallelStrategy``.

    Raises:
        ConfigError: for an unknown option or a bad value.

    Example::

        trainer = Trainer(accelerator="cpu", devices=1, strategy=lightning_swift.SwiftFSDPStrategy())
    """

    strategy_name = "swift_fsdp"
    stock = ModelParallelStrategy
    averages = False
    builds_late = True

    def __init__(
        self,
        save_distributed_checkpoint: bool = True,
        standbys: int = 1,
        data: Literal["restore", "refetch", "seeded"] = "restore",
        seed: int = 0,
        options: dict[str, Any] | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
    ) -> None:
        super().__init__(
            tensor_parallel_size=1,
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        self._take_over(standbys, given_options({"data": data, "seed": seed}, options))

    def _take_over(self, standbys: int, options: dict[str, Any]) -> None:
        size = compat.tensor_parallel_size(self)
        if size != 1:
            raise Unsupported(
                f"ModelParallelStrategy(tensor_parallel_size={size!r}) cannot be recovered, because tensor parallelism "
                "cannot: use strategy='swift_fsdp', or ModelParallelStrategy(tensor_parallel_size=1)"
            )
        super()._take_over(standbys, options)

    def setup_environment(self) -> None:
        compat.set_data_parallel_size(self, self.world_size)
        super().setup_environment()

    def setup(self, trainer: pl.Trainer) -> None:
        """As in ``ModelParallelStrategy``.

        Raises:
            ConfigError: nothing is sharded, so that each worker would train a model of its own.
        """
        super().setup(trainer)
        if self.job is not None and self.job.trained.shard is None:
            raise ConfigError(
                f"{type(self.lightning_module).__name__}.configure_model() has sharded nothing: call in it "
                "fully_shard(layer, mesh=self.device_mesh['data_parallel']) of torch.distributed.fsdp, or choose "
                "strategy='swift_ddp'"
            )

    # -- between two entry calls --------------------------------------------------------------------------------------

    def at_end(self) -> dict[str, Any]:
        assert self.job is not None and self.job.trained.shard is not None and self.lightning_module is not None
        return {"shard": self.job.trained.shard.capture(), "buffers": dict(self.lightning_module.named_buffers())}

    def put_back(self, ended: Mapping[str, Any]) -> None:
        assert self.job is not None and self.job.trained.shard is not None and self.lightning_module is not None
        self.job.trained.shard.restore(ended["shard"])
        for name, buffer in self.lightning_module.named_buffers():
            if name in ended["buffers"]:
                buffer.data.copy_(ended["buffers"][name])

    def after_skip(self, trainer: pl.Trainer, ended: Mapping[str, Any] | None) -> None:
        """What is sharded is attached as it was in the call, and put back."""
        if ended is not None:
            assert self.lightning_module is not None
            self.attach([self.lightning_module], self.optimizers if trainer.state.fn == TrainerFn.FITTING else [])
            self.put_back(ended)

    # -- Lightning's own checkpoints ----------------------------------------------------------------------------------

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """As in ``ModelParallelStrategy``; but a replacement that has not joined leaves it out.

        The others take no part any more, and the failed worker has taken it.
        """
        if self.joining:
            return
        with nullcontext() if self.job is None else self.job.runtime.unchecked():  # each save has a random number
            super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """As in ``ModelParallelStrategy``; but a replacement that has not joined reads no weights.

        The others take no part any more, and it gets the failed worker's shard.
        """
        if not self.joining:
            return super().load_checkpoint(checkpoint_path, weights_only)
        path = Path(self.broadcast(checkpoint_path))
        file = path / compat.METADATA_FILE if path.is_dir() else path
        found: dict[str, Any] = torch.load(file, mmap=True, map_location="cpu", weights_only=weights_only)
        return found

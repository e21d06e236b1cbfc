"""Fabric's strategies whose workers may fail: ``Fabric(strategy="swift_ddp")``, and FSDP2.

The loop is in :mod:`lightning_swift.fabric_loop`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.fabric.strategies.ddp import DDPStrategy
from lightning.fabric.strategies.model_parallel import ModelParallelStrategy
from lightning.fabric.strategies.parallel import ParallelStrategy
from torch import nn
from torch.distributed.constants import default_pg_timeout

from lightning_swift import compat
from lightning_swift.banner import leave_out
from lightning_swift.launching import workers_here
from lightning_swift.support import check_ddp_options
from shared_core import Job, SwiftConfig, install
from shared_core.adapters import (
    hand_over,
    launched_by_swiftrun,
    under_plain_torchrun,
    warn_plain_torchrun_once,
    warn_srun_once,
)
from shared_core.checkpoint import absolute
from shared_core.config import full_names
from shared_core.devices import check as check_device
from shared_core.errors import ConfigError, Unsupported
from shared_core.trackers import prepare

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_OF_THE_STRATEGY = frozenset(inspect.signature(DDPStrategy.__init__).parameters)


class _Surviving(ParallelStrategy):
    """What these strategies add to a strategy of Fabric, which comes after this class in theirs."""

    job: Job | None = None

    def _take_over(self, standbys: int, options: dict[str, Any] | None) -> None:
        self._standbys, self._options = standbys, full_names(options or {})
        for name in ("checkpoint.dir", "checkpoint.resume_from"):
            if self._options.get(name) is not None:
                self._options[name] = absolute(self._options[name])
        self._config = SwiftConfig.from_env(base=SwiftConfig.from_dict(self._options))
        self.job = install() if launched_by_swiftrun() else None
        leave_out(self.job)
        if self.job is not None:
            prepare()
            compat.note_fabric_loaders()
            self.job.options.check_told(self._options)
            self.job.options.use_checkpoints(self._options)

    def _configure_launcher(self) -> None:
        # Called once the number of devices is known, and before there is a process group.
        super()._configure_launcher()
        assert self.cluster_environment is not None
        if self.job is not None:
            return
        if self.num_processes > 1 and not self.cluster_environment.creates_processes_externally:
            self._check_device()
            hand_over(self.num_processes, self._standbys, self._options)
        if under_plain_torchrun():
            warn_plain_torchrun_once()
        warn_srun_once()

    def setup_environment(self) -> None:
        if self.job is not None:
            self._check_device()
        super().setup_environment()

    def _check_device(self) -> None:
        check_device(self.root_device, "the model", allowed=self._config.uses_devices)

    @property
    def num_processes(self) -> int:
        return workers_here(self.job, super().num_processes)  # type: ignore[misc]

    def backward(self, tensor: torch.Tensor, module: Any, *args: Any, **kwargs: Any) -> None:
        """As in the stock strategy; a policy of checkpoints hears the loss, which is not read here."""
        super().backward(tensor, module, *args, **kwargs)
        if self.job is not None:
            self.job.note_loss(tensor)


class SwiftFabricStrategy(_Surviving, DDPStrategy):
    """Fabric's ``DDPStrategy`` in which a run continues through the failure of workers, bit for bit.

    The script's loop must say where epochs and batches begin, see :func:`lightning_swift.attach`. With ``python
    train.py`` and several devices the script is started again under ``swiftrun``.

    Args:
        standbys: processes kept ready to replace a failed worker, where this strategy starts ``swiftrun`` itself.
        options: options of :class:`shared_core.SwiftConfig`, by name.
        kwargs: as ``DDPStrategy``, and options of ``DistributedDataParallel``.

    Raises:
        Unsupported: for start methods that spawn or fork.
        ConfigError: for an unknown option or a bad value.

    Example::

        fabric = Fabric(accelerator="cpu", devices=1, strategy=lightning_swift.SwiftFabricStrategy())
    """

    def __init__(self, standbys: int = 1, options: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if kwargs.get("start_method", "popen") != "popen":
            raise Unsupported(
                f"swift recovery starts workers with swiftrun, not with start_method={kwargs['start_method']!r}: "
                "leave it out"
            )
        check_ddp_options(None, None, None, None, {k: v for k, v in kwargs.items() if k not in _OF_THE_STRATEGY})
        super().__init__(**kwargs)
        self._take_over(standbys, options)


class SwiftFabricFSDPStrategy(_Surviving, ModelParallelStrategy):
    """Fabric's ``ModelParallelStrategy`` in which a run with FSDP2 or HSDP survives the failure of workers, bit
    for bit.

    Data, and the model with them, are divided over all workers.

    Args:
        parallelize_fn: given a module and the device mesh, calls ``fully_shard`` with ``mesh["data_parallel"]``, or
            with a mesh of two dimensions (HSDP), and returns the module.
        save_distributed_checkpoint: as in ``ModelParallelStrategy``.
        standbys: as in :class:`SwiftFabricStrategy`.
        options: see there.
        process_group_backend: as in ``ModelParallelStrategy``.
        timeout: see there.

    Raises:
        ConfigError: for an unknown option or a bad value.

    Example::

        def shard(module, mesh):
            return fully_shard(module, mesh=mesh["data_parallel"])

        strategy = lightning_swift.SwiftFabricFSDPStrategy(shard)
        fabric = Fabric(accelerator="cpu", devices=1, strategy=strategy)
    """

    def __init__(
        self,
        parallelize_fn: Callable[[Any, DeviceMesh], Any],
        save_distributed_checkpoint: bool = True,
        standbys: int = 1,
        options: dict[str, Any] | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
    ) -> None:
        super().__init__(
            parallelize_fn,
            tensor_parallel_size=1,
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        self._take_over(standbys, options)

    def setup_environment(self) -> None:
        compat.set_data_parallel_size(self, self.num_nodes * self.num_processes)
        super().setup_environment()

    def setup_module(self, module: nn.Module) -> nn.Module:
        """As in ``ModelParallelStrategy``.

        Raises:
            ConfigError: nothing is sharded, so that each worker would train a model of its own.
        """
        from torch.distributed.fsdp import FSDPModule  # imported by whoever shards

        made = super().setup_module(module)
        if self.job is not None and not any(isinstance(each, FSDPModule) for each in made.modules()):
            raise ConfigError(
                "parallelize_fn has sharded nothing: call in it fully_shard(layer, mesh=mesh['data_parallel']) of "
                "torch.distributed.fsdp, or choose strategy='swift_ddp'"
            )
        return made

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        with nullcontext() if self.job is None else self.job.runtime.unchecked():  # each save has a random number
            super().save_checkpoint(*args, **kwargs)


def register_fabric() -> None:
    """Register the strategy under the names that the Trainer's has, but for what Fabric has no name for."""
    for name, options in (
        ("swift_ddp", {}),
        ("swift_ddp_find_unused_parameters_true", {"find_unused_parameters": True}),
    ):
        if name not in STRATEGY_REGISTRY:
            STRATEGY_REGISTRY.register(
                name, SwiftFabricStrategy, description="DDP that survives the failure of workers", **options
            )

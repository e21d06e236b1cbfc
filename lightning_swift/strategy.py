"""``strategy="swift_ddp"``: Lightning's DDP whose workers may fail."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Literal

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from torch.distributed.constants import default_pg_timeout

from lightning_swift import compat
from lightning_swift.launching import LaunchingStrategy, given_options
from lightning_swift.sharing import Sharing
from lightning_swift.support import check_ddp_options, refuse_strategy
from shared_core.devices import has_streams_of_cuda


class SwiftDDPStrategy(LaunchingStrategy, DDPStrategy):
    """``DDPStrategy`` that keeps a run going through the failure of workers, bit for bit.

    With ``python train.py`` and several devices it starts the script again under ``swiftrun``. Under plain
    ``torchrun`` it trains as ``DDPStrategy`` and says that survivors cannot be kept alive.

    Args:
        standbys: processes kept ready to replace a failed worker, when this strategy starts ``swiftrun`` itself.
        on_failure: ``replace`` a failed worker, ``reroute``: have the others compute its batches too until a
            replacement is there, ``shrink``: continue with fewer, or ``restart`` all from the newest checkpoint.
        data: ``restore``, ``refetch`` or ``seeded``; see :class:`shared_core.SwiftConfig`.
        checkpoint_dir: where checkpoints for ``restart`` are written.
        checkpoint_every_steps: step boundaries between two of them; 0 writes none.
        seed: seed of ``data="seeded"``.
        options: further options of :class:`shared_core.SwiftConfig`, by name.
        start_method: only ``popen``.
        kwargs: options of ``DistributedDataParallel``.

    All others are as in ``DDPStrategy``, but communication hooks and model averaging are refused.

    Raises:
        Unsupported: for communication hooks, model averaging, and start methods that spawn or fork.
        ConfigError: for an unknown option or a bad value.

    Example::

        strategy = lightning_swift.SwiftDDPStrategy(on_failure="replace")
        trainer = Trainer(accelerator="cpu", devices=1, strategy=strategy)
    """

    strategy_name = "swift_ddp"
    stock = DDPStrategy

    def __init__(
        self,
        standbys: int = 1,
        on_failure: Literal["replace", "reroute", "shrink", "restart"] = "replace",
        data: Literal["restore", "refetch", "seeded"] = "restore",
        checkpoint_dir: str | None = None,
        checkpoint_every_steps: int = 0,
        seed: int = 0,
        options: dict[str, Any] | None = None,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        ddp_comm_state: object | None = None,
        ddp_comm_hook: Callable[..., Any] | None = None,
        ddp_comm_wrapper: Callable[..., Any] | None = None,
        model_averaging_period: int | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        **kwargs: Any,
    ) -> None:
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            ddp_comm_state=ddp_comm_state,
            ddp_comm_hook=ddp_comm_hook,
            ddp_comm_wrapper=ddp_comm_wrapper,
            model_averaging_period=model_averaging_period,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
            **kwargs,
        )
        given: dict[str, Any] = {
            "on_failure": on_failure,
            "data": data,
            "checkpoint.dir": checkpoint_dir,
            "checkpoint.every_steps": checkpoint_every_steps,
            "seed": seed,
        }
        self._take_over(standbys, given_options(given, options))

    def _take_over(self, standbys: int, options: dict[str, Any]) -> None:
        check_ddp_options(*compat.ddp_options(self))
        if compat.start_method(self) != "popen":
            raise refuse_strategy(self)
        super()._take_over(standbys, options)

    # -- set-up -------------------------------------------------------------------------------------------------------

    def determine_ddp_device_ids(self) -> list[int] | None:
        """None, as for the CPU, also for devices that Lightning does not know: it would make a stream of CUDA."""
        return super().determine_ddp_device_ids() if has_streams_of_cuda(self.root_device) else None

    def configure_ddp(self) -> None:
        """Where survivors compute a failed worker's share, :class:`Sharing` sums gradients, not DDP."""
        if not self.reroutes:
            super().configure_ddp()
            return
        assert self.job is not None and self.lightning_module is not None
        number = 0 if self.sharing is None else self.sharing.number
        if self.sharing is None:
            self.job.survivor_groups.at_end(self._settle)
        self.job.trained.alike()
        self.sharing = Sharing(
            self.job, self.lightning_module.trainer, self.run_state.untouched, self.config.seed, number
        )

    def _settle(self) -> None:
        assert self.sharing is not None
        self.sharing.settle()


def register_one(kind: type[Any], description: str) -> None:
    """Register a strategy under its own name."""
    if kind.strategy_name not in StrategyRegistry:
        StrategyRegistry.register(kind.strategy_name, kind, description=description)


def register(names: tuple[str, ...] = ("swift_ddp",), *, override: bool = False) -> None:
    """Register the strategy under ``names``, with the options that each of Lightning's own names implies."""
    for name in names:
        options = {}
        if name.endswith("_find_unused_parameters_true"):
            options["find_unused_parameters"] = True
        elif name.endswith("_find_unused_parameters_false"):
            options["find_unused_parameters"] = False
        if override or name not in StrategyRegistry:
            StrategyRegistry.register(
                name, SwiftDDPStrategy, description="DDP that survives the failure of workers", override=True, **options
            )


#: Names of ``DDPStrategy`` that :class:`~lightning_swift.SwiftCallback` takes over.
DDP_NAMES = ("ddp", "ddp_find_unused_parameters_false", "ddp_find_unused_parameters_true")
SWIFT_NAMES = ("swift_ddp", "swift_ddp_find_unused_parameters_false", "swift_ddp_find_unused_parameters_true")

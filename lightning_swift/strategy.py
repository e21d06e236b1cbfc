"""``strategy="swift_ddp"``: Lightning's DDP whose workers may be lost."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Literal

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.distributed.constants import default_pg_timeout

from lightning_swift import compat
from lightning_swift.checkpoint import SwiftCheckpoint
from lightning_swift.launcher import SwiftLauncher
from lightning_swift.recovering import RecoveringStrategy
from lightning_swift.support import check_ddp_options, check_device, refuse_strategy
from shared_core import (
    Job,
    SwiftConfig,
    hand_over,
    install,
    launched_by_swiftrun,
    under_plain_torchrun,
    warn_plain_torchrun_once,
)
from shared_core.config import full_names
from shared_core.trackers import prepare

_DEFAULTS = dict(SwiftConfig().items())


class SwiftDDPStrategy(RecoveringStrategy):
    """``DDPStrategy`` that keeps a run going through the loss of workers, bit for bit.

    With ``python train.py`` and several devices it starts the script again under ``swiftrun``. Under plain
    ``torchrun`` it trains as ``DDPStrategy`` and says that survivors cannot be kept alive.

    Args:
        standbys: processes kept ready to replace a lost worker, when this strategy starts ``swiftrun`` itself.
        on_failure: ``replace`` a lost worker, ``reroute``: have the others compute its batches too until a newcomer is
            there, ``shrink``: go on with fewer, or ``restart`` all from the newest checkpoint.
        data: ``restore``, ``refetch`` or ``seeded``; see :class:`shared_core.SwiftConfig`.
        checkpoint_dir: where checkpoints for ``restart`` are written.
        checkpoint_every_steps: batch tops between two of them; 0 writes none.
        seed: seed of ``data="seeded"``.
        options: further options of :class:`shared_core.SwiftConfig`, by name.
        accelerator: this and all that follow as in ``DDPStrategy``.
        parallel_devices: see there.
        cluster_environment: see there.
        checkpoint_io: see there.
        precision_plugin: see there.
        ddp_comm_state: see there; refused.
        ddp_comm_hook: see there; refused.
        ddp_comm_wrapper: see there; refused.
        model_averaging_period: see there; refused.
        process_group_backend: see there.
        timeout: see there.
        start_method: see there; only ``popen``.
        kwargs: options of ``DistributedDataParallel``.

    Raises:
        Unsupported: for ``static_graph``, communication hooks, model averaging, and start methods that spawn or fork.
        ConfigError: for an unknown option or a bad value.
    """

    strategy_name = "swift_ddp"

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
        changed = {name: value for name, value in given.items() if value != _DEFAULTS[name]}
        self._take_over(standbys, changed | full_names(options or {}))

    @classmethod
    def adopt(cls, strategy: DDPStrategy) -> SwiftDDPStrategy:
        """Turn an existing ``DDPStrategy`` object into this class, in place: Lightning already refers to it.

        Raises:
            Unsupported: if it is a subclass with behaviour of its own, or has options that are refused.
        """
        if isinstance(strategy, cls):
            return strategy
        if type(strategy) is not DDPStrategy:
            raise refuse_strategy(strategy)
        strategy.__class__ = cls
        adopted: Any = strategy
        adopted._take_over(standbys=1, options={})
        found: SwiftDDPStrategy = adopted
        return found

    def _take_over(self, standbys: int, options: dict[str, Any]) -> None:
        check_ddp_options(*compat.ddp_options(self))
        if compat.start_method(self) != "popen":
            raise refuse_strategy(self)
        self._standbys = standbys
        self._options = options
        #: The trainer has a callback that makes checkpoints.
        self._saves = False
        #: Options of the run: the environment (and what swiftrun was given) over the constructor's.
        self.config = SwiftConfig.from_env(base=SwiftConfig.from_dict(options))
        self._begin(install() if launched_by_swiftrun() else None)
        if self.job is not None:
            prepare()
            self.job.options.check_told(options)

    # -- launch -------------------------------------------------------------------------------------------------------

    def _configure_launcher(self) -> None:
        # The latest moment of the Trainer's construction where the number of devices is known; no process group exists
        # yet.
        self.find_checkpoints()
        if self.job is not None:
            self._launcher = SwiftLauncher(self)
            return
        warn_plain_torchrun_once()
        super()._configure_launcher()
        if self.hands_over:
            self.hand_over()
        elif self.num_processes > 1 and not under_plain_torchrun():
            rank_zero_warn(
                f"the workers were started through {type(self.cluster_environment).__name__}, which cannot replace one "
                "that is lost: survivors cannot be kept alive. Start the script with swiftrun"
            )

    def find_checkpoints(self) -> None:
        """In the constructor of a Trainer: take the options of its :class:`~lightning_swift.SwiftCheckpoint`.

        Raises:
            ConfigError: where they contradict what was said elsewhere.
        """
        said = SwiftConfig.from_env().changed
        for callback in compat.callbacks_under_construction():
            if isinstance(callback, SwiftCheckpoint):
                self._options = callback.merged(self._options, said)
                self._saves = True
        self.config = SwiftConfig.from_env(base=SwiftConfig.from_dict(self._options))
        if self.job is not None:
            self.job.options.use_checkpoints(self._options)

    @property
    def hands_over(self) -> bool:
        """Whether nobody has started workers yet, so that ``swiftrun`` must: several, or one with checkpoints."""
        assert self.cluster_environment is not None
        external = self.cluster_environment.creates_processes_externally
        needed = self.num_processes > 1 or self._saves
        return self.job is None and needed and not external and not under_plain_torchrun()

    def hand_over(self) -> None:
        """Become ``swiftrun`` with the running script. Does not return.

        Raises:
            SwiftError: in a notebook, or where a process group exists already.
        """
        check_device((self.parallel_devices or [torch.device("cpu")])[0])
        hand_over(self.num_processes, self._standbys, self._options)

    # -- set-up -------------------------------------------------------------------------------------------------------

    def setup_environment(self) -> None:
        if self.job is not None:
            check_device(self.root_device)
        super().setup_environment()

    @property
    def num_processes(self) -> int:
        """See :func:`workers_here`."""
        return workers_here(getattr(self, "job", None), super().num_processes)


def workers_here(job: Job | None, devices: int) -> int:
    """Workers of this machine, which may be fewer than the devices that were asked for."""
    started = os.environ.get("LOCAL_WORLD_SIZE") if job is not None else None
    return devices if started is None else int(started)


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
                name, SwiftDDPStrategy, description="DDP that survives the loss of workers", override=True, **options
            )


#: Names of ``DDPStrategy`` that :class:`~lightning_swift.SwiftCallback` takes over.
DDP_NAMES = ("ddp", "ddp_find_unused_parameters_false", "ddp_find_unused_parameters_true")
SWIFT_NAMES = ("swift_ddp", "swift_ddp_find_unused_parameters_false", "swift_ddp_find_unused_parameters_true")

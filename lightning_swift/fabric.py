"""``Fabric(strategy="swift_ddp")``: Fabric's DDP whose workers may be lost; the loop is in
:mod:`lightning_swift.fabric_loop`.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.fabric.strategies.ddp import DDPStrategy

from lightning_swift import compat
from lightning_swift.banner import leave_out
from lightning_swift.launching import workers_here
from lightning_swift.support import check_ddp_options, check_device
from shared_core import (
    SwiftConfig,
    hand_over,
    install,
    launched_by_swiftrun,
    under_plain_torchrun,
    warn_plain_torchrun_once,
    warn_srun_once,
)
from shared_core.checkpoint import absolute
from shared_core.config import full_names
from shared_core.errors import Unsupported
from shared_core.trackers import prepare

_OF_THE_STRATEGY = frozenset(inspect.signature(DDPStrategy.__init__).parameters)


class SwiftFabricStrategy(DDPStrategy):
    """Fabric's ``DDPStrategy`` in which a run goes on through the loss of workers, bit for bit.

    The script's loop must say where epochs and batches begin, see :func:`lightning_swift.attach`. With ``python
    train.py`` and several devices the script is started again under ``swiftrun``.

    Args:
        standbys: processes kept ready to replace a lost worker, where this strategy starts ``swiftrun`` itself.
        options: options of :class:`shared_core.SwiftConfig`, by name.
        kwargs: as ``DDPStrategy``, and options of ``DistributedDataParallel``.

    Raises:
        Unsupported: for ``static_graph``, and start methods that spawn or fork.
        ConfigError: for an unknown option or a bad value.
    """

    def __init__(self, standbys: int = 1, options: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if kwargs.get("start_method", "popen") != "popen":
            raise Unsupported(
                f"swift recovery starts workers with swiftrun, not with start_method={kwargs['start_method']!r}: "
                "leave it out"
            )
        check_ddp_options(None, None, None, None, {k: v for k, v in kwargs.items() if k not in _OF_THE_STRATEGY})
        super().__init__(**kwargs)
        self._standbys, self._options = standbys, full_names(options or {})
        for name in ("checkpoint.dir", "checkpoint.resume_from"):
            if self._options.get(name) is not None:
                self._options[name] = absolute(self._options[name])
        SwiftConfig.from_env(base=SwiftConfig.from_dict(self._options))  # says now what is wrong with them
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
            check_device(self.root_device)
            hand_over(self.num_processes, self._standbys, self._options)
        if under_plain_torchrun():
            warn_plain_torchrun_once()
        warn_srun_once()

    def setup_environment(self) -> None:
        if self.job is not None:
            check_device(self.root_device)
        super().setup_environment()

    @property
    def num_processes(self) -> int:
        """See :func:`workers_here`."""
        return workers_here(getattr(self, "job", None), super().num_processes)

    def backward(self, tensor: torch.Tensor, module: Any, *args: Any, **kwargs: Any) -> None:
        """As in ``DDPStrategy``; a policy of checkpoints hears the loss, which is not read here."""
        super().backward(tensor, module, *args, **kwargs)
        if self.job is not None:
            self.job.note_loss(tensor)


def register_fabric() -> None:
    """Register the strategy under the names that the Trainer's has, but for what Fabric has no name for."""
    for name, options in (
        ("swift_ddp", {}),
        ("swift_ddp_find_unused_parameters_true", {"find_unused_parameters": True}),
    ):
        if name not in STRATEGY_REGISTRY:
            STRATEGY_REGISTRY.register(
                name, SwiftFabricStrategy, description="DDP that survives the loss of workers", **options
            )

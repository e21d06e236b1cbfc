"""``SwiftCallback()`` and ``SWIFT_RECOVERY=1``: recovery for a Trainer that asks for a strategy of Lightning's own."""

from __future__ import annotations

import os

import lightning.pytorch as pl

from lightning_swift.checkpoint import SwiftCheckpoint
from lightning_swift.compat import trainer_under_construction
from lightning_swift.launching import LaunchingStrategy, SwiftLauncher
from lightning_swift.sharded import SwiftFSDPStrategy
from lightning_swift.strategy import DDP_NAMES, SwiftDDPStrategy, register
from lightning_swift.support import refuse_strategy
from shared_core import install
from shared_core.adapters import launched_by_swiftrun

_ENABLE = "SWIFT_RECOVERY"
#: Strategies that take over objects of Lightning's.
_KINDS: tuple[type[LaunchingStrategy], ...] = (SwiftDDPStrategy, SwiftFSDPStrategy)


class SwiftCallback(pl.Callback):
    """Turns on recovery for ``Trainer(strategy="ddp", callbacks=[SwiftCallback()])``.

    A callback's hooks run after Lightning has created the process group, so it acts when it is constructed: from then
    on the name ``ddp`` means :class:`~lightning_swift.SwiftDDPStrategy`. An object of ``DDPStrategy`` or
    ``ModelParallelStrategy`` is taken over in place while its Trainer is built (:func:`callbacks_from_environment`).

    Example::

        trainer = Trainer(accelerator="cpu", devices=1, strategy="ddp", callbacks=[lightning_swift.SwiftCallback()])
    """

    def __init__(self) -> None:
        register(DDP_NAMES, override=True)
        if launched_by_swiftrun():
            install()
        trainer = trainer_under_construction()
        if trainer is not None:
            _adopt(trainer)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Check that recovery is on.

        Raises:
            Unsupported: for another strategy, or one that became a process group before this callback existed.
        """
        if not isinstance(trainer.strategy, LaunchingStrategy) and trainer.world_size > 1:
            raise refuse_strategy(trainer.strategy)

    @property
    def state_key(self) -> str:
        return "SwiftCallback"


def callbacks_from_environment() -> list[pl.Callback]:
    """Factory for Lightning's entry point group ``lightning.pytorch.callbacks_factory``, asked while a Trainer
    is built.

    ``SWIFT_RECOVERY=1`` enables recovery, and a :class:`SwiftCallback` or :class:`SwiftCheckpoint` that the Trainer was
    given takes over its strategy.
    """
    trainer = trainer_under_construction()
    if trainer is None:
        return []
    if any(isinstance(callback, SwiftCallback | SwiftCheckpoint) for callback in getattr(trainer, "callbacks", ())):
        if type(trainer.strategy) in [kind.stock for kind in _KINDS]:
            _adopt(trainer)
        return []
    if os.environ.get(_ENABLE, "").strip().lower() not in ("1", "true", "yes", "on"):
        return []
    if not isinstance(trainer.strategy, SwiftDDPStrategy.stock) and trainer.world_size == 1:
        return []  # # one device: no peer could continue
    return [SwiftCallback()]


def _adopt(trainer: pl.Trainer) -> None:
    """Take over a strategy that its trainer has built already; hand over to ``swiftrun`` if nobody started workers."""
    strategy = trainer.strategy
    kind = next((kind for kind in _KINDS if isinstance(strategy, kind.stock)), None)
    if kind is None:
        if trainer.world_size > 1:
            raise refuse_strategy(strategy)
        return
    adopted = kind.adopt(strategy)
    adopted.find_checkpoints()
    if adopted.job is not None and not isinstance(adopted._launcher, SwiftLauncher):
        adopted._configure_launcher()
    elif adopted.hands_over:
        adopted.hand_over()

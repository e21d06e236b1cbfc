"""What Lightning test jobs share: how the product gets in, counting of batches, digests of the final state."""

from __future__ import annotations

import json
import os
from typing import Any

import lightning.pytorch as pl

from tests.support.digest import digest, training_digest
from tests.support.report import OUT, Report, generators_digest
from tests.support.runner import BASELINE


class Counting(pl.Callback):
    """Counts every batch that this process runs, by entry, epoch and number."""

    def __init__(self, report: Report) -> None:
        self.report, self.entries = report, 0

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.entries += 1

    def _count(self, trainer: pl.Trainer, stage: str, batch_idx: int) -> None:
        where = "sanity" if trainer.sanity_checking else f"epoch {trainer.current_epoch} step {trainer.global_step}"
        self.report.count(f"entry {self.entries} {stage} {where} batch {batch_idx}")

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._count(trainer, "train", batch_idx)

    def on_validation_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._count(trainer, "validate", batch_idx)

    def on_test_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._count(trainer, "test", batch_idx)


def strategy_and_callbacks(how: str, options: dict[str, Any]) -> tuple[Any, list[pl.Callback]]:
    """The strategy and callbacks with which the product gets in, or the stock ones in a reference run.

    Args:
        how: ``strategy``, ``callback``, ``env`` (the caller sets ``SWIFT_RECOVERY=1``) or ``seeded``.
        options: arguments of ``DDPStrategy``.
    """
    from lightning.pytorch.strategies import DDPStrategy

    stock: Any = DDPStrategy(**options) if options else "ddp"
    if os.environ.get(BASELINE) or how == "env":
        return stock, []
    import lightning_swift

    if how == "callback":
        return stock, [lightning_swift.SwiftCallback()]
    if how == "seeded":
        return lightning_swift.SwiftDDPStrategy(data="seeded", **options), []
    return (lightning_swift.SwiftDDPStrategy(**options) if options else "swift_ddp"), []


def without_folder(value: Any) -> Any:
    """Plain data in which the folder of this run, which is no part of the state, is replaced."""
    if isinstance(value, dict):
        return {str(without_folder(k)): without_folder(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [without_folder(v) for v in value]
    if isinstance(value, str):
        return value.replace(os.environ[OUT], "OUT")
    return value


def without_ours(values: dict[str, Any]) -> dict[str, Any]:
    """Without the product's own callbacks and scalars, which a reference run does not have."""
    return {k: v for k, v in values.items() if not str(k).lower().startswith("swift")}


def final_digests(trainer: pl.Trainer, module: pl.LightningModule) -> dict[str, str]:
    """Digests of every part of this rank's state after an entry, loops, callbacks and generators included."""
    metrics = {f"callback {k}": v for k, v in without_ours(trainer.callback_metrics).items()}
    metrics |= {f"logged {k}": v for k, v in without_ours(trainer.logged_metrics).items()}
    schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
    parts = training_digest(module, trainer.optimizers, schedulers, metrics)
    states = {c.state_key: c.state_dict() for c in getattr(trainer, "callbacks", ()) if not isinstance(c, Counting)}
    loops = trainer.fit_loop.state_dict()
    return parts | {
        "callbacks": digest(without_folder(without_ours({k: v for k, v in states.items() if v}))),
        "loops": digest(json.dumps(without_folder(loops), sort_keys=True, default=str)),
        "steps": digest([trainer.global_step, trainer.current_epoch]),
        "generators": generators_digest(),
    }

"""``SwiftCheckpoint``: checkpoints of the whole job, from which the same command continues by itself."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch.callbacks import ModelCheckpoint

from shared_core import SwiftConfig
from shared_core.adapters import CHECKPOINT_OPTIONS
from shared_core.checkpoint import absolute
from shared_core.config import CheckpointOptions
from shared_core.errors import ConfigError


class SwiftCheckpoint(pl.Callback):
    """Makes checkpoints of the job while it trains, at the moments that pay; started again, the script continues there.

    ``Trainer(strategy="ddp", callbacks=[SwiftCheckpoint("checkpoints")])``: when the whole job is gone (killed,
    machine rebooted, end of the time limit), start the same command again, with ``python``, ``torchrun`` (on one
    machine) or ``swiftrun``. It continues in the middle of the epoch, bit for bit, unless its last start had come to
    its proper end. ``ModelCheckpoint`` beside it does what it always does.

    Args:
        dirpath: folder or fsspec URL of the checkpoints.
        policy: when they are made: ``value``, ``young``, ``daly``, ``exact``, ``checkfreq``, ``coci``,
            ``coci_literal`` or ``fixed``; ``auto``: ``fixed`` where ``every_n_steps`` is given, else ``value``.
        every_n_steps: batches between two checkpoints, for ``fixed``.
        price: what a checkpoint costs beyond time, in units of the loss, for ``value``.
        history: file that tells how earlier runs ended, for ``value``; this run adds itself.
        keep: committed checkpoints that stay, at least 2.
        quota_bytes: most that they may take together; 0 is no limit.
        asynchronous: training continues while one is written; otherwise it waits until it is committed.
        resume: continue with what an earlier start of this command has left: ``always``, ``never``, or ``auto``, with
            ``on_failure="restart"`` only.
        resume_from: begin with this checkpoint, whatever command has made it: the folder of one (``step-...``), or a
            folder of checkpoints, of which the newest whole one is taken.

    Raises:
        ConfigError: for a bad value.

    Example::

        checkpoints = lightning_swift.SwiftCheckpoint("checkpoints", every_n_steps=100)
        trainer = Trainer(accelerator="cpu", devices=1, strategy="swift_ddp", callbacks=[checkpoints])
    """

    def __init__(
        self,
        dirpath: str | os.PathLike[str],
        policy: str = "auto",
        every_n_steps: int | None = None,
        price: float = 0.0,
        history: str | os.PathLike[str] | None = None,
        keep: int = 2,
        quota_bytes: int = 0,
        asynchronous: bool = True,
        resume: str = "always",
        resume_from: str | os.PathLike[str] | None = None,
    ) -> None:
        if every_n_steps is not None and every_n_steps < 1:
            raise ConfigError(f"every_n_steps must be at least 1, got {every_n_steps}")
        config = SwiftConfig(
            checkpoint=CheckpointOptions(
                dir=absolute(dirpath),
                policy=policy,
                every_steps=every_n_steps or 0,
                price=price,
                history=None if history is None else absolute(history),
                keep=keep,
                quota_bytes=quota_bytes,
                background=asynchronous,
                resume=resume,
                resume_from=None if resume_from is None else absolute(resume_from),
            )
        )
        #: Options of the job; ``resume`` gives way to what is said elsewhere, because it has another default here.
        self.options = {name: value for name, value in config.changed.items() if name in CHECKPOINT_OPTIONS}
        if resume == "auto":
            self.options["checkpoint.resume"] = resume
        # What follows is published like all plain attributes of callbacks, and so put back after a restart.
        self._life = uuid.uuid4().hex
        self._files: list[str] = []

    @property
    def state_key(self) -> str:
        return "SwiftCheckpoint"

    def merged(self, given: Mapping[str, Any], said: Mapping[str, Any]) -> dict[str, Any]:
        """Options of the strategy, and these.

        Args:
            given: options of the strategy.
            said: options of the launcher and in the environment, which win over those of scripts.

        Raises:
            ConfigError: where they contradict each other.
        """
        for where, others in (("the strategy", given), ("swiftrun or the environment", said)):
            for name, value in others.items():
                if name == "checkpoint.resume" or name not in self.options:
                    continue
                mine = self.options[name]
                if mine != (absolute(value) if name in _PATHS else value):
                    raise ConfigError(
                        f"SwiftCheckpoint says {name}={mine!r}, but {where} {name}={value!r}: leave one of the two out"
                    )
        merged = self.options | dict(given)
        SwiftConfig.from_dict(merged | {name: value for name, value in said.items() if name in CHECKPOINT_OPTIONS})
        return merged

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Check that checkpoints are made.

        Raises:
            ConfigError: without a strategy of this package, or where the job was not told of this callback.
        """
        job = getattr(trainer.strategy, "job", None)
        if job is None:
            raise ConfigError(_why_not(trainer))
        if job.config.checkpoint.dir is None:
            raise ConfigError(
                "SwiftCheckpoint came too late: pass it to the constructor, as in "
                "Trainer(strategy='swift_ddp', callbacks=[SwiftCheckpoint(...)])"
            )
        if stage == "fit":
            for callback in trainer.checkpoint_callbacks:
                if isinstance(callback, ModelCheckpoint):
                    look: Any = partial(self._file_exists, callback, self._life)
                    callback.file_exists = look  # type: ignore[method-assign]

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Hand the loss on; it is not read here, so it costs no wait for a device."""
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            strategy: Any = trainer.strategy
            strategy.job.note_loss(loss)

    # -- files of ModelCheckpoint -------------------------------------------------------------------------------------

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Note which files there are; where the job continues, the list of its first start replaces this one."""
        for callback in trainer.checkpoint_callbacks if trainer.is_global_zero else ():
            folder = getattr(callback, "dirpath", None)
            if isinstance(callback, ModelCheckpoint) and folder is not None and get_filesystem(folder).isdir(folder):
                for path in get_filesystem(folder).ls(folder, detail=False):
                    self.note_file(os.path.join(folder, os.path.basename(path)))

    def note_file(self, path: str) -> None:
        if path not in self._files:
            self._files.append(path)

    def forget_file(self, path: str) -> None:
        if path in self._files:
            self._files.remove(path)

    def _file_exists(self, callback: ModelCheckpoint, life: str, filepath: str, trainer: pl.Trainer) -> bool:
        """As ``ModelCheckpoint.file_exists``, by which it chooses another name.

        After a restart, files that were written after the checkpoint are not there yet: they are written again.
        """
        there = bool(trainer.is_global_zero and get_filesystem(filepath).exists(filepath))
        if life != self._life:  # that of an earlier start was put back
            there = there and str(filepath) in self._files
        return bool(trainer.strategy.reduce_boolean_decision(there, all=False))


_PATHS = ("checkpoint.dir", "checkpoint.history", "checkpoint.resume_from")


def _why_not(trainer: pl.Trainer) -> str:
    name = type(trainer.strategy).__name__
    if not hasattr(trainer.strategy, "hand_over"):
        return (
            f"SwiftCheckpoint makes no checkpoints with {name}: choose Trainer(strategy='ddp'), also for one device, "
            "or 'swift_deepspeed_pipeline', or leave it out and use ModelCheckpoint"
        )
    return (
        "SwiftCheckpoint makes no checkpoints, because these workers were not started by swiftrun: start the script "
        "with swiftrun in place of srun, or of torchrun on several machines, or as python SCRIPT"
    )

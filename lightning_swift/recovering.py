"""A strategy in a run: what the launcher and the loops ask of it, and what Lightning calls."""

from __future__ import annotations

import logging
import os
import pickle
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from torch import nn
from torch.optim import Optimizer

from lightning_swift import compat
from lightning_swift.capture import RunState
from lightning_swift.checkpoint import SwiftCheckpoint
from lightning_swift.checkpoint_io import SwiftCheckpointIO
from lightning_swift.sharing import SharedLoader, Sharing
from lightning_swift.support import check_overlapped_update, check_trainer
from shared_core import Job, SwiftConfig
from shared_core.devices import apart
from shared_core.faults import point
from shared_core.loaders import wrap_loader

#: Bytes of an object broadcast: 8 for the length, the rest for the object; longer ones need a second operation.
_BROADCAST_BYTES = 1024


class RecoveringStrategy(ParallelStrategy):
    """The part of a strategy that is at work while something is trained.

    It stands before a strategy of Lightning's. Its collectives can be left out, and their sources continue with what
    was delivered.

    Attributes:
        job: of this worker; None where nobody recovers it.
        quiet: leave out collectives: code of Lightning is called again whose peers are elsewhere.
    """

    config: SwiftConfig
    #: Whether callbacks may average the weights.
    averages = True
    #: Whether all workers give their metrics the same values.
    metrics_alike = False
    #: In a replacement that skips an entry call, :meth:`after_skip` puts back what was trained.
    builds_late = False

    def _begin(self, job: Job | None) -> None:
        """Called once, by whatever makes the strategy; ``job`` is None where nobody recovers this worker."""
        self.job = job
        leave_out_banner(job)
        self.quiet = False
        self.sharing: Sharing | None = None
        self._run_state: RunState | None = None
        self._trainer: pl.Trainer | None = None
        self._listening = self._begun = False
        self._attached: list[int] = []

    # -- entry calls --------------------------------------------------------------------------------------------------

    @property
    def reroutes(self) -> bool:
        """Whether survivors compute a failed worker's share of the batches, see :class:`Sharing`."""
        return self.job is not None and self.job.reroutes and self.world_size > 1

    def setup(self, trainer: pl.Trainer) -> None:
        super().setup(trainer)
        if self.job is not None:
            self._check(trainer)  # again: the module may have added callbacks
            self.run_state.averages.made(begun=False)
            self._attached = []
            self._attach_trained(trainer)
            if self.run_state.averages.exchanged:
                self.job.keep_boundaries()
            self.run_state.loggers.opened()

    def _attach_trained(self, trainer: pl.Trainer) -> None:
        assert self.model is not None
        models = [self.model, *self.run_state.averages.models]
        if [*map(id, models)] != self._attached:
            self.attach(models, self.optimizers if trainer.state.fn == TrainerFn.FITTING else [])
            self._attached = [*map(id, models)]

    def _check(self, trainer: pl.Trainer) -> None:
        if self.config.state.overlapped_update:
            check_overlapped_update(trainer)
        check_trainer(trainer, averages=self.averages and not self.reroutes)

    def begin_entry(self, trainer: pl.Trainer) -> None:
        """An entry call begins: register all rank-local state before the job decides whether to run it."""
        assert self.job is not None
        self._check(trainer)
        self._trainer = trainer
        self._run_state = RunState(trainer, held=self.averages and not self.reroutes)
        self._begun = False
        self._run_state.register(self.job)
        if not self.builds_late:
            self.job.make_own_standby()
        # Only rank 0 has any. A hot standby of another rank continues to its first batch.
        logged = self.job.peek("lightning.loggers") if trainer.is_global_zero else None
        self._run_state.loggers.prepare(self.job, logged)
        if trainer.is_global_zero and (self.joining or self.job.env.restart or logged is not None):
            write_again(trainer)
        if not self._listening:
            self._listening = True
            self.job.reporter.listen(self._log_recovery)

    def attach(self, modules: list[nn.Module], optimizers: list[Optimizer]) -> None:
        assert self.job is not None
        self.job.attach(modules, optimizers)
        if optimizers:
            self.job.keep_images()  # hooks and manual optimization use parameters anywhere in a batch

    def teardown(self) -> None:
        """As Lightning's, which moves the model to the CPU: nobody may hold it in ``DistributedDataParallel`` then."""
        module = self.lightning_module
        if self._attached and module is not None and apart(module.parameters()):
            self._attached = []
            self.attach([module], [])
        super().teardown()

    def at_end(self) -> dict[str, Any]:
        """State of the module and the optimizers at the end of an entry call; not copied."""
        assert self.lightning_module is not None
        state = {k: value for k, value in self.lightning_module.state_dict().items() if hasattr(value, "dtype")}
        return {
            "module": state,
            "buffers": {k: value for k, value in self.lightning_module.named_buffers() if k not in state},
            "optimizers": [self.optimizer_state(optimizer) for optimizer in self.optimizers],
            "averages": self.run_state.averages.states(),
        }

    def put_back(self, ended: Mapping[str, Any]) -> None:
        if self.lightning_module is not None:
            self.lightning_module.load_state_dict(ended["module"], strict=False)
            for name, buffer in self.lightning_module.named_buffers():
                if name in ended["buffers"] and buffer.shape == ended["buffers"][name].shape:
                    buffer.data.copy_(ended["buffers"][name])
        self.load_optimizer_state_dict({"optimizer_states": ended["optimizers"]})
        self.run_state.averages.load(ended["averages"])

    def after_skip(self, trainer: pl.Trainer, ended: Mapping[str, Any] | None) -> None:
        """An entry call was skipped: make what the failed worker made in it with collectives."""

    @property
    def run_state(self) -> RunState:
        assert self._run_state is not None
        return self._run_state

    @property
    def joining(self) -> bool:
        """Whether this is a replacement that has not reached the failed worker's place yet."""
        return self.job is not None and self.job.joining

    @property
    def data_index(self) -> int:
        """Ranks with the same one read the same batches."""
        return self.global_rank

    def process_dataloader(self, dataloader: object) -> object:
        """Loaders of a fit get the wrapper that can be put back to where it was."""
        trainer = self._trainer
        if self.job is None or trainer is None or trainer.state.fn != TrainerFn.FITTING:
            return dataloader
        if self.reroutes and trainer.training:
            assert self.sharing is not None
            loader: Any = dataloader
            return SharedLoader(loader, self.sharing)
        return wrap_loader(
            dataloader,
            mode=self.config.data,
            seed=self.config.seed,
            rank=self.data_index,
            first_epoch=trainer.current_epoch,
            ahead=1 if trainer.training else 0,
            lazy=self.joining,
            orders=self.job.orders if trainer.training else None,
            copied=self.job.reroutes,
            script=self.job.variables,
        )

    # -- step boundaries ----------------------------------------------------------------------------------------------

    def step_boundary(self, accumulating: bool) -> None:
        """The step boundary of a training batch; a replacement takes the failed worker's place in here."""
        if self.job is not None:
            # Hooks up to here, and the last batch.
            if self.run_state.averages.made(begun=self._begun):
                assert self._trainer is not None
                self._attach_trained(self._trainer)
                self.run_state.forget()
            if not self._begun:
                self.run_state.tell()  # the data module is known only now
            self._begun = True
            if isinstance(self.checkpoint_io, SwiftCheckpointIO) and self.job.checkpoints.near:
                self.checkpoint_io.wait()  # ModelCheckpoint counts its file as written
            epoch = self._trainer.current_epoch if self._trainer is not None else None
            with self.job.variables.held(at_once=True):
                joined = self.job.step_boundary(accumulating=accumulating, epoch=epoch)
            if joined:
                self.job.variables.check_data()
                self._log_recovery({})

    def eval_boundary(self) -> None:
        if self.job is not None:
            self.run_state.tell()
            self.job.evaluation_boundary()

    def _log_recovery(self, fields: dict[str, Any]) -> None:
        """One row of scalars for each recovery, in the user's loggers, where that is asked for."""
        trainer = self._trainer
        if not self.config.log.recoveries or trainer is None or not trainer.is_global_zero:
            return
        if trainer.state.status != TrainerStatus.RUNNING:
            return
        scalars = {"swift/generation": float(fields.get("generation", os.environ.get("SWIFT_RECOVERY_GENERATION", 0)))}
        if "detected" in fields:
            scalars["swift/stall_s"] = time.time() - float(fields["detected"])
        for logger in trainer.loggers:
            logger.log_metrics(scalars, step=compat.steps_made(trainer.fit_loop.epoch_loop))
            logger.save()

    # -- what Lightning calls during a run ----------------------------------------------------------------------------

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        batch = super().batch_to_device(batch, device, dataloader_idx)
        if self.sharing is not None:
            self.sharing.moved()
        return batch

    def backward(
        self, closure_loss: torch.Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """As Lightning's; where the gradient is summed later, hooks for what follows are called later, too."""
        if self.sharing is None:
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        return self.sharing.backward(closure_loss)

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        def marked() -> Any:
            result = closure()
            point("clip")  # gradients are there; hooks, clipping and the update follow
            return result

        return super().optimizer_step(optimizer, closure if self.job is None else marked, model, **kwargs)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        point("checkpoint.write")
        if self.job is None:
            super().save_checkpoint(checkpoint, filepath, storage_options)
        else:
            save = super().save_checkpoint
            self.job.saves.save(lambda written: None if written else save(checkpoint, filepath, storage_options))
        for callback in getattr(self._trainer, "callbacks", ()):
            if isinstance(callback, SwiftCheckpoint):
                callback.note_file(str(filepath))

    def remove_checkpoint(self, filepath: str | Path) -> None:
        super().remove_checkpoint(filepath)
        for callback in getattr(self._trainer, "callbacks", ()):
            if isinstance(callback, SwiftCheckpoint):
                callback.forget_file(str(filepath))

    # -- collectives ---------------------------------------------------------------------------------------------------

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        if not self.quiet:
            super().barrier(*args, **kwargs)  # type: ignore[safe-super]  # that of the strategy behind this

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        return tensor if self.quiet else super().reduce(tensor, group, reduce_op)  # type: ignore[safe-super]

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """As Lightning's, except that the source, too, continues with what was delivered.

        Decisions that depend on the clock or on files (a time limit, the name of a checkpoint) may come out differently
        when a replacement on the source rank takes them again; its peers already act on the first one.
        """
        if self.job is None or not self.job.runtime.operates or not dist.is_initialized():
            return super().broadcast(obj, src)  # type: ignore[safe-super]
        if self.quiet:
            return obj
        with self.job.runtime.unchecked():
            return _broadcast(obj, src)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """As Lightning's; a replacement may contribute something else (whether a file exists by now)."""
        if self.job is None:
            return super().reduce_boolean_decision(decision, all)
        with self.job.runtime.unchecked():
            return super().reduce_boolean_decision(decision, all)


def _broadcast(obj: Any, src: int) -> Any:
    sent = pickle.dumps(obj) if dist.get_rank() == src else b""
    head = torch.zeros(_BROADCAST_BYTES, dtype=torch.uint8)
    start = _BROADCAST_BYTES - 8
    if sent:
        first = len(sent).to_bytes(8, "little") + sent[:start]
        head[: len(first)] = torch.frombuffer(bytearray(first), dtype=torch.uint8)
    dist.broadcast(head, src)
    data = head.numpy().tobytes()
    length = int.from_bytes(data[:8], "little")
    received = data[8 : 8 + length]
    if length > start:
        rest = torch.zeros(length - start, dtype=torch.uint8)
        own = sent[start:length]
        if own:
            rest[: len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8)
        dist.broadcast(rest, src)
        received += rest.numpy().tobytes()
    # The source keeps its own object where it is what was delivered.
    return obj if received == sent else pickle.loads(received)


# -- what Lightning says at the start of a run: a replacement, which starts in the middle of one, does not repeat it --


#: Loggers of Lightning whose messages these are, and those that have handlers for them (the empty name: the root).
_SOURCES = ("lightning.pytorch", "lightning.fabric")
_HANDLED = ("", "lightning", *_SOURCES)


class _Quiet(logging.Filter):
    """Drops what Lightning says below a warning, until a replacement has the failed worker's place."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self._job = job

    def filter(self, record: logging.LogRecord) -> bool:
        banner = record.levelno < logging.WARNING and record.name.startswith(_SOURCES)
        return not (banner and self._job.joining)


_quiet: _Quiet | None = None


def leave_out_banner(job: Job | None) -> None:
    """Leave out the start banner if this is a replacement. Further calls do nothing."""
    global _quiet
    if job is None or job.env.incarnation == 0 or _quiet is not None:
        return
    _quiet = _Quiet(job)
    for name in _HANDLED:
        for handler in logging.getLogger(name or None).handlers:
            handler.addFilter(_quiet)


# -- config.yaml of LightningCLI, which refuses to write over a file --------------------------------------------------
#
# Whoever takes a failed worker's place, or continues from a checkpoint, writes the same file again.


#: At the end of the name that Lightning looks for; nothing is ever written there.
_AGAIN = ".again"


class _Rewriting:
    """The parser of a command line, writing over the file that is there, and restoring its name."""

    def __init__(self, callback: Any) -> None:
        self._callback, self._parser, self._name = callback, callback.parser, callback.config_filename

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parser, name)

    def save(self, config: Any, path: str, **options: Any) -> None:
        self._callback.parser, self._callback.config_filename = self._parser, self._name
        self._parser.save(config, path.removesuffix(_AGAIN), **options | {"overwrite": True})


def write_again(trainer: pl.Trainer) -> None:
    """In rank 0, before an entry call: the configuration has been written by another worker of this run.

    Lightning still asks whether the file exists, and tells all ranks: a replacement must issue the same collectives.
    """
    cli = sys.modules.get("lightning.pytorch.cli")  # whoever has such a callback has imported it
    if cli is None:
        return
    for callback in getattr(trainer, "callbacks", ()):
        if isinstance(callback, cli.SaveConfigCallback) and callback.save_to_log_dir and not callback.already_saved:
            callback.parser = _Rewriting(callback)
            callback.config_filename += _AGAIN

"""``strategy="swift_ddp"``: Lightning's DDP whose workers may be lost."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Literal

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn
from torch.distributed.constants import default_pg_timeout
from torch.optim import Optimizer

from lightning_swift.capture import RunState
from lightning_swift.checkpoint import SwiftCheckpoint
from lightning_swift.checkpoint_io import SwiftCheckpointIO
from lightning_swift.construction import callbacks_under_construction
from lightning_swift.launcher import SwiftLauncher
from lightning_swift.loops import adopt_loops
from lightning_swift.sharing import SharedLoader, Sharing
from lightning_swift.support import check_ddp_options, check_device, check_trainer, refuse_strategy
from shared_core import Job, hand_over, install, launched_by_swiftrun
from shared_core.config import SwiftConfig, full_names, variable_of
from shared_core.handover import under_plain_torchrun, warn_plain_torchrun_once
from shared_core.loaders import wrap_loader
from shared_core.testing import inject
from shared_core.trackers import prepare

#: Bytes of an object broadcast: 8 for the length, the rest for the object; longer ones need a second operation.
_BROADCAST_BYTES = 1024
_DEFAULTS = dict(SwiftConfig().items())


class SwiftDDPStrategy(DDPStrategy):
    """``DDPStrategy`` that keeps a run going through the loss of workers, bit for bit.

    With ``python train.py`` and several devices it starts the script again under ``swiftrun``. Under plain
    ``torchrun`` it trains as ``DDPStrategy`` and says that survivors cannot be kept alive.

    Args:
        standbys: processes kept ready to replace a lost worker, when this strategy starts ``swiftrun`` itself.
        on_failure: ``replace`` a lost worker, ``reroute``: have the others compute its batches too until a newcomer is
            there, ``shrink``: go on with fewer, or ``restart`` all from the newest checkpoint.
        data: ``refetch`` or ``seeded``; see :class:`shared_core.SwiftConfig`.
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
    #: Whether callbacks may average the weights.
    averages = True
    #: Whether all workers give their metrics the same values.
    metrics_alike = False

    def __init__(
        self,
        standbys: int = 1,
        on_failure: Literal["replace", "reroute", "shrink", "restart"] = "replace",
        data: Literal["refetch", "seeded"] = "refetch",
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
        check_ddp_options(
            self._ddp_comm_state,
            self._ddp_comm_hook,
            self._ddp_comm_wrapper,
            self._model_averaging_period,
            self._ddp_kwargs,
        )
        if self._start_method != "popen":
            raise refuse_strategy(self)
        self._standbys = standbys
        self._options = options
        #: The trainer has a callback that makes checkpoints.
        self._saves = False
        #: Options of the run: the environment (and what swiftrun was given) over the constructor's.
        self.config = SwiftConfig.from_env(base=SwiftConfig.from_dict(options))
        self._run_state: RunState | None = None
        self._trainer: pl.Trainer | None = None
        #: Leave out collectives: code of Lightning is called again whose peers are elsewhere.
        self.quiet = False
        self._listening = False
        #: The training steps of the last fit, where survivors compute a lost worker's share.
        self.sharing: Sharing | None = None
        self.job: Job | None = install() if launched_by_swiftrun() else None
        if self.job is not None:
            prepare()
            self.job.check_told(options)

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
        for callback in callbacks_under_construction():
            if isinstance(callback, SwiftCheckpoint):
                self._options = callback.merged(self._options, said)
                self._saves = True
        self.config = SwiftConfig.from_env(base=SwiftConfig.from_dict(self._options))
        if self.job is not None:
            self.job.use_checkpoints(self._options)

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
        for name, value in self._options.items():
            os.environ.setdefault(variable_of(name), str(value))
        hand_over(self.num_processes, self._standbys)

    # -- set-up
    # ----------------------------------------------------------------------------------------------------------

    def setup_environment(self) -> None:
        if self.job is not None:
            check_device(self.root_device)
        super().setup_environment()

    @property
    def reroutes(self) -> bool:
        """Whether survivors compute a lost worker's share of the batches, see :class:`Sharing`."""
        return self.job is not None and self.job.reroutes and self.world_size > 1

    def setup(self, trainer: pl.Trainer) -> None:
        super().setup(trainer)
        if self.job is not None:
            self._check(trainer)  # again: the module may have added callbacks
            assert self.model is not None
            averages = self.run_state.averages.models
            self.attach([self.model, *averages], self.optimizers if trainer.state.fn == TrainerFn.FITTING else [])
            if averages:
                self.job.keep_tops()
            self.run_state.loggers.opened()

    def configure_ddp(self) -> None:
        """Where survivors compute a lost worker's share, gradients are summed by :class:`Sharing`."""
        if not self.reroutes:
            super().configure_ddp()
            return
        assert self.job is not None and self.lightning_module is not None
        number = 0 if self.sharing is None else self.sharing.number
        if self.sharing is None:
            self.job.at_end(self._settle)
        self.job.alike = True
        self.sharing = Sharing(self.job, self.lightning_module.trainer, self.run_state, self.config.seed, number)

    def _settle(self) -> None:
        assert self.sharing is not None
        self.sharing.settle()

    def _check(self, trainer: pl.Trainer) -> None:
        check_trainer(trainer, averages=self.averages and not self.reroutes)

    def begin_entry(self, trainer: pl.Trainer) -> None:
        """An entry call begins: everything that only this rank has is registered before the job decides whether to
        run it.
        """
        assert self.job is not None
        self._check(trainer)
        adopt_loops(trainer)
        self._trainer = trainer
        self._run_state = RunState(trainer)
        self._run_state.register(self.job)
        self._run_state.loggers.prepare(self.job, self.job.peek("lightning.loggers"))
        if not self._listening:
            self._listening = True
            self.job.on_recovered(self._log_recovery)

    def attach(self, modules: list[nn.Module], optimizers: list[Optimizer]) -> None:
        """Tell the job what is trained."""
        assert self.job is not None
        self.job.attach(modules, optimizers)

    #: What is trained is built with collectives, in :meth:`after_skip`.
    builds_late = False

    def put_back(self, ended: Mapping[str, Any]) -> None:
        """Put the module and the optimizers into the state that they had at the end of an entry call."""
        if self.lightning_module is not None:
            self.lightning_module.load_state_dict(ended["module"], strict=False)
        self.load_optimizer_state_dict({"optimizer_states": ended["optimizers"]})
        self.run_state.averages.load(ended["averages"])

    def after_skip(self, trainer: pl.Trainer, ended: Mapping[str, Any] | None) -> None:
        """A newcomer has skipped an entry call: make what its predecessor made in it with collectives.

        Args:
            trainer: its trainer.
            ended: state of the module and the optimizers at the end of the call.
        """

    @property
    def run_state(self) -> RunState:
        """Rank-local state of the entry call in progress."""
        assert self._run_state is not None
        return self._run_state

    @property
    def joining(self) -> bool:
        """Whether this is a newcomer that has not reached its predecessor's place yet."""
        return self.job is not None and self.job.joining

    @property
    def num_processes(self) -> int:
        """Workers of this machine, which may be fewer than devices were asked for."""
        started = os.environ.get("LOCAL_WORLD_SIZE") if getattr(self, "job", None) is not None else None
        return super().num_processes if started is None else int(started)

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
        )

    # -- batch tops ---------------------------------------------------------------------------------------------------

    def batch_top(self, accumulating: bool) -> None:
        """The top of a training batch; a newcomer takes its predecessor's place in here."""
        if self.job is not None:
            if isinstance(self.checkpoint_io, SwiftCheckpointIO) and self.job.checkpoint_near:
                self.checkpoint_io.wait()  # ModelCheckpoint counts its file as written
            if self.job.batch_top(accumulating=accumulating):
                self._log_recovery({})

    def eval_top(self) -> None:
        """The start of a stand-alone evaluation."""
        if self.job is not None:
            self.job.eval_top()

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
            logger.log_metrics(scalars, step=trainer.fit_loop.epoch_loop._batches_that_stepped)
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
        """As in ``DDPStrategy``; where the gradient is summed later, hooks for what follows are called later, too."""
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
            inject.point("clip")  # gradients are there; hooks, clipping and the update follow
            return result

        return super().optimizer_step(optimizer, closure if self.job is None else marked, model, **kwargs)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None) -> None:
        inject.point("checkpoint.write")
        super().save_checkpoint(checkpoint, filepath, storage_options)
        for callback in getattr(self._trainer, "callbacks", ()):
            if isinstance(callback, SwiftCheckpoint):
                callback.note_file(str(filepath))

    def remove_checkpoint(self, filepath: _PATH) -> None:
        super().remove_checkpoint(filepath)
        for callback in getattr(self._trainer, "callbacks", ()):
            if isinstance(callback, SwiftCheckpoint):
                callback.forget_file(str(filepath))

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        if not self.quiet:
            super().barrier(*args, **kwargs)

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        return tensor if self.quiet else super().reduce(tensor, group, reduce_op)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """As in ``DDPStrategy``, except that the source, too, goes on with what was delivered.

        Decisions that rest on the clock or on files (a time limit, the name of a checkpoint) may come out differently
        when a newcomer on the source rank takes them again; its peers already act on the first one.
        """
        if self.job is None or not dist.is_initialized():
            return super().broadcast(obj, src)
        if self.quiet:
            return obj
        with self.job.unchecked():
            return _broadcast(obj, src)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """As in ``DDPStrategy``; a newcomer may contribute something else (whether a file exists by now)."""
        if self.job is None:
            return super().reduce_boolean_decision(decision, all)
        with self.job.unchecked():
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

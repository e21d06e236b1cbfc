"""How the workers of a strategy are started, where it has its options from, and what is done around an entry call."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, Self

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import ParallelStrategy, Strategy
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_swift import compat
from lightning_swift.checkpoint import SwiftCheckpoint
from lightning_swift.compat import NAMES, TESTED
from lightning_swift.data import unwrap
from lightning_swift.loops import adopt_loops
from lightning_swift.recovering import RecoveringStrategy
from lightning_swift.support import refuse_strategy
from shared_core import Job, SwiftConfig, install
from shared_core.adapters import (
    hand_over,
    launched_by_swiftrun,
    leave_torchrun,
    under_plain_torchrun,
    warn_plain_torchrun_once,
)
from shared_core.config import full_names
from shared_core.devices import check as check_device
from shared_core.encoding import NotPlain, decode, encode
from shared_core.errors import Unsupported
from shared_core.loaders import read_random, write_random
from shared_core.trackers import prepare
from shared_core.versions import check_version

# -- the one place around an entry call: Lightning runs fit, validate, test and predict through the launcher ----------


#: Names of the arguments after the model, as the entry functions take them.
_DATA = {
    TrainerFn.FITTING: ("train_dataloaders", "val_dataloaders"),
    TrainerFn.VALIDATING: ("val_dataloaders",),
    TrainerFn.TESTING: ("test_dataloaders",),
    TrainerFn.PREDICTING: ("predict_dataloaders",),
}


class SwiftLauncher(compat.Launcher):
    """Calls the entry function in this process, unless the failed worker of a replacement has finished it already."""

    def __init__(self, strategy: RecoveringStrategy) -> None:
        self._strategy = strategy
        self._entering: tuple[pl.Trainer, tuple[Any, ...]] | None = None
        self._leaving = False
        self._ended: Mapping[str, Any] | None = None

    @property
    def is_interactive_compatible(self) -> bool:
        return False

    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        """Number the entry call and run it, or return what its result was."""
        job, strategy = self._strategy.job, self._strategy
        if trainer is None or job is None:
            return function(*args, **kwargs)
        fn = trainer.state.fn
        assert fn is not None
        # First of all parts: after an entry call that is skipped, the others are restored into what this one builds.
        job.register("lightning.entry", self._capture, self._restore)
        strategy.begin_entry(trainer)
        adopt_loops(trainer)
        self._entering, self._ended = (trainer, args), None
        decision = job.entries.begin()
        self._entering = None
        if decision.skip:
            self._after_skip(trainer)
            return decode(decision.result)
        try:
            result = function(*args, **kwargs)
            strategy.run_state.forget()
            self._leaving = True
            job.entries.done(_plain(result, fn))
            return result
        finally:
            self._leaving = False
            unwrap(trainer)

    def kill(self, signum: Any) -> None:
        """Nothing to do: the agent ends workers."""

    # -- between two entry calls ---------------------------------------------------------------------------------------

    def _capture(self) -> Any:
        """At the end of an entry call: what the user's code finds after it. Peers could not give it later."""
        if not self._leaving or self._strategy.lightning_module is None:
            return None
        return self._strategy.at_end()

    def _restore(self, data: Mapping[str, Any] | None) -> None:
        if data is None:
            return
        if self._entering is None:  # this worker begins here
            self._strategy.run_state.averages.require(data.get("averages", {}))
            return
        self._ended = data
        self._rebuild(*self._entering)
        if not self._strategy.builds_late:
            self._strategy.put_back(data)

    def _rebuild(self, trainer: pl.Trainer, args: tuple[Any, ...]) -> None:
        """Do what the entry call does to the trainer before its loop runs, without collectives."""
        strategy, fn = self._strategy, trainer.state.fn
        assert fn is not None
        model = args[0] if args and isinstance(args[0], pl.LightningModule) else trainer.lightning_module
        if model is None:
            return
        given = list(args[1 : 1 + len(_DATA[fn])])
        datamodule = next((a for a in args[1:] if isinstance(a, pl.LightningDataModule)), None)
        loaders = {
            name: value
            for name, value in zip(_DATA[fn], given, strict=False)
            if not isinstance(value, pl.LightningDataModule)
        }
        strategy.quiet = True
        try:
            compat.attach(trainer, model, loaders, datamodule)
            strategy.connect(model)
            strategy.setup_environment()  # before the hooks that build the model: one may ask for the mesh
            compat.set_up(trainer)
            if fn == TrainerFn.FITTING:
                strategy.setup_optimizers(trainer)
        finally:
            strategy.quiet = False
        strategy.run_state.forget()

    def _after_skip(self, trainer: pl.Trainer) -> None:
        """Leave the trainer as a finished entry call leaves it."""
        strategy = self._strategy
        if strategy.lightning_module is not None:
            strategy.attach([strategy.lightning_module], [])
        assert strategy.job is not None
        random = read_random()  # Lightning seeds generators on the way
        if self._ended is None:
            strategy.setup_environment()
        strategy.after_skip(trainer, self._ended)
        write_random(random)
        strategy.job.entries.skipped()
        trainer.training = False
        trainer.state.status, trainer.state.stage = TrainerStatus.FINISHED, None


def _plain(result: Any, fn: TrainerFn) -> Any:
    try:
        return encode(result)
    except NotPlain as error:
        raise Unsupported(
            f"Trainer.{fn.value} returned {error}, which cannot be kept for a worker that fails afterwards; return "
            "tensors, numbers, text and containers of these"
        ) from error


# -- before anything is trained ---------------------------------------------------------------------------------------


_DEFAULTS = dict(SwiftConfig().items())


class LaunchingStrategy(RecoveringStrategy):
    """The part of a strategy that is at work before anything is trained.

    With ``python train.py`` and several devices it starts the script again under ``swiftrun``. Under plain ``torchrun``
    it does so where checkpoints are asked for, on one machine; else it trains as :attr:`stock` does and says that
    survivors cannot be kept alive.

    Attributes:
        stock: Lightning's own class, whose objects :meth:`adopt` takes over.
        config: options of the run.
    """

    stock: type[ParallelStrategy]

    @classmethod
    def adopt(cls, strategy: Strategy) -> Self:
        """Turn an object of :attr:`stock` into this class, in place: Lightning already refers to it.

        Raises Unsupported if it is of another class (a subclass may have behavior of its own), or has refused options.
        """
        if isinstance(strategy, cls):
            return strategy
        if type(strategy) is not cls.stock:
            raise refuse_strategy(strategy)
        adopted: Any = strategy
        adopted.__class__ = cls
        adopted._take_over(standbys=1, options={})
        found: Self = adopted
        return found

    def _take_over(self, standbys: int, options: dict[str, Any]) -> None:
        """Begin, with the stock part of the object complete. Raises for options that are unknown, bad or refused."""
        self._standbys = standbys
        self._options = options
        #: The trainer has a callback that makes checkpoints.
        self._saves = False
        #: Options of the run: the environment, and what swiftrun was given, over the constructor's.
        self.config = SwiftConfig.from_env(base=SwiftConfig.from_dict(options))
        check_version(TESTED, NAMES)
        self._begin(install() if launched_by_swiftrun() else None)
        if self.job is not None:
            prepare()
            self.job.options.check_told(options)

    # -- launch -------------------------------------------------------------------------------------------------------

    def _configure_launcher(self) -> None:
        # The latest moment in the Trainer's constructor: the number of devices is known, and no process group exists.
        self.find_checkpoints()
        if self.job is not None:
            self._launcher = SwiftLauncher(self)
            return
        super()._configure_launcher()
        if self.hands_over:
            self.hand_over()
        warn_plain_torchrun_once()
        if self.num_processes > 1 and not under_plain_torchrun():
            rank_zero_warn(
                f"the workers were started through {type(self.cluster_environment).__name__}, which cannot replace one "
                "that fails: survivors cannot be kept alive. Start the script with swiftrun"
            )

    def find_checkpoints(self) -> None:
        """In the constructor of a Trainer: take the options of its :class:`~lightning_swift.SwiftCheckpoint`."""
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
        """Whether ``swiftrun`` must start the workers: nobody has, and there are several, or one with checkpoints; or
        ``torchrun`` has, which makes no checkpoints.
        """
        assert self.cluster_environment is not None
        if self.job is not None or under_plain_torchrun():
            return self.job is None and self._saves
        needed = self.num_processes > 1 or self._saves
        return needed and not self.cluster_environment.creates_processes_externally

    def hand_over(self) -> None:
        """Become ``swiftrun`` with the running script. Returns only under ``torchrun`` on several machines."""
        self._check_device((self.parallel_devices or [torch.device("cpu")])[0])
        if under_plain_torchrun():
            leave_torchrun(self._standbys, self._options)
        else:
            hand_over(self.num_processes, self._standbys, self._options)

    # -- set-up -------------------------------------------------------------------------------------------------------

    def setup_environment(self) -> None:
        if self.job is not None:
            self._check_device(self.root_device)
        super().setup_environment()

    def _check_device(self, device: torch.device) -> None:
        check_device(device, "the model", allowed=self.config.uses_devices)

    @property
    def num_processes(self) -> int:
        return workers_here(getattr(self, "job", None), len(self.parallel_devices or ()))


def workers_here(job: Job | None, devices: int) -> int:
    """Workers of this machine, which may be fewer than the devices that were asked for."""
    started = os.environ.get("LOCAL_WORLD_SIZE") if job is not None else None
    return devices if started is None else int(started)


def given_options(given: Mapping[str, Any], more: Mapping[str, Any] | None) -> dict[str, Any]:
    """Options of the job by full name: those of ``given`` that are no defaults, and ``more``."""
    return {name: value for name, value in given.items() if value != _DEFAULTS[name]} | full_names(dict(more or {}))

"""The one place around an entry call: Lightning runs fit, validate, test and predict through the launcher."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus

from lightning_swift import compat
from lightning_swift.data import unwrap
from lightning_swift.loops import adopt_loops
from lightning_swift.recovering import RecoveringStrategy
from shared_core.encoding import NotPlain, decode, encode
from shared_core.errors import Unsupported
from shared_core.loaders import read_random, write_random

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

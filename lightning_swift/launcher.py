"""The one place around every entry call: Lightning runs fit, validate, test and predict through the strategy's
launcher.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.pytorch.strategies.launchers.launcher import _Launcher
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus

from lightning_swift.data import unwrap
from lightning_swift.plain import NotPlain, decode, encode
from shared_core.errors import Unsupported

if TYPE_CHECKING:
    from lightning_swift.strategy import SwiftDDPStrategy


class SwiftLauncher(_Launcher):
    """Calls the entry function in this process, unless the predecessor of a newcomer has finished it already."""

    def __init__(self, strategy: SwiftDDPStrategy) -> None:
        self._strategy = strategy

    @property
    def is_interactive_compatible(self) -> bool:
        return False

    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        """Number the entry call and run it, or return what its result was."""
        job = self._strategy.job
        if trainer is None or job is None:
            return function(*args, **kwargs)
        fn = trainer.state.fn
        assert fn is not None
        self._strategy.begin_entry(trainer)
        decision = job.entry(fn.value)
        if decision.skip:
            self._skip(trainer, fn, args)
            return decode(decision.result)
        try:
            result = function(*args, **kwargs)
            self._strategy.run_state.forget()
            job.entry_done(_plain(result, fn))
            return result
        finally:
            unwrap(trainer)

    def _skip(self, trainer: pl.Trainer, fn: TrainerFn, args: tuple[Any, ...]) -> None:
        """Leave the trainer as the entry left it; loops, callbacks and metrics have been restored by then."""
        model = args[0] if args and isinstance(args[0], pl.LightningModule) else trainer.lightning_module
        if model is not None:
            model.trainer = trainer
            self._strategy.connect(model)
            # Parameters come with the process group: a newcomer whose predecessor was between two entry calls joins
            # there.
            self._strategy.attach([model], [])
        self._strategy.setup_environment()
        trainer.state.status, trainer.state.stage = TrainerStatus.FINISHED, None
        if fn == TrainerFn.FITTING:
            trainer.training = False
        trainer.state.stage = None

    def kill(self, signum: Any) -> None:
        """Nothing to do: the agent ends workers."""


def _plain(result: Any, fn: TrainerFn) -> Any:
    try:
        return encode(result)
    except NotPlain as error:
        raise Unsupported(
            f"Trainer.{fn.value} returned {error}, which cannot be kept for a worker that is lost afterwards; return "
            "tensors, numbers, text and containers of these"
        ) from error

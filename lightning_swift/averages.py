"""Callbacks that average the weights: their average is attached beside the module, and what else they hold is put back.

Their average is a model of its own, which no optimizer steps; during validation they exchange it with the module's
weights. The core follows both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from torch import nn

from lightning_swift import compat

AVERAGING = (WeightAveraging, StochasticWeightAveraging)


class Averages:
    """The averaging callbacks of a trainer.

    Args:
        trainer: whose callbacks are looked at, again each time.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer

    def _models(self) -> dict[str, nn.Module]:
        callbacks: list[pl.Callback] = self._trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
        found = {str(i): compat.average_of(each) for i, each in enumerate(callbacks) if isinstance(each, AVERAGING)}
        return {name: model for name, model in found.items() if model is not None}

    @property
    def models(self) -> list[nn.Module]:
        """The averages that exist by now."""
        return list(self._models().values())

    def states(self) -> dict[str, dict[str, Any]]:
        """State of each average, for the end of an entry call."""
        return {
            number: {name: value for name, value in model.state_dict().items() if hasattr(value, "dtype")}
            for number, model in self._models().items()
        }

    def load(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Inverse of :meth:`states`."""
        for number, model in self._models().items():
            if number in states:
                model.load_state_dict(states[number], strict=False)

    # -- stochastic weight averaging ----------------------------------------------------------------------------------

    def _stochastic(self) -> list[StochasticWeightAveraging]:
        callbacks: list[pl.Callback] = self._trainer.callbacks  # type: ignore[attr-defined]
        return [each for each in callbacks if isinstance(each, StochasticWeightAveraging)]

    def capture(self) -> list[tuple[bool, bool]]:
        """How far stochastic averaging has got: whether it has its scheduler, and whether it makes the statistics of
        batch normalisation again.
        """
        return [
            (compat.has_average_scheduler(each), any(norm.momentum is None for norm in each.momenta))
            for each in self._stochastic()
        ]

    def restore(self, data: list[tuple[bool, bool]]) -> None:
        """Bring the callbacks of a newcomer as far; values of what they make are restored after this."""
        trainer, module = self._trainer, self._trainer.lightning_module
        for callback, (scheduling, resetting) in zip(self._stochastic(), data, strict=False):
            if scheduling and not compat.has_average_scheduler(callback):
                progress = trainer.fit_loop.epoch_progress.current
                epoch, progress.completed = progress.completed, callback.swa_start
                callback.on_train_epoch_start(trainer, module)
                progress.completed = epoch
            if resetting and not callback.momenta:
                callback.reset_batch_norm_and_save_state(module)

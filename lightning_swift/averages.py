"""Models that callbacks hold: averages of the weights, teachers, metrics. They are attached beside the module.

An average is a model of its own, which no optimizer steps; during validation it is exchanged with the module's weights.
The core follows both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from torch import nn

from lightning_swift import compat
from shared_core.errors import Unsupported
from shared_core.events import console_once

AVERAGING = (WeightAveraging, StochasticWeightAveraging)
#: Longer containers of callbacks are not looked through for models.
_SHORT = 32


class Averages:
    """The averaging callbacks of a trainer, and, with ``held``, the models that the user's callbacks hold."""

    def __init__(self, trainer: pl.Trainer, *, held: bool) -> None:
        self._trainer, self._held = trainer, held
        self._known: dict[str, nn.Module] = {}
        self._late: set[str] = set()

    def _averages(self) -> dict[str, nn.Module]:
        callbacks: list[pl.Callback] = self._trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
        found = {str(i): compat.average_of(each) for i, each in enumerate(callbacks) if isinstance(each, AVERAGING)}
        return {name: model for name, model in found.items() if model is not None}

    def held(self) -> dict[str, nn.Module]:
        """What callbacks hold now, by its place, without the trained module, its parts, and what was made too late."""
        found = {
            name: model
            for number, callback in enumerate(self._trainer.callbacks if self._held else ())  # type: ignore[attr-defined]
            if not isinstance(callback, AVERAGING)
            for name, model in _held_by(callback, f"{number}.{type(callback).__qualname__}")
        }
        trained = self._trainer.lightning_module
        known = {id(each) for each in trained.modules()} if found and trained is not None else set()
        return {
            name: model
            for name, model in found.items()
            if name not in self._late and known.isdisjoint(map(id, model.modules()))
        }

    def _models(self) -> dict[str, nn.Module]:
        return self._averages() | {name: model for name, model in self.held().items() if _has_values(model)}

    @property
    def exchanged(self) -> bool:
        return bool(self._averages())

    @property
    def models(self) -> list[nn.Module]:
        """Those with parameters or buffers that exist by now."""
        return list(self._models().values())

    def made(self, *, begun: bool) -> bool:
        """Whether callbacks have made models since this was last asked.

        ``begun``: training has begun, so a replacement does not have what is made now: a line says so, and it is left
        out, unless it takes the place of another.
        """
        before, held = self._known, self.held()
        late = [name for name, model in held.items() if begun and name not in before and _has_values(model)]
        if late:
            self._late.update(late)
            console_once(
                "late model",
                f"a callback has made a model while training runs ({late[0]}): a worker that takes a failed one's "
                "place does not have it. Make it in setup(), or keep its state_dict() instead",
            )
        self._known = self._averages() | self.held()
        return [*map(id, before.values())] != [*map(id, self._known.values())]

    def states(self) -> dict[str, dict[str, Any]]:
        """State of each average, for the end of an entry call; not copied."""
        return {
            number: {name: value for name, value in model.state_dict().items() if hasattr(value, "dtype")}
            for number, model in self._models().items()
        }

    def load(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        for number, model in self._models().items():
            if number in states:
                model.load_state_dict(states[number], strict=False)

    def require(self, states: Mapping[str, Any]) -> None:
        """Raise Unsupported if a model is missing that had been made in a call, to begin between two calls."""
        missing = [name for name in states if name not in self._models()]
        if missing:
            raise Unsupported(
                f"a worker failed between two calls of the Trainer, and the one that takes its place lacks the model "
                f"{missing[0]}, which a callback made in a call: make it in setup()"
            )

    # -- stochastic weight averaging ----------------------------------------------------------------------------------

    def _stochastic(self) -> list[StochasticWeightAveraging]:
        callbacks: list[pl.Callback] = self._trainer.callbacks  # type: ignore[attr-defined]
        return [each for each in callbacks if isinstance(each, StochasticWeightAveraging)]

    def capture(self) -> list[tuple[bool, bool]]:
        """How far stochastic averaging is: whether it has its scheduler, and makes batch-norm statistics again."""
        return [
            (compat.has_average_scheduler(each), any(norm.momentum is None for norm in each.momenta))
            for each in self._stochastic()
        ]

    def restore(self, data: list[tuple[bool, bool]]) -> None:
        """Bring the callbacks of a replacement as far; values of what they make are restored after this."""
        trainer, module = self._trainer, self._trainer.lightning_module
        for callback, (scheduling, resetting) in zip(self._stochastic(), data, strict=False):
            if scheduling and not compat.has_average_scheduler(callback):
                progress = trainer.fit_loop.epoch_progress.current
                epoch, progress.completed = progress.completed, callback.swa_start
                callback.on_train_epoch_start(trainer, module)
                progress.completed = epoch
            if resetting and not callback.momenta:
                callback.reset_batch_norm_and_save_state(module)


def _has_values(model: nn.Module) -> bool:
    return any(True for _ in model.parameters()) or any(True for _ in model.buffers())


def _held_by(callback: object, name: str) -> Iterator[tuple[str, nn.Module]]:
    """Modules that are attributes, or in short lists, tuples and dictionaries that are."""
    for attribute, value in vars(callback).items():
        if isinstance(value, nn.Module):
            yield f"{name}.{attribute}", value
        elif isinstance(value, (list, tuple, dict)) and len(value) <= _SHORT:
            items = value.items() if isinstance(value, dict) else enumerate(value)
            yield from ((f"{name}.{attribute}.{key}", each) for key, each in items if isinstance(each, nn.Module))

"""What only one worker of an Accelerate run has, besides what the core publishes by itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accelerate import Accelerator

from shared_core import TrainingLoop
from shared_core.recovery.values import decode, encode_state

_NAME = "accelerate.state"


class RunState:
    """Rank-local state of an ``Accelerator``: counters, schedulers, epochs of loaders, objects registered for
    checkpointing.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    def register(self, loop: TrainingLoop) -> None:
        """Have it published at each batch top."""
        assert loop.job is not None
        loop.job.register(_NAME, self._capture, self._restore)

    @staticmethod
    def early(accelerator: Accelerator, loop: TrainingLoop) -> None:
        """In a newcomer, before an epoch begins: loaders count epochs themselves, and shuffle by them."""
        published: Mapping[str, Any] | None = loop.job.peek(_NAME) if loop.job is not None and loop.joining else None
        if published is not None:
            for loader, number in zip(accelerator._dataloaders, published["loaders"], strict=False):
                if number is not None:
                    loader.iteration = number

    def _capture(self) -> dict[str, Any]:
        accelerator = self._accelerator
        return {
            "step": accelerator.step,
            "sync": accelerator.gradient_state.sync_gradients,
            "checkpoints": accelerator.project_configuration.iteration,
            "loaders": [getattr(loader, "iteration", None) for loader in accelerator._dataloaders],
            "schedulers": [encode_state(each.scheduler.state_dict()) for each in accelerator._schedulers],
            "objects": [encode_state(each.state_dict()) for each in accelerator._custom_objects],
        }

    def _restore(self, data: Mapping[str, Any]) -> None:
        accelerator = self._accelerator
        accelerator.step = data["step"]
        accelerator.gradient_state._set_sync_gradients(data["sync"])
        accelerator.project_configuration.iteration = data["checkpoints"]
        for scheduler, state in zip(accelerator._schedulers, data["schedulers"], strict=False):
            scheduler.scheduler.load_state_dict(decode(state))
        for each, state in zip(accelerator._custom_objects, data["objects"], strict=False):
            each.load_state_dict(decode(state))

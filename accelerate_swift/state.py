"""What only one worker of an Accelerate run has, besides what the core publishes by itself."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

from accelerate import Accelerator

from accelerate_swift import compat
from accelerate_swift.steps import Steps
from accelerate_swift.trackers import STATE, Trackers
from shared_core.adapters import LoopProgress
from shared_core.encoding import decode, encode_state


class AccelerateRunState:
    """Rank-local state of an ``Accelerator`` that the core does not publish by itself."""

    def __init__(
        self, accelerator: Accelerator, progress: LoopProgress, steps: Steps, *, replays: bool = False
    ) -> None:
        assert progress.job is not None
        self._accelerator, self._progress, self._job, self._steps = accelerator, progress, progress.job, steps
        self.trackers = Trackers(accelerator, progress.job)
        if not replays:
            progress.job.register(STATE, self._capture, self._restore)

    def stand_by(self) -> None:
        """Before the first epoch begins; see :meth:`Job.make_own_standby`."""
        self._job.make_own_standby()

    def early(self) -> None:
        """In a replacement, before an epoch begins: loaders count epochs themselves, and shuffle by them."""
        published: Mapping[str, Any] | None = self._job.peek(STATE) if self._progress.joining else None
        if published is not None:
            for loader, number in zip(compat.loaders_of(self._accelerator), published["loaders"], strict=False):
                if number is not None:
                    loader.iteration = number

    # -- what must not be done twice ----------------------------------------------------------------------------------

    def save_again(self, folder: str | None, save: Callable[[str | None], Any]) -> Any:
        """``save_state``, also into the folder that the failed worker had begun, which Accelerate refuses."""

        def write(written: bool) -> Any:
            with compat.without_optimizers(self._accelerator) if written else nullcontext():
                return self._save_into(folder, save)

        return self._job.saves.save(write)

    def _save_into(self, folder: str | None, save: Callable[[str | None], Any]) -> Any:
        project = self._accelerator.project_configuration
        if not (self._job.env.incarnation or self._job.env.restart) or not project.automatic_checkpoint_naming:
            return save(folder)
        path = os.path.join(self._accelerator.project_dir, "checkpoints", f"checkpoint_{project.iteration}")
        if not os.path.exists(path):
            return save(folder)
        self._accelerator.wait_for_everyone()  # as Accelerate does before the folder is made
        project.automatic_checkpoint_naming = False
        try:
            return save(path)
        finally:
            project.automatic_checkpoint_naming = True

    # -- publishing ---------------------------------------------------------------------------------------------------

    def _capture(self) -> dict[str, Any]:
        accelerator = self._accelerator
        return {
            "step": accelerator.step,
            "sync": accelerator.gradient_state.sync_gradients,
            "checkpoints": accelerator.project_configuration.iteration,
            "trackers": self.trackers.capture(),
            "steps": self._steps.capture(),
            "loaders": [getattr(loader, "iteration", None) for loader in compat.loaders_of(accelerator)],
            "schedulers": [encode_state(each.scheduler.state_dict()) for each in compat.schedulers_of(accelerator)],
            "objects": [encode_state(each.state_dict()) for each in compat.registered(accelerator)],
        }

    def _restore(self, data: Mapping[str, Any]) -> None:
        accelerator = self._accelerator
        accelerator.step = data["step"]
        compat.set_sync(accelerator, data["sync"])
        accelerator.project_configuration.iteration = data["checkpoints"]
        self.trackers.restore(data["trackers"])
        self._steps.restore(data["steps"])
        for scheduler, state in zip(compat.schedulers_of(accelerator), data["schedulers"], strict=False):
            scheduler.scheduler.load_state_dict(decode(state))
        for each, state in zip(compat.registered(accelerator), data["objects"], strict=False):
            each.load_state_dict(decode(state))

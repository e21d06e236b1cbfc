"""What only one worker of an Accelerate run has, besides what the core publishes by itself."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from itertools import count
from typing import Any

from accelerate import Accelerator
from accelerate.tracking import GeneralTracker, MLflowTracker, WandBTracker

from accelerate_swift import compat
from shared_core import Job
from shared_core.adapters import LoopProgress
from shared_core.encoding import decode, encode, encode_state
from shared_core.trackers import Mlflow, Rows, Service, note_runs, of_wandb, take_up

# -- batches of prepared loaders by number, also in a replacement that begins in the middle of a pass -----------------


class Steps:
    """Counts the batches of each pass in progress, which is known by its place, the same in a replacement."""

    def __init__(self) -> None:
        self._now: dict[int, int] = {}
        #: Numbers in the failed worker's passes that this replacement has not reached yet.
        self._theirs: dict[int, int] = {}

    def over(self, loader: Iterable[Any]) -> Iterator[tuple[int, Any]]:
        """``(index, batch)`` for each batch, with the index that ``enumerate(loader)`` gives without a failure."""
        place = next(number for number in count() if number not in self._now)
        index = self._now[place] = 0
        try:
            begun = False
            for batch in loader:  # the step boundary, where a replacement gets what is published, lies in here
                if not begun:
                    begun, index = True, self._theirs.pop(place, 0)
                    self._now[place] = index
                yield index, batch
                index = self._now[place] = index + 1
        finally:
            del self._now[place]

    def capture(self) -> dict[int, int]:
        return dict(self._now)

    def restore(self, numbers: Mapping[int, int]) -> None:
        self._theirs = dict(numbers)


# -- Accelerate's trackers: one run, each row once, also across the failure of the main process -----------------------


#: Name under which the state of an ``Accelerator`` is published.
STATE = "accelerate.state"


class Trackers:
    """The trackers of an ``Accelerator``; only the main process has any."""

    def __init__(self, accelerator: Accelerator, job: Job) -> None:
        self._accelerator, self._job = accelerator, job
        self._rows: dict[int, Rows] = {}
        self._noted: dict[str, str] = {}
        self._configured = job.notes.tally("accelerate.trackers")

    def start(self, config: Any, start: Callable[[Any], None]) -> None:
        """``init_trackers``: replacements take up the failed worker's runs and leave its configuration alone."""
        if self._job.rank != 0:
            start(config)
            return
        published = self._job.peek(STATE) or {}
        take_up(published.get("trackers", {}).get("names"))
        again = bool(self._configured.value)
        start(None if again else config)
        self._noted = note_runs(self._job)
        for tracker in self._accelerator.trackers:
            if again and config is not None and isinstance(tracker, WandBTracker):
                tracker.store_init_configuration(config)  # its part of the run may be all that there is of it
        self._configured.value = 1
        self.watch()

    def watch(self) -> None:
        """Have each tracker's ``log`` write what the failed worker did not."""
        for number, tracker in enumerate(self._accelerator.trackers):
            if self._job.rank == 0 and number not in self._rows:
                rows = self._rows[number] = Rows(
                    self._job, f"accelerate.{number}", _service(self._job, tracker), _writer(tracker)
                )
                tracker.log = rows.give

    def capture(self) -> Any:
        rows = {number: rows.state() for number, rows in self._rows.items()}
        return {"names": self._noted, "rows": rows}

    def restore(self, data: Mapping[str, Any]) -> None:
        for number, state in data["rows"].items():
            if number in self._rows:
                self._rows[number].restore(state)


def _service(job: Job, tracker: GeneralTracker) -> Service:
    if isinstance(tracker, WandBTracker):
        return of_wandb(job, lambda: tracker.run, numbered=True)
    if isinstance(tracker, MLflowTracker):
        import mlflow

        return Mlflow(lambda: (mlflow.MlflowClient(), tracker.active_run.info.run_id))
    return Service()


def _writer(tracker: GeneralTracker) -> Callable[[Any, Any, dict[str, Any]], None]:
    log = tracker.log

    def write(values: Any, step: Any, more: dict[str, Any]) -> None:
        log(values, step=step, **more)
        flush = getattr(getattr(tracker, "writer", None), "flush", None)
        if flush is not None:
            flush()

    return write


# -- all of it --------------------------------------------------------------------------------------------------------


class AccelerateRunState:
    """Rank-local state of an ``Accelerator`` that the core does not publish by itself."""

    def __init__(
        self, accelerator: Accelerator, progress: LoopProgress, steps: Steps, *, replays: bool = False
    ) -> None:
        assert progress.job is not None
        self._accelerator, self._progress, self._job, self._steps = accelerator, progress, progress.job, steps
        self.trackers = Trackers(accelerator, progress.job)
        self._accumulated: int | None = None
        if not replays:
            progress.job.register(STATE, self._capture, self._restore)

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
            "accumulated": self._accumulates(),
            "trigger": encode(accelerator.flag_tensor),  # set_trigger() in one batch, check_trigger() in another
            "checkpoints": accelerator.project_configuration.iteration,
            "trackers": self.trackers.capture(),
            "steps": self._steps.capture(),
            "loaders": [getattr(loader, "iteration", None) for loader in compat.loaders_of(accelerator)],
            "schedulers": [encode_state(each.scheduler.state_dict()) for each in compat.schedulers_of(accelerator)],
            "objects": [encode_state(each.state_dict()) for each in compat.registered(accelerator)],
        }

    def _accumulates(self) -> int | None:
        """Batches of a step, where the script has changed their number since its first one."""
        now: int = self._accelerator.gradient_accumulation_steps
        if self._accumulated is None:
            self._accumulated = now
        return None if now == self._accumulated else now

    def _restore(self, data: Mapping[str, Any]) -> None:
        accelerator = self._accelerator
        accelerator.step = data["step"]
        compat.set_sync(accelerator, data["sync"])
        if data["accumulated"] is not None:
            self._accumulated = accelerator.gradient_accumulation_steps
            accelerator.gradient_accumulation_steps = data["accumulated"]
        accelerator.flag_tensor = decode(data["trigger"])
        accelerator.project_configuration.iteration = data["checkpoints"]
        self.trackers.restore(data["trackers"])
        self._steps.restore(data["steps"])
        for scheduler, state in zip(compat.schedulers_of(accelerator), data["schedulers"], strict=False):
            scheduler.scheduler.load_state_dict(decode(state))
        for each, state in zip(compat.registered(accelerator), data["objects"], strict=False):
            each.load_state_dict(decode(state))

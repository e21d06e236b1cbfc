"""Accelerate's trackers: one run, each row once, also across the failure of the main process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from accelerate import Accelerator
from accelerate.tracking import GeneralTracker, MLflowTracker, WandBTracker

from shared_core import Job
from shared_core.trackers import Mlflow, Rows, Service, note_runs, of_wandb, take_up

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

"""``TrainingArguments(report_to=...)``: one run for each service, each row once, also across the failure of rank 0."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import transformers
from transformers.integrations.integration_utils import MLflowCallback, TensorBoardCallback, WandbCallback

from shared_core import Job
from shared_core.trackers import Mlflow, Rows, Service, note_runs, of_wandb, take_up


class AccelerateReports:
    """The callbacks of a ``Trainer`` that report to services, in rank 0."""

    def __init__(self, trainer: transformers.Trainer, job: Job) -> None:
        self._trainer, self._job = trainer, job
        self._rows: dict[str, Rows] = {}
        self._names: dict[str, str] = {}

    def take_up(self, published: Mapping[str, Any] | None) -> None:
        """In a replacement, before its services are set up: use the failed worker's runs."""
        if self._job.rank == 0 and published is not None:
            take_up(published["names"])

    def watch(self) -> None:
        """The services are set up: note their runs, and write what a failed worker did not."""
        if self._job.rank != 0:
            return
        folders = [each.logging_dir for each in self._callbacks().values() if isinstance(each, TensorBoardCallback)]
        folder = next(filter(None, folders), None)
        self._names = note_runs(self._job, **({"TENSORBOARD_LOGGING_DIR": folder} if folder else {}))
        for name, each in self._callbacks().items():
            if name not in self._rows:
                self._watch(name, each)

    def capture(self) -> Any:
        return {"names": self._names, "rows": {name: rows.state() for name, rows in self._rows.items()}}

    def restore(self, data: Any) -> None:
        for name, state in (data or {"rows": {}})["rows"].items():
            if name in self._rows:
                self._rows[name].restore(state)

    def _callbacks(self) -> dict[str, Any]:
        return {
            f"{number} {type(each).__name__}": each
            for number, each in enumerate(self._trainer.callback_handler.callbacks)
            if type(each).__module__.startswith("transformers.integrations") or isinstance(each, _SERVICES)
        }

    def _watch(self, name: str, callback: Any) -> None:
        trainer, on_log = self._trainer, callback.on_log

        def write(logs: Any, step: Any, more: dict[str, Any]) -> None:
            state = trainer.state
            if state.global_step != step:  # a row that the service has lost
                state = copy.copy(state)
                state.global_step = step
            on_log(trainer.args, state, trainer.control, logs=dict(logs), model=trainer.callback_handler.model)

        rows = self._rows[name] = Rows(self._job, f"transformers.{name}", _service(self._job, callback), write)

        def give(args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            rows.give(logs, state.global_step)

        callback.on_log = give


_SERVICES = (MLflowCallback, TensorBoardCallback, WandbCallback)


def _service(job: Job, callback: Any) -> Service:
    if isinstance(callback, WandbCallback):
        import wandb

        return of_wandb(job, lambda: wandb.run, numbered=False) if wandb.run is not None else Service()
    if isinstance(callback, MLflowCallback):
        import mlflow

        return Mlflow(lambda: (mlflow.MlflowClient(), _active(mlflow)))
    return Service()


def _active(mlflow: Any) -> str:
    run = mlflow.active_run() or mlflow.last_active_run()
    return str(run.info.run_id)

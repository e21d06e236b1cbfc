"""Loggers that write to a service: one run, each row once, also across the failure of rank 0."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lightning.pytorch.loggers import Logger, MLFlowLogger, WandbLogger

from lightning_swift import compat
from shared_core import Job
from shared_core.trackers import Mlflow, Rows, Service, note_file, note_runs, of_wandb

_ROWS = "_swift_rows"
_numbers: Iterator[int] = itertools.count()


class _LazyService:
    """Rows of a logger whose run is opened when it is first used. Replaces the logger's ``log_metrics``."""

    def __init__(self, job: Job, logger: Logger) -> None:
        self._job, self._logger = job, logger
        self._name = f"lightning.{next(_numbers)}"
        self._log = logger.log_metrics
        self._rows: Rows | None = None
        logger.log_metrics = self.give  # type: ignore[method-assign]

    @property
    def rows(self) -> Rows:
        """Made when first asked for, which opens the run."""
        if self._rows is None:
            self._rows = Rows(self._job, self._name, _service(self._job, self._logger), self._write)
        return self._rows

    def give(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        self.rows.give(metrics, step)

    def state(self) -> Any:
        """Plain data; None if nothing was logged."""
        return None if self._rows is None else self._rows.state()

    def _write(self, metrics: Mapping[str, Any], step: Any, more: dict[str, Any]) -> None:
        self._log(dict(metrics), step)


class Services:
    """Loggers that send to a service (Weights & Biases, MLflow) and write no files. Rank 0 only."""

    def __init__(self, job: Job, loggers: Sequence[Logger]) -> None:
        self._job, self._loggers, self._opened = job, loggers, False
        for logger in loggers:
            if _ROWS not in vars(logger):
                vars(logger)[_ROWS] = _LazyService(job, logger)

    def take_up(self, logger: Logger, run: str | None) -> None:
        """Before a logger opens its run: have it take up the failed worker's."""
        if run is not None:
            compat.take_up_run(logger, run)

    def opened(self) -> None:
        """Runs are open: note them, for replacements."""
        if self._opened or not self._loggers:
            return
        self._opened = True
        note_runs(self._job)
        for logger in self._loggers:
            if isinstance(logger, WandbLogger):
                note_file(self._job, logger.experiment)

    def capture(self, logger: Logger) -> dict[str, Any]:
        self.opened()
        known = isinstance(logger, (MLFlowLogger, WandbLogger))
        return {"run": logger.version if known else None, "given": vars(logger)[_ROWS].state()}

    def restore(self, logger: Logger, rows: Any) -> None:
        if rows is not None:
            vars(logger)[_ROWS].rows.restore(rows)


def _service(job: Job, logger: Logger) -> Service:
    if isinstance(logger, WandbLogger):
        return of_wandb(job, lambda: logger.experiment, numbered=False)
    if isinstance(logger, MLFlowLogger):
        return Mlflow(lambda: (logger.experiment, str(logger.run_id)), compat.metric_prefix(logger))
    return Service()

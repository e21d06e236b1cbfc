"""Log files after the failure of rank 0: the same version, every row once.

A replacement reuses the version that the failed worker chose (noted on disk when it was chosen), writes nothing before
it joins, and at the join cuts each file to the length it had at the step boundary; the batch it runs again then writes
its rows again.
"""

from __future__ import annotations

import csv
import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial, wraps
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import lightning.pytorch.loggers.csv_logs as csv_logs
from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger

from lightning_swift import compat
from shared_core import Job, current_job
from shared_core.encoding import Holder, decode, encode, user_defined
from shared_core.trackers import Mlflow, Rows, Service, note_file, note_runs, of_wandb

# -- loggers that write to a service: one run, each row once, also across the failure of rank 0 -----------------------


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


def _service(job: Job, logger: Logger) -> Service:
    if isinstance(logger, WandbLogger):
        return of_wandb(job, lambda: logger.experiment, numbered=False)
    if isinstance(logger, MLFlowLogger):
        return Mlflow(lambda: (logger.experiment, str(logger.run_id)), compat.metric_prefix(logger))
    return Service()


_JOB_DIR = "SWIFT_RECOVERY_JOB_DIR"


def _joining() -> bool:
    job = current_job()
    return job is not None and job.joining


# -- versions ---------------------------------------------------------------------------------------------------------


#: By id of a logger: version of a run that continues from a checkpoint.
_former: dict[int, Any] = {}


def _take_up_version(logger: Logger, version: Any) -> None:
    """Have a logger that has opened nothing yet continue in the folder of the failed worker's."""
    if compat.opened(logger) is not None:
        return
    # Asked for here, so that a later logger of the same folder finds the version that is its own in the notes.
    _former[id(logger)] = version
    _ = logger.version
    if _former.pop(id(logger), None) is not None:  # nobody chose: the script did
        compat.set_version(logger, version)


def _noted(kind: type, choose: Callable[[Any], int]) -> Callable[[Any], int]:
    """``choose`` of a kind of loggers, but what an earlier worker of this rank has chosen comes first, in its order."""
    asked: dict[tuple[int, str], int] = {}

    @wraps(choose)
    def next_version(self: Any) -> int:
        folder = os.environ.get(_JOB_DIR)
        if folder is None:
            return choose(self)
        former = _former.pop(id(self), None)
        path = Path(folder, f"versions-rank{os.environ.get('RANK', '0')}.json")
        known: dict[str, list[int]] = json.loads(path.read_text()) if path.exists() else {}
        place = f"{kind.__name__} {self.root_dir} {self.name}"
        number = asked.get((os.getpid(), place), 0)
        asked[os.getpid(), place] = number + 1
        versions = known.setdefault(place, [])
        if number >= len(versions):
            versions.append(choose(self) if former is None else former)
            new = path.with_suffix(".new")
            new.write_text(json.dumps(known))
            new.replace(path)
        return versions[number]

    return next_version


# -- CSV --------------------------------------------------------------------------------------------------------------


class SwiftExperimentWriter(csv_logs.ExperimentWriter):
    """Writes ``metrics.csv``, exchanging its header atomically; before a replacement joins, nothing."""

    rows = 0

    def _check_log_dir_exists(self) -> None:
        if not _joining():  # the folder is the failed worker's
            super()._check_log_dir_exists()

    def save(self) -> None:
        if _joining():
            return
        self.rows += len(self.metrics)
        super().save()

    def _rewrite_with_new_header(self, fieldnames: list[str]) -> None:
        if not _is_local(self.metrics_file_path):
            super()._rewrite_with_new_header(fieldnames)
            return
        with open(self.metrics_file_path, newline="") as file:
            rows = list(csv.DictReader(file))
        self._exchange(fieldnames, rows)

    def cut(self, rows: int, fieldnames: list[str]) -> None:
        """Leave the first ``rows`` rows, with the columns ``fieldnames``."""
        self.rows = rows
        if not _is_local(self.metrics_file_path) or not os.path.exists(self.metrics_file_path):
            return
        if not rows:
            os.unlink(self.metrics_file_path)
            return
        with open(self.metrics_file_path, newline="") as file:
            kept = [
                {name: row[name] for name in fieldnames}
                for row, _ in zip(csv.DictReader(file), range(rows), strict=False)
            ]
        self._exchange(fieldnames, kept)

    def _exchange(self, fieldnames: list[str], rows: list[dict[str, Any]]) -> None:
        new = f"{self.metrics_file_path}.new"
        with open(new, "w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=fieldnames)
            writer.writeheader()
            writer.writerows(rows)
        os.replace(new, self.metrics_file_path)


def _capture_csv(logger: CSVLogger) -> Any:
    writer = compat.opened(logger)
    if not isinstance(writer, SwiftExperimentWriter):
        return None
    return {
        "rows": writer.rows,
        "waiting": encode(writer.metrics),
        "keys": list(writer.metrics_keys),
        "version": logger.version,
    }


def _restore_csv(logger: CSVLogger, data: Mapping[str, Any]) -> None:
    writer = logger.experiment
    if isinstance(writer, SwiftExperimentWriter):
        writer.metrics, writer.metrics_keys = decode(data["waiting"]), list(data["keys"])
        writer.cut(data["rows"], data["keys"])


# -- TensorBoard ------------------------------------------------------------------------------------------------------

_FILES = "_swift_files"


def _capture_tensorboard(logger: TensorBoardLogger) -> Any:
    """Length of each event file. Flushes only where something was added since the last time."""
    files: dict[str, int] = logger.__dict__.setdefault(_FILES, {})
    for writer in compat.event_writers(logger):
        marks = vars(writer)
        if "_swift_added" not in marks:
            _watch_additions(writer)
        if marks["_swift_added"]:
            marks["_swift_added"] = False
            writer.flush()
            name = compat.file_of(writer)
            files[name] = os.path.getsize(name) if _is_local(name) else -1
    open_files = [compat.file_of(writer) for writer in compat.event_writers(logger)]
    for name in [name for name in files if name not in open_files]:
        if os.path.exists(name):  # closed meanwhile
            files[name] = os.path.getsize(name)
    return {"files": dict(files), "current": next(iter(open_files), None), "version": logger.version}


def _watch_additions(writer: Any) -> None:
    add = writer.add_event

    def add_event(event: Any) -> None:
        writer._swift_added = True
        add(event)

    writer._swift_added = True
    writer.add_event = add_event


def _restore_tensorboard(logger: TensorBoardLogger, data: Mapping[str, Any]) -> None:
    """Drop what this process wrote while starting up, cut the failed worker's files, continue in its current one."""
    experiment = logger.experiment
    own = [compat.file_of(writer) for writer in compat.event_writers(logger)]
    experiment.close()
    for name in own:
        if name not in data["files"] and os.path.exists(name):
            os.unlink(name)
    for name, size in data["files"].items():
        if size >= 0 and os.path.exists(name) and os.path.getsize(name) > size:
            os.truncate(name, size)
    logger.__dict__[_FILES] = dict(data["files"])
    if data["current"] is not None and os.path.exists(data["current"]):
        compat.continue_files(logger, data["current"])


# -- all --------------------------------------------------------------------------------------------------------------


def is_own(logger: Logger) -> bool:
    """Whether a logger is of a class of the script. Its attributes count as variables, and so it is given again what it
    was given since the step boundary.
    """
    known = (CSVLogger, TensorBoardLogger, MLFlowLogger, WandbLogger)
    return user_defined(type(logger)) and not isinstance(logger, known)


class Loggers:
    """The loggers of a trainer. Only rank 0 writes logs, so only its state is published."""

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer
        self._others: dict[int, Holder] = {}
        self._job: Job | None = None  # once there is one, in rank 0
        self._services: list[Logger] = []
        self._noted = False

    def prepare(self, job: Job, state: Any) -> None:
        """Before anything is logged: see that loggers of services write each row once.

        In a replacement, take up runs that a service knows by name, and the versions of a run that was started before.
        """
        if self._trainer.is_global_zero:
            self._job = job
            self._services = [
                each
                for each in self._trainer.loggers
                if not isinstance(each, (CSVLogger, TensorBoardLogger)) and not is_own(each)
            ]
        for logger in self._services:
            if _ROWS not in vars(logger):
                vars(logger)[_ROWS] = _LazyService(job, logger)
        for logger, data in self._pairs(state):
            version = (data or {}).get("version")
            if version is not None:
                _take_up_version(logger, version)
            run = (data or {}).get("run")
            if run is not None:
                compat.take_up_run(logger, run)

    def opened(self) -> None:
        """Runs are open: note them, for replacements."""
        if self._noted or not self._services or self._job is None:
            return
        self._noted = True
        note_runs(self._job)
        for logger in self._services:
            if isinstance(logger, WandbLogger):
                note_file(self._job, logger.experiment)

    def capture(self) -> Any:
        if not self._trainer.is_global_zero:
            return None
        return [self._capture(logger) for logger in self._trainer.loggers]

    def restore(self, state: Any) -> None:
        joining = _joining()
        for logger, data in self._pairs(state):
            rows = (data or {}).get("given")
            if self._job is not None and rows is not None:
                vars(logger)[_ROWS].rows.restore(rows)
            if data is None or joining:
                continue  # joining: an entry call was skipped; later ones have written to the same files
            if isinstance(logger, CSVLogger):
                _restore_csv(logger, data)
            elif isinstance(logger, TensorBoardLogger):
                _restore_tensorboard(logger, data)
            elif "attributes" in data:
                self._other(logger).restore(data["attributes"])

    def _pairs(self, state: Any) -> list[tuple[Logger, Any]]:
        if state is None or not self._trainer.is_global_zero:
            return []
        return list(zip(self._trainer.loggers, state, strict=False))

    def _capture(self, logger: Logger) -> Any:
        if isinstance(logger, CSVLogger):
            return _capture_csv(logger)
        if isinstance(logger, TensorBoardLogger):
            return _capture_tensorboard(logger)
        if is_own(logger):
            return None
        found = {"attributes": self._other(logger).capture()}
        if self._job is None:
            return found
        self.opened()
        run = logger.version if isinstance(logger, (MLFlowLogger, WandbLogger)) else None
        return found | {"run": run, "given": vars(logger)[_ROWS].state()}

    def _other(self, logger: Logger) -> Holder:
        if id(logger) not in self._others:
            self._others[id(logger)] = Holder(logger, frozenset())
        return self._others[id(logger)]


class Missed:
    """What rank 0 would have logged while it is away (``on_failure="reroute"``), kept by the others."""

    def __init__(self, job: Job, trainer: pl.Trainer, loggers: Loggers) -> None:
        self._job, self._trainer, self._loggers = job, trainer, loggers
        #: Step boundary before it, number of the logger, scalars and step of each row.
        self._rows: list[tuple[int, int, dict[str, Any], int | None]] = []
        #: In rank 0: published rows and loggers of the worker whose place this one takes.
        self._before: tuple[Any, Any] = None, None
        if job.rank == 0:
            self._before = job.peek("lightning.missed"), job.peek("lightning.loggers")
        else:
            for number, logger in enumerate(trainer.loggers):
                logger.log_metrics = partial(self._note, number)  # type: ignore[method-assign]
        job.register("lightning.missed", self._capture, self._restore)

    def _note(self, number: int, metrics: Mapping[str, Any], step: int | None = None) -> None:
        plain = {name: v.item() if hasattr(v, "item") else v for name, v in metrics.items()}
        self._rows.append((self._job.position.boundaries, number, plain, step))

    def _capture(self) -> Any:
        if 0 not in self._job.survivor_groups.absent:
            # A failure of rank 0 may not be known yet, and its newest step boundary is that of an accumulation window.
            oldest = self._job.position.boundaries - 2 * self._trainer.accumulate_grad_batches - 2
            self._rows = [row for row in self._rows if row[0] >= oldest]
        return {"boundary": self._job.position.boundaries, "rows": list(self._rows)}

    def _restore(self, data: Mapping[str, Any]) -> None:
        """Of a peer: in a replacement of rank 0, continue where the failed worker had published its logs."""
        if self._job.rank != 0:
            self._rows = list(data["rows"])
            return
        place, loggers = self._before
        if self._job.joining or not self._job.added or place is None:
            return
        self._loggers.restore(loggers)
        for boundary, number, metrics, step in data["rows"]:
            if boundary >= place["boundary"]:
                self._trainer.loggers[number].log_metrics(metrics, step)
                self._trainer.loggers[number].save()


def _is_local(path: str) -> bool:
    return "://" not in path


def _install() -> None:
    """Replace what the loggers are made with; outside ``swiftrun`` all of it behaves as before."""
    compat.replace_csv_writer(SwiftExperimentWriter)
    compat.choose_versions(_noted)


_install()

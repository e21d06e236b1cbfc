"""Runs that a job writes to, taken up by the replacements of the worker that opens them; and their rows, each written
once although a replacement runs the script, or a batch of it, again.

What the service has is not written twice; what it lost with its buffer when the worker failed is written again.
"""

from __future__ import annotations

import math
import os
import re
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Any

from shared_core.encoding.plain import dumps, loads
from shared_core.encoding.values import NotPlain, decode, encode
from shared_core.job import Job
from shared_core.protocol.worker_env import leave_environment
from shared_core.trackers.compat import committed_steps, wait_closed

Row = Mapping[str, Any]
#: Writes a row: its values, its step, further arguments of the script's.
Write = Callable[[Row, Any, dict[str, Any]], None]
#: Most rows that are kept because the service may lose them; more come only from toys.
_KEPT = 1000


class Service:
    """What takes the rows. This one can only be told: what it was given, it is taken to have.

    ``buffer_s``: what is younger, in seconds, the service may lose with the process.
    """

    buffer_s = 0.0

    def place(self, row: Row, step: Any) -> Any:
        """Where the service puts a row that is given to it now, as plain data."""
        return None

    def has(self, place: Any, row: Row, step: Any) -> bool | None:
        """Whether it has this row of a failed worker; None if it cannot tell."""
        return None

    def passed(self, place: Any, step: Any) -> None:
        """A row was not written, because :meth:`has` said that it is there."""

    def carry_on(self, place: Any) -> None:
        """The row that comes next, to ``place``, is the first that is missing."""

    def wrote(self, place: Any, step: Any) -> None:
        """A row was written, to ``place``."""

    def state(self) -> Any:
        """Plain data for :meth:`restore`."""
        return None

    def restore(self, state: Any) -> None:
        """In a replacement: be where the failed worker was."""


def replaces_a_worker(job: Job) -> bool:
    """Whether another worker may have written what this one comes to."""
    return bool(job.joining or job.env.incarnation or job.env.restart)


class Rows:
    """Writes each row that the script gives to a tracker once, whoever runs the script.

    Args:
        job: of this worker, which holds rank 0.
        name: unique, and the same in a replacement.
    """

    def __init__(self, job: Job, name: str, service: Service, write: Write) -> None:
        self._service, self._write = service, write
        self._count = 0
        #: Number of the last row that is there, as far as this worker is concerned.
        self._done = 0
        self._written = job.notes.tally(f"rows.{name}")
        self._recent: deque[tuple[float, bytes]] = deque(maxlen=_KEPT)
        #: A failed worker may have written what comes next.
        self._behind = replaces_a_worker(job)

    def give(self, row: Row, step: Any = None, **more: Any) -> None:
        """Write a row that the script logs, unless the service has it from a failed worker. ``more``: further arguments
        for the tracker.
        """
        self._count = self._done = self._count + 1
        place = self._service.place(row, step)
        if self._behind:
            if self._has(self._count, place, row, step):
                self._service.passed(place, step)
                return
            self._catch_up(place)
        self._write(row, step, more)
        self._service.wrote(place, step)
        self._keep(place, row, step, more)
        self._written.value = self._count

    def state(self) -> Any:
        oldest = time.time() - self._service.buffer_s
        while self._recent and self._recent[0][0] < oldest:
            self._recent.popleft()
        return {"count": self._count, "recent": [row for _, row in self._recent], "service": self._service.state()}

    def restore(self, state: Any) -> None:
        """In a replacement: continue from the failed worker's :meth:`state`, and write what the service has lost."""
        self._service.restore(state["service"])
        self._recent.clear()
        for packed in state["recent"]:
            number, place, encoded, step, more = loads(packed)
            if number <= self._done:
                continue
            row, self._done = decode(encoded), number
            if self._behind:
                if self._has(number, place, row, step):
                    continue
                self._catch_up(place)
            self._write(row, step, decode(more))
            self._service.wrote(place, step)
            self._recent.append((time.time(), packed))
        self._count = self._done = state["count"]

    def _catch_up(self, place: Any) -> None:
        self._behind = False
        self._service.carry_on(place)

    def _has(self, number: int, place: Any, row: Row, step: Any) -> bool:
        has = self._service.has(place, row, step)
        return number <= self._written.value if has is None else has

    def _keep(self, place: Any, row: Row, step: Any, more: dict[str, Any]) -> None:
        if not self._service.buffer_s:
            return
        plain = {name: value.item() if hasattr(value, "item") else value for name, value in row.items()}
        try:
            packed = dumps((self._count, place, encode(plain), step, encode(more)))
        except NotPlain:  # pictures and the like: lost if the service loses them
            return
        self._recent.append((time.time(), packed))


_KIND = "trackers"
#: Seconds after which Weights & Biases writes to its file; 15 by default, and what was not written is lost with rank 0.
_FLUSH = "WANDB_X_TRANSACTION_LOG_FLUSH_INTERVAL"


def prepare() -> None:
    """Before the script opens a run: have Weights & Biases write its file each second, unless the user has chosen."""
    os.environ.setdefault(_FLUSH, "1")


def note_runs(job: Job, **more: str) -> dict[str, str]:
    """Call in rank 0 when runs were opened: leave their names to its replacements, in whose environment Weights &
    Biases and MLflow look for them by themselves.

    ``more``: further variables that replacements find in their environment. Returns the variables, for :func:`take_up`.
    """
    names = dict(more)
    run = getattr(sys.modules.get("wandb"), "run", None)
    if run is not None and isinstance(run.id, str):
        names |= {"WANDB_RUN_ID": run.id, "WANDB_RESUME": "allow"}
        note_file(job, run)
    mlflow: Any = sys.modules.get("mlflow")
    active = mlflow.active_run() if mlflow is not None else None
    if active is not None:
        names["MLFLOW_RUN_ID"] = active.info.run_id
    leave_environment(job.env.job_dir, job.rank, names)
    return names


def take_up(names: Mapping[str, str] | None) -> None:
    """In a replacement on another machine: put into its environment what :func:`note_runs` has returned."""
    for name, value in (names or {}).items():
        os.environ.setdefault(name, value)


def note_file(job: Job, run: Any) -> None:
    file = str(run.settings.sync_file)
    if file not in job.notes.kept(_KIND):
        job.notes.keep(_KIND, file, run.id)


def files_of(job: Job, run: str) -> list[str]:
    """Files that Weights & Biases has written of a run, oldest first."""
    return [file for file, known in job.notes.kept(_KIND).items() if known == run]


#: Added to the time that a service says it keeps rows for, in seconds: timers are late under load.
_MARGIN_S = 5.0
#: Seconds within which rows reach the server.
_ONLINE_S = 60.0
#: Seconds that the process which writes for a failed worker has to notice that and to end.
_END_S = 10.0
#: Names of metrics that every adapter gives to MLflow as they are.
_PLAIN = re.compile(r"[0-9A-Za-z_/. -]+")


def of_wandb(job: Job, run: Callable[[], Any], *, numbered: bool) -> Service:
    """The service behind a run of Weights & Biases.

    Args:
        run: gives the run, which is open.
        numbered: the step that the script gives is the number of the row; otherwise it is a value in it.
    """
    return Service() if getattr(run(), "disabled", False) else Wandb(job, run, numbered)


class Wandb(Service):
    """A run of Weights & Biases. Its rows have numbers, which continue in the replacement's part of the run."""

    def __init__(self, job: Job, run: Callable[[], Any], numbered: bool) -> None:
        self._job, self._run, self._numbered = job, run, numbered
        #: Number of the next row that the script gives without one; while this is behind, of the failed worker's next.
        self._next = 0
        self._behind = replaces_a_worker(job)
        self._first: int | None = None
        #: Number that the service's next row has been given.
        self._at = 0
        settings = run().settings
        interval = settings.x_transaction_log_flush_interval if run().offline else _ONLINE_S
        self.buffer_s = _MARGIN_S + float(interval)

    def place(self, row: Row, step: Any) -> Any:
        if self._given(step):
            return int(step)
        if not self._behind:
            self._next = self._run().step  # the service has taken all rows before it when it answers
        return self._next

    def has(self, place: Any, row: Row, step: Any) -> bool | None:
        return int(place) < self._missing_from()

    def passed(self, place: Any, step: Any) -> None:
        self._next = max(self._next, place if self._given(step) else place + 1)

    def carry_on(self, place: Any) -> None:
        self._behind = False
        self._move(place)

    def wrote(self, place: Any, step: Any) -> None:
        self._next = place if self._given(step) else place + 1

    def state(self) -> Any:
        return self._next

    def restore(self, state: Any) -> None:
        self._next = state
        self._missing_from()

    def _given(self, step: Any) -> bool:
        return self._numbered and step is not None

    def _move(self, place: int) -> None:
        """Give a number to the service's next row. Twice in succession makes an empty row."""
        if place != self._at:
            self._at = place
            self._run().log({}, step=place)

    def _missing_from(self) -> int:
        """The number of the first row that the service does not have."""
        if self._first is None:
            run = self._run()
            steps: list[int] = []
            for file in files_of(self._job, run.id):
                if file != run.settings.sync_file:
                    wait_closed(file, _END_S)
                    steps += committed_steps(file)
            self._first = max(steps, default=-1) + 1
            if not run.offline:
                self._first = self._at = int(run.step)
            elif not self._numbered:  # for what the script says to the service directly
                self._move(self._first)
        return self._first


class Mlflow(Service):
    """A run of MLflow, which can be asked for every value; a row counts as there if its first plain metric is.

    Args:
        run: gives the client and the name of the run.
        prefix: of the names of metrics.
    """

    buffer_s = 10.0

    def __init__(self, run: Callable[[], tuple[Any, str]], prefix: str = "") -> None:
        self._run, self._prefix = run, prefix
        self._values: dict[str, Counter[tuple[int, float | None]]] = {}

    def has(self, place: Any, row: Row, step: Any) -> bool | None:
        for name, value in row.items():
            key = self._prefix + name
            number = value.item() if hasattr(value, "item") else value
            if not _PLAIN.fullmatch(key) or not isinstance(number, (int, float)):
                continue
            if key not in self._values:
                client, run = self._run()
                self._values[key] = Counter((m.step, _comparable(m.value)) for m in client.get_metric_history(run, key))
            wanted = (int(step or 0), _comparable(number))
            if not self._values[key][wanted]:
                return False
            self._values[key][wanted] -= 1
            return True
        return None


def _comparable(value: float) -> float | None:
    return None if math.isnan(value) else float(value)

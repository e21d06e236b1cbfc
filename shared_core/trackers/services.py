"""What Weights & Biases and MLflow have of a run, and where they put the next row."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

from shared_core.job import Job
from shared_core.trackers.compat import committed_steps, wait_closed
from shared_core.trackers.rows import Row, Service, replaces_a_worker
from shared_core.trackers.runs import files_of

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

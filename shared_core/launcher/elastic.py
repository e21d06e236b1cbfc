"""What torchelastic records of a job, recorded through its public functions: events, metrics and the failure."""

from __future__ import annotations

import json
import os
import socket
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NoReturn

from torch.distributed.elastic.agent.server.api import RunResult, Worker
from torch.distributed.elastic.events import record
from torch.distributed.elastic.events.api import Event, EventSource
from torch.distributed.elastic.metrics.api import put_metric
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure, get_error_handler

from shared_core.events import visible
from shared_core.launcher.attempt import WorkerPlaces
from shared_core.protocol.failure_policy import AS_ANY


def raise_failure(name: str, failures: dict[int, ProcessFailure]) -> NoReturn:
    """Raises ChildFailedError, which the interpreter prints as a table; SystemExit if the console has already said all
    that the table would say. ``failures`` are by rank.
    """
    for failure in failures.values():
        failure.message = _shown(failure.message)
    error = ChildFailedError(name, failures)
    _, first = error.get_first_failure()
    if not str(first.message).endswith(AS_ANY):
        raise error
    if "TORCHELASTIC_ERROR_FILE" in os.environ and os.path.exists(first.error_file):
        get_error_handler().dump_error_file(first.error_file, first.exitcode)  # as ``record`` does
    raise SystemExit(1)


def failure_of(local_rank: int, pid: int, code: int, error_file: str, message: str) -> ProcessFailure:
    """A worker's failure in torchelastic's form. A damaged error file is ignored; ``message`` replaces its text."""
    try:
        failure = ProcessFailure(local_rank, pid, code, error_file)
        failure.timestamp_isoformat()
    except Exception:  # torch trusts the content of the file
        failure = ProcessFailure(local_rank, pid, code, "")
    failure.message = message or failure.message
    return failure


def _shown(message: object) -> str:
    """A worker's message for the table: indented, so that no line looks like one of the launcher's."""
    if isinstance(message, dict):  # as torch writes error files
        more = message.get("extraInfo")
        message = (more if isinstance(more, dict) else {}).get("py_callstack", message.get("message", "<N/A>"))
    return "\n  ".join(visible(line.expandtabs(4)) for line in str(message).split("\n"))


class Records:
    """Sends events to the user's handler (``--event-log-handler``), metrics to torchelastic's."""

    def __init__(self, places: Callable[[], WorkerPlaces]) -> None:
        self._places = places
        self._begun = time.monotonic()

    @contextmanager
    def duration(self, state: str) -> Iterator[None]:
        begun = time.perf_counter()
        try:
            yield
        finally:
            self._record(state, EventSource.AGENT, duration_ms=(time.perf_counter() - begun) * 1000)

    def result(self, result: RunResult, pids: Mapping[int, int]) -> None:
        """Record what became of each worker at the end of the job; ``pids`` are by local rank."""
        self._measure(failed=result.is_failed())
        for worker in self._places().workers:
            failure = result.failures.get(worker.global_rank)
            state = "TERMINATED" if result.is_failed() and failure is None else result.state.value
            self._record(
                state,
                EventSource.WORKER,
                worker=worker,
                pid=pids.get(worker.local_rank),
                failure=failure,
                raw_error=json.dumps(failure.error_file_data) if failure else None,
            )

    def succeeded(self) -> None:
        self._record("SUCCEEDED", EventSource.AGENT)

    def failed(self) -> None:
        """The agent ends with the exception that is being handled."""
        self._record("FAILED", EventSource.AGENT, raw_error=traceback.format_exc())

    def _measure(self, *, failed: bool) -> None:
        # Replaced workers are no restarts in torchelastic's sense: it never restarts here.
        values = {
            "flakiness": 100 if failed else 0,
            "run_total": 1,
            "run_success_with_retries": 0,
            "run_success_no_retries": int(not failed),
            "run_failed_with_retries": 0,
            "run_failed_no_retries": int(failed),
        }
        for name, value in values.items():
            put_metric(f"workers.{self._places().spec.role}.{name}", value)

    def _record(
        self,
        state: str,
        source: EventSource,
        *,
        worker: Worker | None = None,
        pid: int | None = None,
        failure: ProcessFailure | None = None,
        raw_error: str | None = None,
        duration_ms: float | None = None,
    ) -> None:
        places = self._places()
        spec, met = places.spec, bool(places.workers)
        more: dict[str, object] = {
            "group_world_size": places.machines if met else None,
            "entry_point": spec.get_entrypoint_name(),
        }
        if worker is not None:
            # Each in a list of one, as torchelastic writes them.
            more |= {
                "local_rank": [worker.local_rank],
                "role_rank": [worker.role_rank],
                "role_world_size": [worker.role_world_size],
                "exit_code": [failure.exitcode if failure else None],
                "worker_pid": [failure.pid if failure else None],
            }
        event = Event(
            f"torchelastic.worker.status.{state}",
            source,
            metadata={
                "run_id": spec.rdzv_handler.get_run_id(),
                "global_rank": worker.global_rank if worker is not None else None,
                "group_rank": places.machine if met else None,
                "worker_id": str(pid) if worker is not None else None,
                "role": spec.role,
                "hostname": socket.getfqdn(),
                "state": state,
                "total_run_time": int(time.monotonic() - self._begun),
                "rdzv_backend": spec.rdzv_handler.get_backend(),
                "raw_error": raw_error,
                "metadata": json.dumps(more),
                "agent_restarts": 0,
                "duration_ms": duration_ms,
            },
        )
        record(event, spec.event_log_handler)

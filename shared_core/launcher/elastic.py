"""What torchelastic records of a job, recorded through its public functions: events, metrics and the failure."""

from __future__ import annotations

import json
import os
import socket
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NoReturn

from torch.distributed.elastic.agent.server.api import RunResult, Worker
from torch.distributed.elastic.events import record
from torch.distributed.elastic.events.api import Event, EventSource
from torch.distributed.elastic.metrics.api import put_metric
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure, get_error_handler

from shared_core.events import visible
from shared_core.launcher.places import Places
from shared_core.protocol.failure_policy import AS_ANY


def raise_failure(name: str, failures: dict[int, ProcessFailure]) -> NoReturn:
    """The job has failed.

    Args:
        name: of the user's script.
        failures: by rank.

    Raises:
        ChildFailedError: which the interpreter prints as a table.
        SystemExit: the console has said all that the table would say.
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
    """A worker's failure, as torchelastic tells of it.

    Args:
        local_rank: of the worker.
        pid: of the worker.
        code: its exit code.
        error_file: that it may have written. One that is damaged is as none.
        message: what to say; empty for what the file says.
    """
    try:
        failure = ProcessFailure(local_rank, pid, code, error_file)
        failure.timestamp_isoformat()
    except Exception:  # torch believes what a worker has written
        failure = ProcessFailure(local_rank, pid, code, "")
    failure.message = message or failure.message
    return failure


def _shown(message: object) -> str:
    """What a worker says of its failure, for the table: indented, so that no line looks like one of the launcher's."""
    if isinstance(message, dict):  # as torch writes error files
        more = message.get("extraInfo")
        message = (more if isinstance(more, dict) else {}).get("py_callstack", message.get("message", "<N/A>"))
    return "\n  ".join(visible(line.expandtabs(4)) for line in str(message).split("\n"))


class Records:
    """Events go to the handler that the user has named (``--event-log-handler``), metrics to torchelastic's.

    Args:
        places: of this machine, before it has met the others.
    """

    def __init__(self, places: Places) -> None:
        self._places = places
        self._begun = time.monotonic()

    def placed(self, places: Places) -> None:
        """This machine's workers have these places now."""
        self._places = places

    @contextmanager
    def duration(self, state: str) -> Iterator[None]:
        """Record how long something takes."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self._record(state, EventSource.AGENT, duration_ms=(time.perf_counter() - begun) * 1000)

    def result(self, result: RunResult, pids: Mapping[int, int]) -> None:
        """The job has ended: record what became of each worker, by local rank in ``pids``."""
        self._measure(failed=result.is_failed())
        for worker in self._places.workers:
            failure = result.failures.get(worker.global_rank)
            state = "TERMINATED" if result.is_failed() and failure is None else result.state.value
            self._record(
                state,
                EventSource.WORKER,
                worker=worker,
                pid=pids.get(worker.local_rank),
                raw_error=json.dumps(failure.error_file_data) if failure else None,
                exit_code=failure.exitcode if failure else None,
                worker_pid=failure.pid if failure else None,
            )

    def succeeded(self) -> None:
        """The agent has come to its end."""
        self._record("SUCCEEDED", EventSource.AGENT)

    def failed(self) -> None:
        """The agent ends with the exception that is handled now."""
        self._record("FAILED", EventSource.AGENT, raw_error=traceback.format_exc())

    def _measure(self, *, failed: bool) -> None:
        # Replaced workers are no restarts as torchelastic counts them: its own are never made.
        values = {
            "flakiness": 100 if failed else 0,
            "run_total": 1,
            "run_success_with_retries": 0,
            "run_success_no_retries": int(not failed),
            "run_failed_with_retries": 0,
            "run_failed_no_retries": int(failed),
        }
        for name, value in values.items():
            put_metric(f"workers.{self._places.spec.role}.{name}", value)

    def _record(
        self,
        state: str,
        source: EventSource,
        *,
        worker: Worker | None = None,
        pid: int | None = None,
        raw_error: str | None = None,
        duration_ms: float | None = None,
        exit_code: int | None = None,
        worker_pid: int | None = None,
    ) -> None:
        places, spec, met = self._places, self._places.spec, bool(self._places.workers)
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
                "exit_code": [exit_code],
                "worker_pid": [worker_pid],
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

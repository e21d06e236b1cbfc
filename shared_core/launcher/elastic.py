"""What torchelastic records of a job, recorded through its public functions: events and the failure."""

from __future__ import annotations

import json
import os
import socket
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

from torch.distributed.elastic.agent.server.api import RunResult
from torch.distributed.elastic.events import record
from torch.distributed.elastic.events.api import Event, EventSource
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure, get_error_handler

from shared_core.events import visible
from shared_core.launcher.attempt import WorkerPlaces
from shared_core.launcher.starting import AgentOptions, Program
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
    """Sends events to the user's handler (``--event-log-handler``). ``backend``: of the rendezvous."""

    def __init__(
        self, program: Program, options: AgentOptions, backend: str, places: Callable[[], WorkerPlaces]
    ) -> None:
        self._program, self._options, self._backend, self._places = program, options, backend, places
        self._begun = time.monotonic()

    @contextmanager
    def duration(self, state: str) -> Iterator[None]:
        begun = time.perf_counter()
        try:
            yield
        finally:
            self._record(state, EventSource.AGENT, {}, duration_ms=(time.perf_counter() - begun) * 1000)

    def result(self, result: RunResult, pids: Mapping[int, int]) -> None:
        """Record what became of each worker at the end of the job; ``pids`` are by local rank."""
        for local_rank, rank in enumerate(self._places().ranks):
            failure = result.failures.get(rank)
            state = "TERMINATED" if result.is_failed() and failure is None else result.state.value
            # Each in a list of one, as torchelastic writes them.
            more = {
                "local_rank": [local_rank],
                "role_rank": [rank],
                "role_world_size": [self._places().world_size],
                "exit_code": [failure.exitcode if failure else None],
                "worker_pid": [failure.pid if failure else None],
            }
            error = json.dumps(failure.error_file_data) if failure else None
            source = {"global_rank": rank, "worker_id": str(pids.get(local_rank)), "raw_error": error}
            self._record(state, EventSource.WORKER, more, **source)

    def succeeded(self) -> None:
        self._record("SUCCEEDED", EventSource.AGENT, {})

    def failed(self) -> None:
        """The agent ends with the exception that is being handled."""
        self._record("FAILED", EventSource.AGENT, {}, raw_error=traceback.format_exc())

    def _record(self, state: str, source: EventSource, more: Mapping[str, object], **fields: Any) -> None:
        places, options = self._places(), self._options
        more = {
            "group_world_size": places.machines if places.local else None,
            "entry_point": os.path.basename(self._program.target),
            **more,
        }
        metadata = {
            "run_id": options.run_id,
            "global_rank": None,
            "group_rank": places.machine if places.local else None,
            "worker_id": None,
            "role": options.role,
            "hostname": socket.getfqdn(),
            "state": state,
            "total_run_time": int(time.monotonic() - self._begun),
            "rdzv_backend": self._backend,
            "raw_error": None,
            "metadata": json.dumps(more),
            "agent_restarts": 0,
            "duration_ms": None,
        }
        record(
            Event(f"torchelastic.worker.status.{state}", source, metadata=metadata | fields), options.event_log_handler
        )

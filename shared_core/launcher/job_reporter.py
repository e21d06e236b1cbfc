"""What an agent reports of its job: events for programs, lines for people."""

from __future__ import annotations

import os
import platform
import socket
import time
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from shared_core.config import SwiftConfig
from shared_core.events import EventLog, console
from shared_core.launcher.attempt import Attempt, WorkerPlaces
from shared_core.launcher.console import Change, ConsoleReporter, count, host_of
from shared_core.launcher.logs import last_words
from shared_core.launcher.starting import AgentOptions, Program
from shared_core.launcher.workers import LiveWorker
from shared_core.protocol.failure_policy import Death, FailureBook
from shared_core.protocol.generation import CauseKind, Entry
from shared_core.protocol.worker_env import Resized
from shared_core.system.jobdir import Card
from shared_core.system.process import begun
from shared_core.versions import installed


class JobReporter:
    """Reports one agent's job. ``run_id`` becomes equal on all machines with :meth:`call`."""

    def __init__(self, program: Program, options: AgentOptions, job_dir: Path, book: FailureBook, run_id: str) -> None:
        self._program, self._options, self._job_dir, self.book = program, options, job_dir, book
        self._budget = book.budget
        self.console_reporter = ConsoleReporter(console, begun())
        self.run_id = run_id
        self._events = EventLog(options.events, run_id, job_dir)
        self._attempt: Attempt | None = None
        self._places: WorkerPlaces | None = None
        self._start_told = False
        self._begun = time.time()
        self._events_from = _size(options.events)

    def call(self, run_id: str) -> None:
        """The machines have agreed on the id of this start of the job."""
        self.run_id = run_id
        self._events = EventLog(self._options.events, run_id, self._job_dir)

    def begins(self, attempt: Attempt | None, places: WorkerPlaces | None) -> None:
        """Reports belong to this attempt from now on; None between two. Writes the job's card."""
        self._attempt, self._places, self._start_told = attempt, places, False
        if attempt is not None:
            Card(
                run=self.run_id,
                name=self._options.run_id,
                script=self._program.target,
                host=socket.gethostname(),
                agent=os.getpid(),
                begun=self._begun,
                events=self._options.events or "",
                # Other machines' agents may have begun to write to the same file before this one.
                events_from=0 if attempt.ledger.machines else self._events_from,
            ).write(self._job_dir)

    def emit(self, kind: str, *, rank: int = -1, **fields: Any) -> None:
        generation = self._attempt.generation if self._attempt is not None else 0
        self._events.emit(kind, rank=rank, generation=generation, **fields)

    def warn(self, message: str) -> None:
        self.emit("warning", message=message)

    # -- workers ------------------------------------------------------------------------------------------------------

    def start(self, live: Iterable[LiveWorker], config: SwiftConfig) -> None:
        """Once an attempt: when all first workers run, or before the first failure."""
        attempt, places = self._attempt, self._places
        if self._start_told or attempt is None or places is None:
            return
        self._start_told = True
        pids = {one.rank: one.pid for one in live}
        if not any(attempt.incarnations[rank] for rank in pids):
            machines = [host_of(name) for name in attempt.ledger.machines if name]
            events, note = self._options.events, self._options.note
            self.console_reporter.starts(self._program.target, places.world_size, pids, config, events, machines, note)
        self.emit(
            "start",
            world_size=places.world_size,
            restart=attempt.number,
            standbys=self._options.standbys,
            job_dir=str(self._job_dir),
            agent=os.getpid(),
            run_id=self._options.run_id,
            pids={str(rank): pid for rank, pid in pids.items()},
            script=self._program.target,
            on_failure=config.on_failure,
            **facts(),
            imports=list(self._program.preload if self._options.standbys else ()),
        )

    def replacement(self, one: LiveWorker) -> None:
        spawn_s = time.time() - one.started
        self.emit(
            "replacement_start",
            rank=one.rank,
            pid=one.pid,
            incarnation=one.incarnation,
            spawn_s=spawn_s,
            how=one.how,
            agent=os.getpid(),
            host=socket.gethostname(),
        )

    def failed(self, one: LiveWorker, death: Death, *, continues: bool) -> None:
        planned = death.kind is CauseKind.PLANNED
        words = last_words(death.error.trace if death.error is not None else "", one.request.stderr)
        self.emit(
            "drained" if planned else "failed",
            rank=death.rank,
            cause=death.cause,
            detected=death.detected,
            pid=death.pid,
            incarnation=one.incarnation,
            exit_code=death.exit_code,
            boundaries=death.boundaries,
            **({"last_words": words} if words else {}),
        )
        self.console_reporter.failed(
            death.rank, death.cause, death.detected, death.pid, continues=continues, planned=planned
        )

    def failed_elsewhere(self, entry: Entry) -> None:
        if not entry.planned:
            self.console_reporter.counts(len(entry.failed))
        for cause in entry.causes:
            self.emit(
                "drained" if entry.planned else "failed", rank=cause.who, cause=cause.text, detected=entry.detected
            )

    def generation(self, entry: Entry) -> None:
        self.emit("generation", **entry.event_fields())

    def report(self, said: Mapping[str, Any]) -> None:
        if (done := self.console_reporter.report(said)) is not None:
            stall_s, recomputed_steps, boundary = done
            self._events.emit("resumed", rank=0, stall_s=stall_s, recomputed_steps=recomputed_steps, boundary=boundary)

    # -- the attempt --------------------------------------------------------------------------------------------------

    def restarts(self, entry: Entry, places: WorkerPlaces, config: SwiftConfig, reached: int) -> None:
        """All workers start again; ``reached``: step boundaries that had been passed."""
        line = entry.line
        whence = "from the start" if config.checkpoint.dir else "from the start, as no checkpoint.dir is set"
        if line is not None:
            whence = f"from step boundary {line.boundary}, where their number had changed"
        many = places.world_size
        what = "the worker is back" if many == 1 else f"all {many} workers are back"
        why = "" if config.restarts else entry.reason
        change = Change(time.time(), what, why, whence, reached, None if line is None else line.boundary)
        self.console_reporter.changes(change, tell=places.speaks)

    def resizes(self, before: int, places: WorkerPlaces, line: Resized | None, reached: int) -> None:
        """Another number of workers continues, from ``line``; ``before``: their number so far."""
        workers = places.world_size
        what = f"{count(workers, 'worker')} {'continues' if workers == 1 else 'continue'}"
        boundary = None if line is None else line.boundary
        whence = "" if line is None else f"from step boundary {boundary}"
        change = Change(time.time(), what, "", whence, reached, boundary, before)
        self.console_reporter.changes(change, tell=places.speaks)

    # -- the end ------------------------------------------------------------------------------------------------------

    def ends(self, result: str, *, rank: int = -1, reason: str | None = None) -> None:
        fields = {} if reason is None else {"reason": reason}
        self.emit(
            "end",
            rank=rank,
            result=result,
            **fields,
            replaced=self._budget - self.book.budget,
            agent=os.getpid(),
            host=socket.gethostname(),
        )

    def succeeds(self, places: WorkerPlaces) -> None:
        self.ends("succeeded")
        if places.speaks:
            self.console_reporter.succeeds(places.world_size)

    def ends_without(self, absent: Collection[int], words: str) -> None:
        console(f"the job ends without {words}: the others have done the work")
        self.console_reporter.forget(absent)


def _size(path: str | None) -> int:
    try:
        return os.path.getsize(path) if path else 0
    except OSError:
        return 0


#: Packages whose versions matter to a job.
_PACKAGES = ("torch", "swift-recovery")


def facts() -> dict[str, Any]:
    """This machine's name, the processors that this process may use, and versions of what is installed."""
    packages = {name: found for name in _PACKAGES if (found := installed(name)) is not None}
    cpus = len(os.sched_getaffinity(0))
    return {"host": socket.gethostname(), "cpus": cpus, "python": platform.python_version()} | packages

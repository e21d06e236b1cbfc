"""Workers of this machine that fail: what the others are told first, and who takes their place."""

from __future__ import annotations

import time
from collections.abc import Collection

from shared_core.config import SwiftConfig
from shared_core.events import console
from shared_core.launcher.attempts import Attempts
from shared_core.launcher.job_reporter import JobReporter
from shared_core.launcher.logs import ERROR_FILE
from shared_core.launcher.wakeup import Wakeup
from shared_core.launcher.workers import CANCELLED, LiveWorker, WorkerPool
from shared_core.protocol import progress_file
from shared_core.protocol.agent_phase import AgentEvent, AgentPhase
from shared_core.protocol.failure_policy import AS_ANY, Death, FailureBook, Verdict
from shared_core.protocol.generation import Entry, EntryKind
from shared_core.protocol.resizing import Resizing
from shared_core.system import process

Failed = list[tuple[LiveWorker, Death]]


class WorkerFailures:
    """Answers the deaths of workers. ``alone``: there is no other machine."""

    def __init__(
        self,
        config: SwiftConfig,
        alone: bool,
        attempts: Attempts,
        worker_pool: WorkerPool,
        wakeup: Wakeup,
        job_reporter: JobReporter,
        book: FailureBook,
        resizing: Resizing,
    ) -> None:
        self._config, self._alone, self._attempts, self._worker_pool = config, alone, attempts, worker_pool
        self._wakeup, self._job_reporter, self._book, self._resizing = wakeup, job_reporter, book, resizing

    def handle_worker_exits(self, dead: list[tuple[LiveWorker, int]]) -> None:
        """Workers died, with these exit codes: write the next generation first, then answer."""
        detected, attempts = time.time(), self._attempts
        if attempts.phase is AgentPhase.ENDING:
            _note_late(dead)
            return
        failed = [(one, self._death(one, code, detected)) for one, code in dead]
        if attempts.phase is AgentPhase.RESIZING:  # a replacement that was too late has no part in what follows
            failed = [(one, death) for one, death in failed if death.rank in self._resizing.stay]
        if not failed:
            return
        deaths = [death for _, death in failed]
        attempts.roster.lose(death.rank for death in deaths)
        everyone = self._alone and attempts.roster.failed >= set(attempts.places.ranks)
        restart = together = everyone or self._config.restarts
        verdicts = [self._book.judge(death, charged=not (together and i)) for i, death in enumerate(deaths)]
        ending = next((verdict for verdict in verdicts if verdict.action == "end"), None)
        entry: Entry | None = None
        if ending is None and not restart:
            # First what the survivors wait for; the user is told last.
            entry = self._write(deaths, detected)
            if entry is None:
                self._wakeup.tell()  # another machine ended this attempt first
                return
            restart = self._answer(entry, failed, verdicts)
        attempts.tell_start()
        continues = entry is not None and entry.absent is not None and not restart
        for one, death in failed:
            self._job_reporter.failed(one, death, continues=continues)
        if ending is not None:
            self._fail(ending)
        elif restart:
            if not together:
                self._book.count_once(len(deaths))
            why = "on_failure is restart" if self._config.restarts else "all workers failed"
            attempts.restart_all(why, max(verdict.delay_s for verdict in verdicts), line=self._resizing.line)
        elif entry is not None:
            self._job_reporter.generation(entry)

    def _write(self, deaths: list[Death], detected: float) -> Entry | None:
        """The next generation. With several machines a failed worker is replaced; on one, the others may continue."""
        attempts = self._attempts
        shrinks = self._alone and self._resizing.shrinks(attempts.now.goodbyes())
        stay = sorted(set(attempts.places.ranks) - attempts.roster.failed) if shrinks else []
        return attempts.now.next_generation(deaths, detected, stay)

    def _answer(self, entry: Entry, failed: Failed, verdicts: list[Verdict]) -> bool:
        """Do what the generation asks for; True if all workers have to start again instead."""
        attempts, resizing = self._attempts, self._resizing
        if entry.kind is EntryKind.DRAIN:
            if not entry.stay:
                return True  # nobody is left who could give its state
            resizing.begin(entry.stay, len(entry.stay) if self._alone else resizing.target)
            attempts.step(AgentEvent.CHANGE)
            return False
        if len(entry.absent or ()) == len(entry.incarnations):
            return True  # nobody is left who could admit a replacement
        resizing.expect([death.rank for _, death in failed], time.monotonic())
        delay = self._config.reroute.rejoin_after_s if entry.absent is not None else 0.0
        for (one, _), verdict in zip(failed, verdicts, strict=True):
            attempts.roster.replace_in(max(verdict.delay_s, delay), one.local_rank)
        attempts.start_due()
        return False

    def _death(self, one: LiveWorker, code: int, detected: float) -> Death:
        path, error = one.request.env.get(ERROR_FILE, ""), one.raised(code)
        cause = one.cause or process.describe_exit(code)
        if error is not None:
            cause = f"{error.summary[:200]} (at {error.place})"
        elif code == 0:
            cause = "exited with code 0 without saying goodbye"
        progress = progress_file.read_progress(self._attempts.progress_file(one.rank))
        boundaries = progress[0] if progress else 0
        return Death(one.rank, one.pid, code, cause, boundaries, error, path if error else "", detected, one.kind)

    def _fail(self, verdict: Verdict) -> None:
        assert verdict.first is not None
        first = verdict.first
        self._job_reporter.console_reporter.fails(verdict.reason)
        self._job_reporter.ends("failed", rank=first.rank, reason=verdict.reason)
        # torchelastic has its own texts for signals and for the content of an error file
        words = first.cause if first.exit_code >= 0 and not first.error_file else ""
        if verdict.reason.endswith(AS_ANY):
            words = verdict.reason
        self._attempts.fail(first.rank, first.pid, first.exit_code, first.error_file, words)


def _note_late(dead: Collection[tuple[LiveWorker, int]]) -> None:
    for one, code in dead:
        if code != 0 and one.cause != CANCELLED:
            was = "was " if code < 0 else ""
            console(
                f"rank {one.rank} had finished its work when it {was}{process.describe_exit(code)}: nothing is lost"
            )

"""Workers of this machine that fail: what the others are told first, and who takes their place."""

from __future__ import annotations

import time
from collections.abc import Collection

from shared_core.config import SwiftConfig
from shared_core.events import console
from shared_core.launcher.attempts import Attempts
from shared_core.launcher.logs import ERROR_FILE
from shared_core.launcher.workers import CANCELLED, LiveWorker
from shared_core.protocol import progress_file
from shared_core.protocol.agent_phase import AgentEvent, AgentPhase
from shared_core.protocol.failure_policy import AS_ANY, Death, ResponsePlan
from shared_core.protocol.generation import CauseKind, Entry
from shared_core.protocol.leaving import EXIT_LEFT
from shared_core.system import process

Failed = list[tuple[LiveWorker, Death]]


class WorkerFailures:
    """Answers the deaths of workers. ``alone``: there is no other machine."""

    def __init__(self, config: SwiftConfig, alone: bool, attempts: Attempts) -> None:
        self._config, self._alone, self._attempts = config, alone, attempts
        self._job_reporter, self._book, self._resizing = attempts.job_reporter, attempts.book, attempts.resizing

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
        attempts.workers.lose(death.rank for death in deaths)
        plan, entry = self._plan(deaths), None
        if plan.waits_for_generation:
            # First what the survivors wait for; the user is told last.
            entry = attempts.now.next_generation(deaths, detected, plan.stay)
            if entry is None:
                self._book.charge(plan)
                attempts.wakeup.tell()  # another machine ended this attempt first
                return
            plan = plan.as_written(entry, self._config.reroute.rejoin_after_s)
            self._begin(plan, entry, failed)
        self._book.charge(plan)
        attempts.tell_start()
        for one, death in failed:
            self._job_reporter.failed(one, death, continues=plan.response == "reroute")
        if plan.response == "end":
            self._fail(plan)
        elif plan.response == "restart":
            attempts.restart_all(plan.reason, max(plan.delays_s), line=self._resizing.line)
        elif entry is not None:
            self._job_reporter.generation(entry)

    def _plan(self, deaths: list[Death]) -> ResponsePlan:
        """With several machines a failed worker is replaced; on one, the others may continue."""
        attempts = self._attempts
        others = sorted(set(attempts.places.ranks) - attempts.workers.failed)
        shrinks = self._alone and self._resizing.shrinks(attempts.now.goodbyes())
        everyone, restarts = self._alone and not others, self._config.restarts
        return self._book.respond(deaths, restarts=restarts, everyone=everyone, stay=others if shrinks else ())

    def _begin(self, plan: ResponsePlan, entry: Entry, failed: Failed) -> None:
        """What the generation asks of this agent."""
        attempts, resizing = self._attempts, self._resizing
        if plan.response == "shrink":
            resizing.begin(entry.stay, len(entry.stay) if self._alone else resizing.target)
            attempts.step(AgentEvent.CHANGE)
        elif plan.response != "restart":
            resizing.expect([death.rank for _, death in failed], time.monotonic())
            for (one, _), delay_s in zip(failed, plan.delays_s, strict=True):
                attempts.workers.replace_in(delay_s, one.local_rank)
            attempts.start_due()

    def _death(self, one: LiveWorker, code: int, detected: float) -> Death:
        path, error = one.request.env.get(ERROR_FILE, ""), one.raised(code)
        cause = one.cause or process.describe_exit(code)
        if error is not None:
            cause = f"{error.summary[:200]} (at {error.place})"
        elif code == 0:
            cause = "exited with code 0 without saying goodbye"
        progress = progress_file.read_progress(self._attempts.progress_file(one.rank))
        boundaries = progress[0] if progress else 0
        place, kind = path if error else "", one.kind
        if one.leaves and code == EXIT_LEFT:
            cause, kind = f"drained: {one.leaves}", CauseKind.PLANNED
        return self._book.as_before(Death(one.rank, one.pid, code, cause, boundaries, error, place, detected, kind))

    def _fail(self, plan: ResponsePlan) -> None:
        assert plan.first is not None
        first = plan.first
        self._job_reporter.console_reporter.fails(plan.reason)
        self._job_reporter.ends("failed", rank=first.rank, reason=plan.reason)
        # torchelastic has its own texts for signals and for the content of an error file
        words = first.cause if first.exit_code >= 0 and not first.error_file else ""
        if plan.reason.endswith(AS_ANY):
            words = plan.reason
        self._attempts.fail(first.rank, first.pid, first.exit_code, first.error_file, words)


def _note_late(dead: Collection[tuple[LiveWorker, int]]) -> None:
    for one, code in dead:
        if code != 0 and one.cause != CANCELLED:
            was = "was " if code < 0 else ""
            console(
                f"rank {one.rank} had finished its work when it {was}{process.describe_exit(code)}: nothing is lost"
            )

"""What reaches the agent: entries of other agents, messages of workers in the store, requests at its socket."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from shared_core.config import CHECKPOINT_OPTIONS
from shared_core.errors import ConfigError
from shared_core.events import console
from shared_core.launcher.attempts import Attempts
from shared_core.launcher.other_machines import OtherMachines, Resizes
from shared_core.launcher.persisting import LastCheckpoint
from shared_core.protocol.agent_phase import AgentEvent
from shared_core.protocol.generation import CauseKind, Entry, EntryKind
from shared_core.protocol.worker_messages import DAMAGED, LEAVES, PREPARED, REPORTS, SAVED


class ControlChannel:
    """Reads the store and the agent's socket, and acts on what is there. ``machines``: None without other machines;
    ``leave``: called when another agent was asked for a leave of this machine's.
    """

    def __init__(
        self,
        attempts: Attempts,
        resizes: Resizes,
        machines: OtherMachines | None,
        last_checkpoint: LastCheckpoint,
        leave: Callable[[Any], None],
    ) -> None:
        self._attempts, self._resizes, self._machines, self._workers = attempts, resizes, machines, attempts.workers
        self._job_reporter, self._last_checkpoint = attempts.job_reporter, last_checkpoint
        self._words: dict[str, Callable[[Any], None]] = {
            "divergent": self._divergent,
            DAMAGED: self._damaged,
            "fail": self._fail,
            SAVED: self._saved,
            REPORTS: self._report,
            PREPARED: lambda said: self._workers.spares.ready(said),
            "handed": lambda said: self._resizes.handed_on(said.generation, said.boundary),
            "declined": lambda said: self._resizes.declined(said.generation, said.reason),
            "restart": self._restart,
            LEAVES: leave,
        }

    def listen(self) -> None:
        """Act on all that is new, until the attempt ends."""
        attempts, attempt = self._attempts, self._attempts.now

        def continues() -> bool:
            return attempts.now is attempt and attempts.result is None

        for pid, wish in attempts.control.wishes():
            self._wish(pid, wish)
        for entry in attempt.ledger.follow():
            self._follow(entry)
            if not continues():
                return
        for name, value in attempt.look():
            if name in self._words:
                self._words[name](value)
            if not continues():
                return
        if attempts.phase.trains and attempt.release():
            attempts.step(AgentEvent.RELEASED)
        if attempts.phase.trains and self._machines is not None:
            self._machines.look()

    def _follow(self, entry: Entry) -> None:
        attempts = self._attempts
        if entry.kind is EntryKind.RELEASE:
            attempts.step(AgentEvent.RELEASED)
        elif entry.kind is EntryKind.FAIL:
            self._job_reporter.console_reporter.fails(entry.reason)
            attempts.fail(entry.rank, 0, 1, "", entry.reason)
        elif entry.kind is EntryKind.RESTART:
            attempts.restart(entry)
        elif entry.kind is EntryKind.RESIZE:
            attempts.resize(entry)
        else:
            self._resizes.note(entry)
            if not entry.planned:
                self._job_reporter.console_reporter.counts(len(entry.failed))
            if self._machines is not None:
                self._machines.check()  # it may have given our place away

    # -- words of the workers -----------------------------------------------------------------------------------------

    def _divergent(self, wrong: list[int]) -> None:
        for one in list(self._workers.pool.live.values()):
            if one.rank in wrong:
                one.kill("corruption: its state differs from its replicas'", CauseKind.DIVERGENT)

    def _damaged(self, said: Any) -> None:
        one = self._workers.pool.live.get(said.pid)
        if one is not None and one.rank == said.rank:
            one.kill(f"corruption: {said.what}", CauseKind.DIVERGENT)

    def _fail(self, said: Any) -> None:
        rank, message = said.rank, said.message
        self._job_reporter.console_reporter.fails(f"rank {rank}: {message}")
        self._job_reporter.ends("failed", rank=rank, reason=message)
        pid = next((one.pid for one in self._workers.pool.live.values() if one.rank == rank), 0)
        self._attempts.fail(rank, pid, 1, "", message)

    def _saved(self, said: Any) -> None:
        self._last_checkpoint.saved(asdict(said))
        self._attempts.wakeup.tell()  # look at the signals again

    def _wish(self, pid: int, wish: dict[str, Any]) -> None:
        """A script on this machine asks for checkpoints, and the launcher's own options do not."""
        before = self._workers.starter.config
        try:
            if pid not in self._workers.pool.live:
                raise ConfigError(f"process {pid} is no worker of this machine")
            if others := sorted(wish.keys() - CHECKPOINT_OPTIONS):
                raise ConfigError(f"{', '.join(others)} is not for a script to say")
            config = before.merged(wish)
        except ConfigError as error:
            console(f"the checkpoint options that a worker reported are ignored: {error}")
            return
        self._last_checkpoint.want()
        if config.checkpoint.dir != before.checkpoint.dir:
            self._job_reporter.console_reporter.checkpoints(config.checkpoint.dir)
        self._workers.starter.use(config)

    def _report(self, said: Any) -> None:
        self._job_reporter.report({key: each for key, each in asdict(said).items() if each is not None})

    def _restart(self, said: Any) -> None:
        reason = said.reason
        if self._attempts.book.take():
            # No line: a worker that asks for this could not continue from the present one.
            self._attempts.restart_all(reason, 0.0, line=None)
            return
        reason += "; no replacements are left (--max-restarts)"
        self._job_reporter.console_reporter.fails(reason)
        self._job_reporter.ends("failed", reason=reason)
        self._attempts.fail(self._attempts.places.ranks[0], 0, 1, "", reason)

"""What many parts of a worker need: those that recover, and those that report or make checkpoints. Its phase is kept
here, with what it has heard: the one place where a phase changes. And how a worker ends what cannot continue: all
workers start again, or the job ends with an error.
"""

from __future__ import annotations

import os
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from shared_core.errors import WaitTimeout, told
from shared_core.events import EventLog, console
from shared_core.protocol.generation import Entry, EntryKind
from shared_core.protocol.worker_env import WorkerEnv
from shared_core.protocol.worker_phase import WorkerAction, WorkerEvent, WorkerPhase, heard, transition
from shared_core.waiting import Wait, ranks_text
from shared_core.worker.comm.runtime import Runtime
from shared_core.worker.link import JobStore
from shared_core.worker.start import hot_standby

#: Exit code of a replacement whose place, or state, a further failure made useless; the agent starts another.
EXIT_STALE = 75
#: How long the launcher may take to end a worker that has ended the job, in seconds.
_END_S = 60.0


class FatalActions:
    """Ends one worker, or the job, when it cannot continue. A hot standby only ends itself: it holds no rank yet."""

    def __init__(self, runtime: Runtime, store: JobStore) -> None:
        self._runtime, self._store = runtime, store

    def fall_back(self, reason: str) -> NoReturn:
        """Nobody can serve a replacement: all workers start again. Does not return. Takes the runtime's lock."""
        _end_spare(reason)
        self._store.tell("restart", reason)
        with self._runtime.lock:
            try:
                wait_for_change(self._runtime, "the launcher to restart all workers", lambda: False)
            except WaitTimeout as error:
                console(str(error))
        os._exit(1)

    def cannot_complete(self, what: str) -> NoReturn:
        """Restart all workers: the program is in an operation that waits for absent ranks. Does not return."""
        absent = sorted(self._runtime.absent)
        self.fall_back(
            f"rank {self._runtime.rank} is in {what}, which waits for all ranks, and {ranks_text(absent)} "
            f"{'is' if len(absent) == 1 else 'are'} absent. With on_failure='reroute' only training steps continue "
            "without a failed rank: leave other collectives out of the loop, or use on_failure='replace'"
        )

    def fail(self, error: BaseException) -> None:
        """Tell the launcher to end the job with this error. Returns, except in a hot standby."""
        _end_spare(str(error))
        self._store.tell("fail", {"rank": self._runtime.rank, "message": told(error)})

    def give_up(self, error: BaseException) -> NoReturn:
        """As :meth:`fail`, then wait to be killed. Does not return."""
        self.fail(error)
        self.await_end()

    def await_end(self) -> NoReturn:
        """The launcher ends this worker; should it not, the process exits by itself."""
        threading.Event().wait(_END_S)
        os._exit(1)

    def break_down(self, error: BaseException) -> NoReturn:
        """As :meth:`give_up`, for an unexpected error: prints the traceback here first."""
        traceback.print_exception(error)
        self.give_up(error)


def _end_spare(reason: str) -> None:
    if hot_standby.is_hot_standby():
        console(f"a hot standby ends: {reason}")
        os._exit(1)


def wait_for_change(runtime: Runtime, whom: str, done: Callable[[], bool], *, speaks: bool = True) -> None:
    """Wait on ``runtime.changed``, whose lock the caller holds, until ``done()``. ``whom`` is text for the user. Raises
    WaitTimeout after the runtime's ``wait_timeout_s``.
    """
    advice = "See above why that does not happen; raise detection.wait_timeout_s if it is only slow."
    who, limit_s = f"rank {runtime.rank}", runtime.wait_timeout_s
    Wait(who, whom, limit_s, speaks=lambda: speaks, advice=advice).until(runtime.changed, done)


class Lifecycle:
    """Keeps the phase. What it does, it does under the runtime's lock.

    Attributes:
        entries: of the ledger, by generation, as far as this worker has heard them.
        born: generation in which this worker starts; of a hot standby, that in which it takes its place.
        acting: held by the thread that acts on an entry; that of a later one waits until it has given up.
    """

    def __init__(self, env: WorkerEnv, runtime: Runtime) -> None:
        self._env, self._runtime = env, runtime
        self.phase = WorkerPhase.STARTING
        self.born = env.generation
        self.entries: dict[int, Entry] = {}
        self.acting = threading.Lock()

    def born_in(self, generation: int) -> None:
        self.born = generation

    @property
    def newest(self) -> int:
        return self._runtime.latest

    @property
    def entry(self) -> Entry | None:
        """Of the newest generation; None for the first."""
        return self.entries.get(self.newest)

    @property
    def joins(self) -> bool:
        """Whether this is a replacement that has not taken the failed worker's place yet."""
        return self._env.incarnation > 0 and self._runtime.generation < 0

    @property
    def changing(self) -> bool:
        """Whether the number of workers changes, so that nothing is formed."""
        return self.entry is not None and self.entry.kind is EntryKind.DRAIN

    def ended(self, generation: int) -> bool:
        """Whether a later generation is known: what is under way in this one is given up."""
        return self.newest > generation

    def break_off(self, entry: Entry) -> bool:
        """Cut the connections of the generations before this entry: whoever waits for a failed rank must not wait for
        us. Call it while acting. Blocks until gloo has given everything back.

        Returns whether there is something left to be done about the entry. There is not where its generation or a later
        one is installed already, because that thread came first; then nothing is cut.
        """
        if self._runtime.generation >= entry.generation:
            return False
        self._runtime.generations.break_off()
        return not self.ended(entry.generation)

    def hear(self, entry: Entry) -> tuple[WorkerAction, ...]:
        """An entry of the ledger has come. Returns what is to be done about it."""
        event, runtime = heard(entry, self._env.rank, self._env.incarnation), self._runtime
        with runtime.lock:
            if event not in (WorkerEvent.OVER, WorkerEvent.REPLACED):
                self.entries[entry.generation] = entry
                runtime.latest = entry.generation
                runtime.absent = entry.absent or frozenset()
                runtime.changed.notify_all()
            return self.step(event)

    def step(self, event: WorkerEvent) -> tuple[WorkerAction, ...]:
        """Change the phase. Returns what is to be done about it. Raises IllegalWorkerEvent if it cannot happen in
        this phase.
        """
        with self._runtime.lock:
            self.phase, actions = transition(self.phase, event)
            # In these it stays as it was, while the program's thread is in there.
            if self.phase not in (WorkerPhase.JOINING, WorkerPhase.ENDED):
                self._runtime.starting = self.phase.answers
            return actions

    def why(self, do: str, generation: int) -> str:
        """What ranks are waited for to do, and why it takes long, for the line that says so."""
        entry = self.entries.get(generation)
        if entry is not None and None in entry.machines:
            return f"to {do} (their machine failed, and no other one has taken its place yet)"
        if entry is None or not entry.failed:
            return f"to {do}"
        its = "its replacement runs" if len(entry.failed) == 1 else "their replacements run"
        return f"to {do} ({ranks_text(entry.failed)} failed, {its} the script up to there)"


@dataclass(frozen=True, eq=False)
class Context:
    """Made once, at the start of a worker."""

    env: WorkerEnv
    runtime: Runtime
    lifecycle: Lifecycle
    store: JobStore
    events: EventLog
    fatal_actions: FatalActions

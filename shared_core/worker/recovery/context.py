"""What many parts of a worker need: those that recover, and those that report or make checkpoints. Its phase is kept
here, with what it has heard: the one place where a phase changes.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from shared_core.events import EventLog
from shared_core.protocol.generation import Entry, EntryKind
from shared_core.protocol.worker_env import WorkerEnv
from shared_core.protocol.worker_phase import WorkerAction, WorkerEvent, WorkerPhase, heard, transition
from shared_core.waiting import ranks_text
from shared_core.worker.comm.runtime import Runtime
from shared_core.worker.comm.state import FatalActions
from shared_core.worker.link import JobStore


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
        """Change the phase, and return what is to be done about it. Raises IllegalWorkerEvent."""
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

"""What pipelines without replicas need: replacements run on from a checkpoint with logged messages, and others help."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from shared_core.system import threads
from shared_core.worker.comm import Runtime
from shared_core.worker.comm.compute_lock import ComputeLock
from shared_core.worker.comm.gloo import InnerGroup
from shared_core.worker.messages.disk_log import DiskLog
from shared_core.worker.recovery.commits import Commits
from shared_core.worker.recovery.exchange import Replaying


class Replays:
    """Replays of this worker, and of others that it helps.

    Attributes:
        commits: by which the ranks agree how much of the log is kept.
        own: set in a replacement that runs from a checkpoint, or from the beginning, until its replay has ended.
    """

    def __init__(self, runtime: Runtime, log: DiskLog, commits: Commits) -> None:
        self._runtime, self._log, self.commits = runtime, log, commits
        self._helper: Callable[[Replaying], None] | None = None
        self.own: Replaying | None = None

    def begin(self, replaying: Replaying | None) -> None:
        """This replacement replays what the failed worker did; None: nothing is to be replayed."""
        self.own = replaying

    def end(self) -> None:
        self.own = None

    def regroup(self, together: Sequence[int]) -> None:
        """From now on these ranks, this one among them, start again together: messages between them are not logged."""
        self._log.regroup(together, self._runtime.boundary)

    def note_messages(self, note: dict[str, Any]) -> None:
        """Set the note in the log on disk of the messages sent from now on; plain data."""
        self._log.describe(note)

    def help(self, helper: Callable[[Replaying], None]) -> None:
        """Have ``helper`` called, on a thread, when others replay while this worker waits for them. Call it on the
        program's thread.
        """
        self._runtime.compute_lock.begin()
        self._helper = helper

    def begun(self, replaying: Replaying) -> None:
        if self._helper is not None:
            threads.start(self._helper, (replaying,), name="swift-help")

    @property
    def compute_lock(self) -> ComputeLock:
        return self._runtime.compute_lock

    def side_group(self, replaying: Replaying, name: str, ranks: Sequence[int]) -> InnerGroup:
        """A group of some ranks for the time of a replay; see :meth:`Connections.side_group`."""
        return self._runtime.connections.side_group(name, ranks, replaying.generation)

    def drop_side(self, inner: InnerGroup) -> None:
        self._runtime.connections.drop_side(inner)

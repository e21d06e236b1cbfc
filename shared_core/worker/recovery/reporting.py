"""What is told of recoveries: events in the job's log, and calls of those in this worker who listen."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from shared_core.events import console
from shared_core.protocol.worker_env import WorkerEnv
from shared_core.worker.recovery.context import Context
from shared_core.worker.recovery.exchange import Received
from shared_core.worker.start import truncation
from shared_core.worker.state.updates import Updates

Listener = Callable[[dict[str, Any]], None]


class RecoveryReporter:
    """The recoveries of one worker. The program's thread calls; :meth:`recovered` and :meth:`rerouted` are for recovery
    threads. ``rolled_back`` is called when replacements have gone back to a checkpoint.
    """

    def __init__(self, context: Context, updates: Updates, rolled_back: Callable[[], None]) -> None:
        env, self._events, self._runtime = context.env, context.events, context.runtime
        self._updates, self._rolled_back, self._report = updates, rolled_back, context.store.report
        self._job_dir = env.job_dir
        #: What the agent is told once this worker trains; None where nobody waits for it.
        self._awaited: dict[str, Any] | None = None
        self.begin(env)
        self._begun = False
        #: Step boundary that this worker began from, and the checkpoint, if it is one.
        self._line = (0, "")
        self._boundaries = 0
        self._until = -1
        #: This replacement computes the job again from its beginning.
        self._from_scratch = self._behind = False
        self._recovered: deque[dict[str, Any]] = deque()
        self._listeners: list[Listener] = []
        self._stalled_since: float | None = None

    def begin(self, env: WorkerEnv) -> None:
        """Be that of the worker of ``env``; again in a forked copy, where those that listen stay."""
        self._original = env.incarnation == 0
        self._first = env.rank == 0 and self._original
        self._awaited = {"rank": env.rank} if self._first and env.restart else None

    def emit(self, kind: str, **fields: Any) -> None:
        """Append an event to the job's log, with the rank and the generation."""
        self._events.emit(kind, rank=self._runtime.rank, generation=self._runtime.generation, **fields)

    def listen(self, listener: Listener) -> None:
        """Have ``listener`` called with the fields of each recovery, in the next :meth:`deliver`."""
        self._listeners.append(listener)

    def deliver(self) -> None:
        """Tell those that listen, on this thread. Called at each step boundary."""
        if self._awaited is not None:
            self._boundaries += 1
            if self._boundaries > 1:  # the first batch is done, perhaps without an update
                self._say_so()
        while self._recovered:
            fields = self._recovered.popleft()
            for listener in self._listeners:
                listener(fields)

    def joined(self, received: Received | None, **fields: Any) -> None:
        """This replacement has joined; None if at the beginning of the script."""
        self._awaited = (self._awaited or {}) | {"rank": self._runtime.rank}
        self._boundaries = 1 if received else 0
        self._from_scratch = received is None
        self._until = received.replaying.complete if received and received.replaying else -1
        self.emit(
            "replacement_ready",
            bytes_moved=received.nbytes if received else 0,
            served_operations=received.replayed if received else 0,
            boundary=received.boundary.index if received and received.boundary else 0,
            recomputed_steps=self._updates.recomputed,
            **fields,
        )

    def recovered(self, fields: dict[str, Any]) -> None:
        """Recovery thread of a survivor: a generation is formed. ``generation`` and ``detected``, in seconds since the
        epoch, are among the fields of the event.
        """
        if fields.get("resolution") == "replay":
            self._rolled_back()
        self._events.emit(
            "recovered",
            rank=self._runtime.rank,
            stall_s=time.time() - fields["detected"],
            recomputed_steps=self._updates.recomputed,
            log_bytes=self._runtime.groups.log_bytes(),
            spilled_bytes=self._runtime.results.spilled_bytes,
            **fields,
        )
        self._recovered.append(fields)
        self._stalled_since = fields["detected"]

    def rerouted(self, detected: float) -> None:
        """Recovery thread of a survivor that continues. ``detected`` is in seconds since the epoch."""
        self._stalled_since = detected

    def began(self, boundary: int, whence: str) -> None:
        """The place it begins from is reached. ``whence``: the checkpoint of all, in words; else empty."""
        self._line = (boundary, whence)
        if self._awaited is not None:
            self._awaited |= {"boundary": boundary, "whence": whence}
        elif whence and self._first:
            console(f"the job continues from {whence}")

    def passed(self) -> None:
        """This worker has come to a batch; rank 0's first worker says when that is its first."""
        if self._begun:
            return
        self._begun = True
        if self._original:
            truncation.training_begins(self._job_dir, self._runtime.rank)
        if self._first:
            boundary, whence = self._line
            self.emit("began", boundary=boundary, whence=whence)

    def _say_so(self) -> None:
        if self._updates.version <= self._until:
            return  # it catches up with the others
        if self._from_scratch and any(group.replay for group in self._runtime.groups.values()):
            if not self._behind:
                self._behind = True
                self._report({"rank": self._runtime.rank, "pid": os.getpid(), "time": time.time(), "behind": True})
            return
        said, self._awaited = self._awaited, None
        self._report({"pid": os.getpid(), "time": time.time()} | (said or {}))

    def updated(self) -> None:
        if self._awaited is not None:
            self._say_so()
        if self._stalled_since is not None:
            since, self._stalled_since = self._stalled_since, None
            self.emit("resumed", stall_s=time.time() - since, recomputed_steps=self._updates.recomputed)

    def memory(self) -> None:
        """Log how much memory the logs took at most; called when the process ends."""
        replicated = self._updates.replicated
        self.emit(
            "log_memory",
            peak_bytes=self._runtime.results.peak_bytes,
            spilled_bytes=self._runtime.results.spilled_bytes,
            parameter_bytes=replicated.nbytes if replicated is not None else 0,
        )

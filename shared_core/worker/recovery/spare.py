"""A hot standby: it runs the script while its rank's worker lives, up to where its way depends on that one.

Up to there it does what any replacement does: start-up operations are answered from the records of the worker whose
place it may take. It says nothing to the job, and publishes nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict

from shared_core.faults import inject
from shared_core.protocol.codec import Count, decode
from shared_core.protocol.frontier import StepBoundary
from shared_core.protocol.preparing import EXIT_UNFIT, Prepared, place_key
from shared_core.protocol.worker_env import WorkerEnv
from shared_core.waiting import FOREVER_S
from shared_core.worker.job_store import JobStore
from shared_core.worker.link import connect_store
from shared_core.worker.start import hot_standby
from shared_core.worker.state.publications import SharedMemoryPublisher


class Spare:
    """The part of a worker that is a hot standby, until it has a place; ``waits`` while it has none. In all others it
    does nothing. The publications are those of its rank, which the living worker writes.
    """

    def __init__(self, env: WorkerEnv, store: JobStore, publisher: SharedMemoryPublisher) -> None:
        self._store, self._publisher = store, publisher
        self.begin(env, forked=False)

    def begin(self, env: WorkerEnv, *, forked: bool) -> None:
        """Be that of the worker that ``env`` describes. ``forked``: it is a copy of the worker whose place it may take,
        and has not run the script itself.
        """
        self._env, self._forked = env, forked
        self.waits = env.spare
        #: Whether entry calls were finished, as far as this one has asked, and ends of calls that it has passed.
        self._finished: dict[int, bool] = {}
        self._passed: list[int] = []
        self._then: list[Callable[[], None]] = []

    def then(self, call: Callable[[], None]) -> None:
        """Have ``call`` run when there is a place."""
        self._then.append(call)

    def finished(self, entry: int) -> bool:
        """Whether the worker of the rank has finished an entry call by now. Remembers the answer for :meth:`serves`."""
        self._finished[entry] = self._publisher.has_end(entry)
        return self._finished[entry]

    def passes_end(self, entry: int) -> bool:
        """Whether the worker of the rank has continued from the end of this entry call, so that this one does, too."""
        newest = self._publisher.boundaries()[-1:]
        if not newest or (newest[0].entry, newest[0].kind) == (entry, "end"):
            return False
        self._passed.append(entry)
        return True

    def await_place(self) -> int:
        """Block until the place is free. Returns the generation in which this worker is to take it. The process exits
        if it can never take the place, or the agent is gone. Raises DamagedRecord if what the launcher has said is
        no generation.
        """
        env = self._env
        if any(boundary.replicas == [env.rank] for boundary in self._publisher.boundaries()):
            os._exit(EXIT_UNFIT)
        until = next((str(self._publisher.end_file(e)) for e, ended in self._finished.items() if not ended), "")
        # It blocks, so it has a connection of its own.
        store = connect_store(FOREVER_S, env).below(env.prefix)
        self._store.prepared(asdict(Prepared(env.rank, env.incarnation, os.getpid(), until, self._forked)))
        inject.point("spare.waits")
        key = place_key(env.rank, env.incarnation)
        try:
            store.wait([key])
            raw = store.get(key)
        except RuntimeError:
            os._exit(1)  # the store is gone: so is the agent
        generation: int = decode(raw, Count, key)
        hot_standby.take_place(generation)
        return generation

    def take_place(self) -> None:
        """The place is free, and this worker takes it."""
        self.waits = False
        self._publisher.look_again()
        for call in self._then:
            call()

    def serves(self, target: StepBoundary | None, finished: Callable[[int], bool]) -> bool:
        """Whether the way that this one has come leads to ``target``, its place; None where the others do not wait for
        this one. ``finished`` says whether an entry call was finished, as it is known now.
        """
        behind = target is not None and target.kind == "end" and target.entry in self._passed
        return not behind and all(finished(entry) == ended for entry, ended in self._finished.items())

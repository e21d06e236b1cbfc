"""How a worker ends what cannot continue: all workers start again, or the job ends with an error."""

from __future__ import annotations

import os
import threading
import traceback
from collections.abc import Callable
from typing import NoReturn

from shared_core.errors import WaitTimeout, told
from shared_core.events import console
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

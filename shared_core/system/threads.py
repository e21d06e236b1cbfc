"""Threads of a worker that its peers depend on, and what else needs one of the system."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from shared_core.events import console
from shared_core.faults import inject
from shared_core.resources import FIRST_S, Retries, advice, no_thread

_Made = TypeVar("_Made")
#: Seconds for which a worker tries to get a thread.
MAX_WAIT_S = 30.0


def start(target: Callable[..., Any], args: Sequence[Any] = (), *, name: str) -> threading.Thread:
    """Start a daemon thread, as :func:`persist` does. ``FaultInjected`` by a fault at the point ``thread``."""

    def begin() -> threading.Thread:
        inject.point("thread")
        thread = threading.Thread(target=target, args=tuple(args), name=name, daemon=True)
        thread.start()
        return thread

    return persist(begin, "start a thread")


def persist(make: Callable[[], _Made], what: str) -> _Made:
    """Make something that needs a thread.

    Where the system has no thread left it is tried again for :data:`MAX_WAIT_S`. Then this process ends, as a failed
    one: without the thread its peers would wait for it for ever.

    Args:
        make: raises RuntimeError or OSError where there is no thread; other errors are its caller's.
        what: "start a thread", for the line that says that it cannot.
    """
    deadline, tries = time.monotonic() + MAX_WAIT_S, Retries(console)
    while True:
        try:
            return make()
        except (RuntimeError, OSError) as error:  # Python and gloo say it by their texts alone
            if not no_thread(error):
                raise
        refused = OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        tries.refused(f"pid {os.getpid()} cannot {what}", refused)
        if time.monotonic() >= deadline:
            console(f"pid {os.getpid()} ends: it could not {what} in {MAX_WAIT_S:g} s: {advice(refused)}")
            os._exit(1)
        time.sleep(FIRST_S)

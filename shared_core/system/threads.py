"""Threads of a worker that its peers depend on."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from shared_core.events import console
from shared_core.faults import inject
from shared_core.resources import FIRST_S, Retries, advice

#: So long a worker tries to get a thread, in seconds.
PATIENCE_S = 30.0


def start(target: Callable[..., Any], args: Sequence[Any] = (), *, name: str) -> threading.Thread:
    """Start a daemon thread.

    Where the system has no thread left it is tried again for :data:`PATIENCE_S`. Then this process ends, as one that is
    lost: without the thread its peers would wait for it for ever.
    """
    deadline, tries = time.monotonic() + PATIENCE_S, Retries(console)
    while True:
        thread = threading.Thread(target=target, args=tuple(args), name=name, daemon=True)
        try:
            inject.point("thread")
            thread.start()
            return thread
        except inject.FaultInjected:
            raise
        except (RuntimeError, OSError):  # "can't start new thread": Python does not say why
            refused = OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        tries.refused(f"pid {os.getpid()} cannot start a thread", refused)
        if time.monotonic() >= deadline:
            console(f"pid {os.getpid()} ends: no thread could be started in {PATIENCE_S:g} s: {advice(refused)}")
            os._exit(1)
        time.sleep(FIRST_S)

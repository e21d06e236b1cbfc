"""A process group that stays out of the way of others, for as long as it says so.

Everything here can be taken back without privileges, or is left alone: a process whose priority could only be lowered
would train slowly when it takes a worker's place.
"""

from __future__ import annotations

import ctypes
import os
import platform
import threading
from contextlib import suppress
from pathlib import Path

#: Number of the system call ``ioprio_set``, by machine; the C library has no function for it.
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_PROCESS_GROUP, _IDLE, _NONE = 2, 3 << 13, 0
_NICEST = 19
#: Added to the chance of being ended where memory runs out: before a worker.
_ENDED_FIRST = 500
_OOM = Path("/proc/self/oom_score_adj")


class Background:
    """Puts this process, which must lead its process group, and what it starts, in the background."""

    def __init__(self) -> None:
        self._nice = os.getpriority(os.PRIO_PROCESS, 0)
        self._oom = ""
        with suppress(OSError):
            self._oom = _OOM.read_text().strip()
            _OOM.write_text(str(min(1000, int(self._oom) + _ENDED_FIRST)))
        self._niced = _can_be_taken_back(self._nice)
        if self._niced:
            os.setpriority(os.PRIO_PGRP, 0, _NICEST)
        _disk(_IDLE)

    def leave(self) -> None:
        if self._niced:
            os.setpriority(os.PRIO_PGRP, 0, self._nice)
        _disk(_NONE)
        with suppress(OSError):
            _OOM.write_text(self._oom)


def _can_be_taken_back(nice: int) -> bool:
    """Whether this user may raise a priority again. Tried on a thread: on Linux each thread has its own priority."""
    found: list[bool] = []

    def attempt() -> None:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, _NICEST)
            os.setpriority(os.PRIO_PROCESS, 0, nice)
            found.append(True)

    thread = threading.Thread(target=attempt, name="swift-nice", daemon=True)
    with suppress(RuntimeError):  # the system has no thread left
        thread.start()
        thread.join()
    return bool(found)


def _disk(priority: int) -> None:
    number = _IOPRIO_SET.get(platform.machine())
    if number is not None:
        ctypes.CDLL(None).syscall(number, _PROCESS_GROUP, 0, priority)

"""This process as a hot standby: quiet and in the background, until it takes a worker's place; and its descriptors."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from shared_core.events import console, marked
from shared_core.protocol import worker_env
from shared_core.system.process import set_title

_inherited: frozenset[str] = frozenset()


def descriptors() -> dict[int, str]:
    """What ``/proc`` says of each: a path, or a kind with a number."""
    links: dict[int, str] = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # that of the folder itself
            links[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return links


def note_inherited() -> None:
    """The user's program begins: what is open now is not its own."""
    global _inherited
    _inherited = frozenset(descriptors().values())


def inherited() -> frozenset[str]:
    return _inherited


_held: HeldOutput | None = None
_background: Background | None = None


def begin() -> None:
    """Become a hot standby if the environment says so: output is held and the process runs in the background."""
    global _held, _background
    if worker_env.SPARE in os.environ:
        _background = Background()
        _held = HeldOutput()


def is_hot_standby() -> bool:
    return _held is not None


def tell(message: str) -> None:
    """Show something to the user now, also from a hot standby, whose other output is held."""
    if _held is None:
        console(message)
    else:
        _held.write(2, f"{marked(message)}\n".encode())


def take_place(generation: int) -> None:
    """Be a worker from now on, in this generation: changes the environment, and shows the held output."""
    global _held, _background
    os.environ[worker_env.GENERATION] = str(generation)
    del os.environ[worker_env.SPARE]
    if _background is not None:
        _background.leave()
    if _held is not None:
        _held.show()
    _held = _background = None
    set_title(f"rank {os.environ['RANK']}", sys.argv[0], sys.argv[1:])


class HeldOutput:
    """Holds what this process and its children write to file descriptors 1 and 2, from now on."""

    def __init__(self) -> None:
        self._held: list[tuple[int, int, BinaryIO]] = []
        for fd in (1, 2):
            with suppress(OSError):  # closed, or there is no room for a file: then it is not held
                file: BinaryIO = tempfile.TemporaryFile()  # noqa: SIM115 (closed in show)
                self._held.append((fd, os.dup(fd), file))
                os.dup2(file.fileno(), fd)

    def write(self, fd: int, data: bytes) -> None:
        """Write to the real standard output (1) or error (2), past what is held."""
        real = next((real for held, real, _ in self._held if held == fd), fd)
        with suppress(OSError):
            os.write(real, data)

    def show(self) -> None:
        """Write out what was held, and hold nothing from now on."""
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):  # closed, or none
                stream.flush()
        for fd, real, file in self._held:
            os.dup2(real, fd)
            os.close(real)
            file.seek(0)
            with suppress(OSError), open(fd, "wb", closefd=False) as out:
                shutil.copyfileobj(file, out)
            file.close()
        self._held.clear()


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

"""This process before and after a fork that makes its own hot standby: which threads and files it has, and what the
copy lets go of.
"""

from __future__ import annotations

import gc
import io
import os
import socket
import sys
import threading
from collections import Counter
from collections.abc import Set as AbstractSet
from contextlib import suppress
from pathlib import Path

from shared_core.system import process
from shared_core.transport import local
from shared_core.worker.comm.gloo import NATIVE_THREADS
from shared_core.worker.start.descriptors import descriptors, inherited

#: Threads of the product that the copy starts anew.
_OWN_THREADS = frozenset({"swift-watcher", "swift-watchdog"})
_SAFE = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom", "anon_inode:[eventpoll]")
_WRITERS = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)


def other_threads() -> tuple[str, ...]:
    """Threads that a copy of this process would miss, by name."""
    python = [each for each in threading.enumerate() if each is not threading.main_thread()]
    names = [each.name for each in python if each.name not in _OWN_THREADS]
    own = Path("/proc/self/comm").read_text()
    native = 0
    for task in os.listdir("/proc/self/task"):
        with suppress(OSError):  # it has ended
            name = Path(f"/proc/self/task/{task}/comm").read_text()
            native += name.strip() not in NATIVE_THREADS
    # Threads of Python and of libraries have the name of the process, which tells nothing.
    if native > len(python) + 1:
        names.append(f"{native - len(python) - 1} of a library ({own.strip()})")
    return tuple(names)


def other_files(folder: Path, addresses: AbstractSet[str]) -> tuple[str, ...]:
    """Open files that two processes may not be able to share.

    Args:
        folder: of the job; what is open there is known.
        addresses: of connections that are known, at either end: ``"address port"``, or on this machine ``"pid 1"`` of a
            process.
    """
    links = descriptors()
    safe = {*_SAFE, *inherited(), *(links.get(fd, "") for fd in (0, 1, 2))}
    ends = Counter(link for link in links.values() if link.startswith("pipe:"))
    found = []
    for fd, link in links.items():
        if link in safe or link.startswith(f"{folder}/") or ends[link] > 1:
            continue  # a pipe with both ends here reaches nobody else
        if link.startswith("socket:"):
            if not addresses & _ends(fd):
                found.append("a connection")
        elif not (link.startswith("/") and _only_written(fd)):  # both would read on from one place
            found.append(link)
    return tuple(found)


def _ends(fd: int) -> set[str]:
    found = set()
    with suppress(OSError), socket.socket(fileno=os.dup(fd)) as sock:
        if sock.family == socket.AF_UNIX:
            return {f"pid {local.process_of(sock)}"}
        for end in (sock.getsockname, sock.getpeername):
            with suppress(OSError):
                host, port = end()[:2]
                found.add(f"{host.removeprefix('::ffff:')} {port}")
    return found


def _only_written(fd: int) -> bool:
    with suppress(OSError, ValueError, IndexError):
        flags = Path(f"/proc/self/fdinfo/{fd}").read_text().partition("flags:")[2].split()[0]
        return int(flags, 8) & os.O_ACCMODE == os.O_WRONLY
    return False


def fork(agent: int) -> bool:
    """Fork this process; True in the copy, once ``agent`` is its parent. It leads a session of its own, and has let go
    of all connections. Call :func:`flush` before the first one.
    """
    if not process.fork_away():
        return False
    os.setsid()
    if not process.die_with_parent(agent):
        os._exit(1)
    _let_go()
    return True


def flush() -> None:
    """Write out what files hold back: the copy would write it a second time."""
    files = [each for each in gc.get_objects() if issubclass(type(each), _WRITERS)]
    for each in (sys.stdout, sys.stderr, *files):
        with suppress(OSError, ValueError, AttributeError):  # closed, or none
            each.flush()


def _let_go() -> None:
    """Others must see a connection end with the worker. Descriptors stay taken: objects that nobody uses any more, and
    whose destructors never run, still have their numbers.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd, link in descriptors().items():
        if link.startswith("socket:"):
            os.dup2(nothing, fd, inheritable=False)
    os.close(nothing)

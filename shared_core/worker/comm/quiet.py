"""Keeps off the console what gloo's C++ writes there when a peer fails while a group connects.

Such a failure is an ordinary event: the next generation is formed, and where that cannot be, an exception says why. But
gloo writes a line for each attempt straight to descriptor 2, whatever its log level. So while a group connects,
descriptor 2 is a pipe, and a thread passes on all other lines.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from shared_core.resources import write_all

#: gloo's line for each attempt, and torch's for the exception that it raises.
_NOISE = re.compile(rb"failed to connect, willRetry=|Gloo connectFullMesh failed with")

#: Usually the thread has ended after some microseconds, and what comes next on the console is in order.
_PASS_ON_S = 0.05

_lock = threading.Lock()
_inside = 0
_console = -1
_passing = threading.Thread()


@contextmanager
def quiet() -> Iterator[None]:
    """In here gloo's lines about peers that it cannot connect to are dropped. For any thread, and several at once."""
    entered = False
    with suppress(OSError, RuntimeError):  # no standard error, descriptors or threads: then it is as it is
        _enter()
        entered = True
    try:
        yield
    finally:
        if entered:
            _leave()


def _enter() -> None:
    global _inside, _console, _passing
    with _lock:
        if _inside == 0:
            opened: list[int] = []
            try:
                opened += [os.dup(2), os.dup(2)]
                opened += os.pipe()
                console, kept, read, write = opened
                passing = threading.Thread(target=_pass_on, args=(read, kept), name="swift-quiet", daemon=True)
                passing.start()
            except (OSError, RuntimeError):  # no descriptor or no thread is left
                for fd in opened:
                    os.close(fd)
                raise
            os.dup2(write, 2)  # inheritable, as programs expect of it
            os.close(write)
            _console, _passing = console, passing
        _inside += 1


def _leave() -> None:
    global _inside, _console
    with _lock:
        _inside -= 1
        if _inside == 0:
            os.dup2(_console, 2)
            os.close(_console)
            _console = -1
            _passing.join(_PASS_ON_S)


def _pass_on(read: int, console: int) -> None:
    """Until nobody has the pipe any more: a process that was started meanwhile keeps it as its standard error."""
    rest = b""
    with suppress(OSError):
        while chunk := os.read(read, 65536):
            *lines, rest = (rest + chunk).split(b"\n")
            kept = b"".join(line + b"\n" for line in lines if not _NOISE.search(line))
            if not rest.startswith(b"["):  # such as a progress bar; gloo's lines and torch's begin so
                kept, rest = kept + rest, b""
            write_all(console, kept)
        if rest and not _NOISE.search(rest):
            write_all(console, rest)
    os.close(read)
    os.close(console)

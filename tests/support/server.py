"""Servers that hold the imports of test jobs, and fork what runs them. Requests and answers are lines of JSON.

All test processes of a run share one process for each kind of server, which has imported everything and forks a server
for each connection. The stock libraries are imported once: the process with this product's modules is forked from the
one without.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import gc
import importlib
import json
import os
import select
import socket
import struct
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, NoReturn, Self

from shared_core.protocol.request import SINGLE_THREADED
from shared_core.system import process

ROOT = Path(__file__).resolve().parents[2]
#: Kinds of servers: modules with a function ``serve``, and ``PRELOAD``, what is imported for them. The first has no
#: part of this product.
PLAIN, WARM = "tests.support.plain", "tests.support.warm"


class Server:
    """A server for this object alone; a context manager that ends it.

    Args:
        module: :data:`PLAIN` or :data:`WARM`.
    """

    def __init__(self, module: str) -> None:
        self._module, self._channel = module, _connect(module)
        self._requests, self._answers = self._channel.makefile("wb"), self._channel.makefile("rb")

    def ask(self, request: Any) -> None:
        """Send a request, plain data."""
        say(self._requests, request)

    def answer(self, timeout_s: float | None = None) -> Any:
        """The next answer; None when time is up.

        Raises:
            RuntimeError: if the server has ended.
        """
        if timeout_s is not None and not select.select([self._channel], [], [], timeout_s)[0]:
            return None
        line = self._answers.readline()
        if not line:
            raise RuntimeError(f"a server of {self._module} has ended")
        return json.loads(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the server."""
        with contextlib.suppress(OSError):  # it has ended
            self._channel.shutdown(socket.SHUT_WR)
            while self._channel.recv(4096):
                pass
        for each in (self._requests, self._answers, self._channel):
            with contextlib.suppress(OSError):
                each.close()


def _connect(module: str) -> socket.socket:
    """Connect to a new server. The first test process of a run that needs one starts the processes behind it."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
    names = {each: f"\0swift-tests-{run}-{each}" for each in (PLAIN, WARM)}
    while True:
        channel = socket.socket(socket.AF_UNIX)
        try:
            channel.connect(names[module])
            return channel
        except ConnectionRefusedError:  # nobody listens
            channel.close()
        listeners = [socket.socket(socket.AF_UNIX) for _ in names]
        try:
            for listener, name in zip(listeners, names.values(), strict=True):
                listener.bind(name)
                listener.listen()
            _start(listeners)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            os.sched_yield()  # another test process has the name, and is about to listen
        finally:
            for listener in listeners:
                listener.close()


def _start(listeners: list[socket.socket]) -> None:
    """Start the processes; they end when this one does."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("SWIFT_")}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH")]))
    env.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed chooses when it is imported
    env.pop("TMPDIR", None)  # it may be gone before they are; each job gets its own
    fds = [listener.fileno() for listener in listeners]
    _STARTED.append(
        subprocess.Popen(
            [sys.executable, "-m", __name__, *map(str, fds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env=env | SINGLE_THREADED | {"PYTHONHASHSEED": "0"},
            pass_fds=fds,
            start_new_session=True,
        )
    )


#: Started by this process. Their standard input tells them of its end.
_STARTED: list[subprocess.Popen[bytes]] = []


def say(pipe: IO[bytes], message: Any) -> None:
    """Write a line."""
    pipe.write(json.dumps(message).encode() + b"\n")
    pipe.flush()


def _import(modules: tuple[str, ...]) -> None:
    """Import modules; those that are not installed are left out. What they made is never looked at again by the garbage
    collector, which would copy the pages for each process; nor is what the end of a process would copy them for.
    """
    gc.disable()  # a third of the time
    for name in modules:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.enable()
    for each in list(weakref.finalize._registry):  # type: ignore[attr-defined]  # of libraries, which free what they hold
        each.atexit = False
    isinstance({}, Mapping)  # remembered, after a walk through all classes of mappings
    gc.collect()
    gc.freeze()


def _share_memory() -> None:
    process.collapse_memory()
    process.collapse_memory = lambda: 0  # it is done: a zygote of a job would copy what it shares with this process


def _accept(listener: socket.socket, module: str) -> None:
    """Fork a server for each connection of this user, until the process that started this one has ended."""
    serve = importlib.import_module(module).serve
    while True:
        if sys.stdin in select.select([sys.stdin, listener], [], [])[0]:
            return
        channel, _ = listener.accept()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        _, user, _ = struct.unpack("3i", channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if user == os.getuid() and os.fork() == 0:
            os.setsid()
            listener.close()
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            serve(channel.makefile("rb"), channel.makefile("wb"))
            os._exit(0)
        channel.close()


def _told(end: BaseException) -> int:
    """The exit status of a program that ended so; prints what Python would."""
    if not isinstance(end, SystemExit):
        traceback.print_exception(end)
        return 1
    if isinstance(end.code, str):
        print(end.code, file=sys.stderr)
    return end.code if isinstance(end.code, int) else int(end.code is not None)


def end_as(program: Callable[[], None]) -> NoReturn:
    """In a forked process: run ``program`` and end as Python would after it, but for the memory of what was imported.

    To free that touches, and so copies, every page that is shared with the server: half a second of CPU. A process
    that the program forks in turn ends as it would without this.
    """
    own, status = os.getpid(), 0
    try:
        program()
    except BaseException as end:  # whatever it is, it must not go on in the server's own code
        if os.getpid() != own:
            raise
        status = _told(end)
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons
    atexit._run_exitfuncs()
    gc.collect()  # files that nobody closed are written
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or none
            stream.flush()
    os._exit(status)


def _main() -> None:
    plain, warm = (socket.socket(fileno=int(fd)) for fd in sys.argv[1:])
    _import(importlib.import_module(PLAIN).PRELOAD)
    if os.fork() == 0:
        plain.close()
        _import(importlib.import_module(WARM).PRELOAD)
        _share_memory()
        _accept(warm, WARM)
    else:
        warm.close()
        _share_memory()
        _accept(plain, PLAIN)


if __name__ == "__main__":
    _main()

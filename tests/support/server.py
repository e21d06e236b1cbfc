"""A process that holds the imports of test jobs, and forks what runs them. Requests and answers are lines of JSON."""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import select
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn, Self

ROOT = Path(__file__).resolve().parents[2]


class Server:
    """A server that this process has started; a context manager that ends it.

    Args:
        module: what it runs.
        preload: modules that it imports first.
        env: more environment.
    """

    def __init__(self, module: str, preload: Sequence[str], env: dict[str, str]) -> None:
        base = {k: v for k, v in os.environ.items() if not k.startswith("SWIFT_")}
        base["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), base.get("PYTHONPATH")]))
        base.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed chooses when it is imported
        base.pop("TMPDIR", None)  # it may be gone before the server is; each job gets its own
        self._module = module
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *preload],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=base | env,
            start_new_session=True,
        )

    def ask(self, request: Any) -> None:
        """Send a request, plain data."""
        assert self._process.stdin is not None
        say(self._process.stdin, request)

    def answer(self, timeout_s: float | None = None) -> Any:
        """The next answer; None when time is up.

        Raises:
            RuntimeError: if the server has ended.
        """
        assert self._process.stdout is not None
        if timeout_s is not None and not select.select([self._process.stdout], [], [], timeout_s)[0]:
            return None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the server {self._module} ended with status {self._process.wait()}")
        return json.loads(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the server."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._process.wait()


def say(pipe: IO[bytes], message: Any) -> None:
    """Write a line."""
    pipe.write(json.dumps(message).encode() + b"\n")
    pipe.flush()


def import_all() -> None:
    """In a server: import the modules of its command line; those that are not installed are left out. What they made
    is never looked at again by the garbage collector, which would copy the pages for each process.
    """
    gc.disable()  # a third of the time
    for name in sys.argv[1:]:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.enable()
    gc.collect()
    gc.freeze()


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


def pipes() -> tuple[IO[bytes], IO[bytes]]:
    """In a server: where requests come from, and where answers go. Copies, so that a job may redirect the originals."""
    return os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")

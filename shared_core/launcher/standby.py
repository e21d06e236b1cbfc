"""The agent's side of the zygotes, and of fresh interpreters where there is none."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

from shared_core.config import ENV_PREFIX
from shared_core.plain_json import is_count, parse
from shared_core.protocol.request import SINGLE_THREADED, StartRequest
from shared_core.system import process

_BOOTSTRAP = (
    process.NOT_FROM_HERE + "sys.path.append({root!r}); from shared_core.worker.start.{module} import main; main()"
)


def _python(module: str, *args: str) -> list[str]:
    """Command line of a fresh interpreter with this one's flags that runs ``main()`` of a module of this package."""
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # as multiprocessing's spawn does
    code = _BOOTSTRAP.format(root=process.PACKAGE_ROOT, module=module)
    return [os.environ.get("PYTHON_EXEC", sys.executable), *flags, "-u", "-c", code, *args]


def clean_env(environ: Mapping[str, str]) -> dict[str, str]:
    """The launcher's environment without its options, which workers get as one value; hashes of strings are fixed."""
    env = {name: value for name, value in environ.items() if not name.startswith(ENV_PREFIX)}
    # Strings must hash alike in a worker and its replacement, or they iterate over sets in different orders.
    if env.get("PYTHONHASHSEED", "random") == "random":
        env["PYTHONHASHSEED"] = "0"
    env.pop("TORCHELASTIC_ERROR_FILE", None)
    return env


@dataclass(frozen=True)
class Preload:
    """What a zygote is to import; ``program``, the user's script or module, is for the title in ``ps``."""

    modules: tuple[str, ...]
    program: str = ""


def _spawn_zygote(channel: socket.socket, env: dict[str, str]) -> int:
    """A zygote in a fresh interpreter that serves ``channel``; returns its pid."""
    started = subprocess.Popen(
        _python("zygote", str(channel.fileno()), str(os.getpid())),
        env=env | SINGLE_THREADED,
        pass_fds=(channel.fileno(),),
        start_new_session=True,
    )
    started.returncode = 0  # the agent reaps by pid; Popen must not
    return started.pid


class Standby:
    """One zygote. Started as soon as it is made; imports when told what; forks when asked.

    Attributes:
        spawn: starts a zygote process, given its end of the channel and its environment, and returns the pid. Tests put
            another way here, which forks a process that has imported everything.
        ready: it has imported everything and waits for requests.
        report: its answer about the imports (``threads``, ``seconds``, ``failed``).
        outstanding: requests without an answer, by token.

    Raises OSError if no process can be started.
    """

    spawn: ClassVar[Callable[[socket.socket, dict[str, str]], int]] = staticmethod(_spawn_zygote)

    def __init__(self, env: dict[str, str]) -> None:
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            try:
                self.pid = type(self).spawn(theirs, env)
            except OSError:
                mine.close()
                raise
        self.pidfd = process.open_pidfd(self.pid)
        self.ready = False
        self.report: dict[str, Any] = {}
        self.outstanding: dict[int, StartRequest] = {}
        self._channel = mine
        self._buffer = b""
        mine.setblocking(False)

    def fileno(self) -> int:
        """For a selector: readable when the zygote has answered."""
        return self._channel.fileno()

    def preload(self, what: Preload, *, more: bool = False) -> None:
        """Tell it what to import; with ``more`` it is not ready afterwards, because another call follows."""
        message = {"preload": what.modules, "program": what.program, "more": more}
        self._send(json.dumps(message))

    def start(self, request: StartRequest) -> None:
        """Ask for a worker; the pid comes with :meth:`answers`."""
        self.outstanding[request.token] = request
        self._send(request.to_json())

    def _send(self, line: str) -> None:
        # A request is some kilobytes and the zygote reads at once: blocking here is shorter than another turn of
        # the loop.
        self._channel.setblocking(True)
        try:
            self._channel.sendall(line.encode() + b"\n")
        except OSError:
            pass  # it died; the agent notices that by itself and makes its requests again
        finally:
            self._channel.setblocking(False)

    def answers(self) -> list[tuple[StartRequest, int]]:
        """``(request, pid)`` of workers forked since the last call; ``-errno`` for a pid where it could not fork. Never
        blocks. Damaged answers are passed over: who waits for one asks another standby after a while.
        """
        with suppress(BlockingIOError, ConnectionError):
            while chunk := self._channel.recv(65536):
                self._buffer += chunk
        *lines, self._buffer = self._buffer.split(b"\n")
        forked = []
        for line in lines:
            with suppress(ValueError, LookupError, TypeError, AttributeError):
                message = parse(line)
                if message.get("ready"):
                    self.ready, self.report = True, message
                elif is_count(said := message["pid"] if "pid" in message else message["errno"]):
                    forked.append((self.outstanding.pop(message["token"]), said if "pid" in message else -said))
        return forked

    def close(self) -> None:
        """End the zygote and release what it held here; the agent reaps it. A second call does nothing."""
        if self._channel.fileno() < 0:
            return
        self._channel.close()
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None
        process.kill_group(self.pid, signal.SIGKILL)


def start_fresh(request: StartRequest) -> int:
    """Start a worker in a fresh interpreter; returns its pid. Raises OSError if no process can be started."""
    read, write = os.pipe()
    line = request.to_json().encode()
    try:
        started = subprocess.Popen(
            _python("entry", str(read)), env=request.env, pass_fds=(read,), start_new_session=True, close_fds=True
        )
    except OSError:
        os.close(write)
        raise
    finally:
        os.close(read)
    started.returncode = 0
    # The pipe takes 64 KiB at once, the rest when the interpreter reads.
    with open(write, "wb") as pipe, suppress(BrokenPipeError):
        pipe.write(line)
    return started.pid

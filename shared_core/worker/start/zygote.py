"""The zygote: it has imported what the job imports, runs no user code, holds one thread, and forks into workers.

``main()`` takes two arguments, the descriptor of a stream socket to the agent and the agent's pid; the environment has
:data:`~shared_core.protocol.request.SINGLE_THREADED`. Lines of JSON come in: first what to import, answered by
``{"ready": ...}``; then start requests, each answered by ``{"token": n, "pid": p}``, or by ``{"token": n, "errno": e}``
where no process can be made. A worker is forked twice, so that the agent (a subreaper) becomes its parent and can wait
for it. At the end of the stream the zygote exits.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import signal
import socket
import sys
import time
import warnings
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from shared_core.protocol.request import StartRequest
from shared_core.system import process
from shared_core.system.process import set_title
from shared_core.worker import link
from shared_core.worker.start import entry, preload


def serve(channel: socket.socket) -> StartRequest | None:
    """Answer the agent until it closes the channel (None). In a forked worker, returns its request."""
    stream = channel.makefile("rb")
    report: dict[str, Any] = {"ready": True, "seconds": 0.0, "failed": {}}
    for line in stream:
        message = json.loads(line)
        if "preload" in message:
            set_title("standby", message["program"])
            _preload(message["preload"], report)
            if not message.get("more"):
                _answer(channel, _settle(report))
            continue
        request = StartRequest.from_json(line)
        if _fork_worker(channel, request):
            stream.close()
            return request
    return None


def _answer(channel: socket.socket, message: dict[str, Any]) -> None:
    channel.sendall(json.dumps(message).encode() + b"\n")


def _preload(modules: list[str], report: dict[str, Any]) -> None:
    started = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the worker's own import statements are the place to warn
        for name in modules:
            try:
                preload.load(name)
            except Exception as error:
                report["failed"][name] = f"{type(error).__name__}: {error}"
    report["seconds"] += time.monotonic() - started


def _settle(report: dict[str, Any]) -> dict[str, Any]:
    """Make the memory cheap to fork and to free, and do what each worker would copy memory for."""
    isinstance({}, Mapping)  # Python remembers it, after a walk through all classes of mappings
    if (scopes := sys.modules.get("shared_core.worker.variables.scopes")) is not None:
        scopes.OWN_MODULES.look()
    gc.collect()
    gc.freeze()  # the collector would touch, and so copy, every page that is shared with the workers
    with suppress(OSError, ValueError):
        process.collapse_memory()
    return report | {"threads": process.thread_count()}


def _fork_worker(channel: socket.socket, request: StartRequest) -> bool:
    """True in the worker, once the agent is its parent."""

    def tell(pid: int) -> None:
        _answer(channel, {"token": request.token} | ({"pid": pid} if pid > 0 else {"errno": -pid}))

    if not process.fork_away(tell):
        return False
    channel.close()
    return True


def main() -> None:
    atexit.register(link.leave)  # before anything is imported that registers handlers: it is the last to run
    channel = socket.socket(fileno=int(sys.argv[1]))
    if not process.die_with_parent(int(sys.argv[2])):
        os._exit(1)
    # A Ctrl-C in the terminal is the agent's to handle.
    for sig in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        signal.signal(sig, signal.SIG_IGN)
    request = serve(channel)
    if request is None:
        os._exit(0)  # exit handlers of imported modules belong to the workers
    entry.enter(request, forked=True)


if __name__ == "__main__":
    main()

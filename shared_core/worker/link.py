"""A worker's link to its launcher: its own connection to the store, what it tells the agent, its goodbye.

Importing this module is cheap: no torch.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from shared_core.errors import WaitTimeout
from shared_core.events import console
from shared_core.protocol import worker_env
from shared_core.protocol.worker_env import WorkerEnv
from shared_core.protocol.worker_messages import DAMAGED, PREPARED, REPORTS, WISH, WORDS
from shared_core.system import secret, wire
from shared_core.system.jobdir import AGENT
from shared_core.transport import local
from shared_core.transport.remote_store import RemoteStore
from shared_core.transport.store import Store, StoreError
from shared_core.waiting import FOREVER_S

_failed = False
_done = False
_at_end: list[Callable[[], None]] = []
_leaves_with: int | None = None


def connect_store(timeout_s: float = 60.0, where: WorkerEnv | None = None) -> RemoteStore:
    """A new connection to the job's store. It serves one thread at a time: every thread that blocks needs its own.

    Args:
        timeout_s: longest wait for a key, in seconds.
        where: the store's place; None for this process' own environment.

    Raises:
        WaitTimeout: if the agent cannot be reached.
    """
    here = worker_env.env() if where is None else where
    try:
        if os.path.isabs(here.store):
            link = local.connect(Path(here.store))
        else:
            link = wire.connect(here.store, secret.of_job(here.job_dir))
        return RemoteStore(link, timeout_s)
    except (OSError, StoreError) as error:
        raise WaitTimeout(
            f"rank {here.rank}: no answer from the job's store at {here.store} ({error}); is swiftrun alive?"
        ) from error


def wish(options: Mapping[str, Any], where: WorkerEnv) -> None:
    """Ask this machine's agent to use checkpoint options (by full name) for later workers. Raises WaitTimeout."""
    try:
        with local.connect(where.job_dir / AGENT) as link:
            link.send(WISH, data=[json.dumps(dict(options)).encode()])
            link.answer()
    except OSError as error:
        raise WaitTimeout(
            f"rank {where.rank}: no answer from this machine's launcher to what the script says of its checkpoints "
            f"({error}); is swiftrun alive?"
        ) from error


def tell(store: Store, name: str, value: Any, *, prefix: str | None = None) -> None:
    """Set a key that the agent acts on (``fail``, ``divergent``, ``restart``, ``done/{rank}``) and wake the agent.

    Setting the key alone works too; the agent then notices it at its next tick (``--monitor-interval``).

    Args:
        store: a client of the agent's store in which no other thread waits for a key.
        name: key without prefix.
        value: plain data, stored as JSON.
        prefix: key prefix; this worker's own when None.
    """
    prefix = worker_env.env().prefix if prefix is None else prefix
    store.set(prefix + name, json.dumps(value))
    slot = os.environ.get("GROUP_RANK", "0")
    store.queue_push(f"{prefix}{WORDS}/{slot}", name)  # one step: a worker killed here leaves no half-said word


def report(store: Store, value: Mapping[str, Any], *, prefix: str, queue: str = REPORTS) -> None:
    """Tell this machine's agent something, by default what it shows to the user. Reports queue up: none overwrites
    another. No other thread may wait for a key in ``store``.
    """
    slot = os.environ.get("GROUP_RANK", "0")
    store.queue_push(f"{prefix}{queue}/{slot}", json.dumps(value))
    store.queue_push(f"{prefix}{WORDS}/{slot}", queue)


def mark_failed(code: int | None = None) -> None:
    """The user's program failed: no goodbye follows. ``code``: exit code; None leaves it to the interpreter."""
    global _failed, _leaves_with
    _failed, _leaves_with = True, code


def at_end(call: Callable[[], None]) -> None:
    """Run ``call`` when the user's program has ended without an error, before the goodbye; in reverse order."""
    _at_end.append(call)


def forget_ends() -> None:
    _at_end.clear()


def program_ended() -> None:
    while _at_end:
        _at_end.pop()()


def say_done_and_wait() -> None:
    """Send the goodbye, then wait for the agent's ``release``; other threads of this process keep serving its peers.
    Registered with ``atexit``; later calls, and calls after an error or outside ``swiftrun``, do nothing.
    """
    global _done, _leaves_with
    if _done or _failed or not worker_env.launched() or hasattr(sys, "last_type"):
        return
    _done = True
    here = worker_env.env()
    try:
        store = connect_store(where=here)
        tell(store, f"done/{here.rank}", {"pid": os.getpid(), "time": time.time()}, prefix=here.prefix)
    except (RuntimeError, WaitTimeout) as error:
        console(f"rank {here.rank} could not say goodbye: {error}")
        return
    with suppress(RuntimeError):
        store.wait([here.prefix + "release"], FOREVER_S)
        if store.check([here.prefix + "stop"]):
            os._exit(1)
        _leaves_with = 0


def leave() -> None:
    """The last exit handler: ends a worker that was released, or whose program failed, before Python's own teardown.

    The teardown would end threads that wait for a peer inside gloo, with C++ frames on their stacks, and abort the
    process ("terminate called without an active exception"): an exception would look like an accident.
    """
    if _leaves_with is None:
        return
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # closed, or none
            stream.flush()
    os._exit(_leaves_with)


class JobStore:
    """One connection, made at the first use and shared by all threads. No call on it blocks for a key."""

    def __init__(self, env: WorkerEnv) -> None:
        self.begin(env)

    def begin(self, env: WorkerEnv) -> None:
        """Be that of the worker that ``env`` describes; again in a forked copy of the process."""
        self._env = env
        self._client: RemoteStore | None = None
        self._lock = threading.Lock()

    def below(self, prefix: str = "") -> RemoteStore:
        """Keys of this attempt that begin with ``prefix``: empty, or ends with a slash. May raise WaitTimeout."""
        return self._connected().below(self._env.prefix + prefix)

    def tell(self, name: str, value: Any) -> None:
        """Set a key that the launcher acts on."""
        tell(self._connected(), name, value, prefix=self._env.prefix)

    def report(self, value: dict[str, Any]) -> None:
        """Tell the launcher something that it shows to the user."""
        report(self._connected(), value, prefix=self._env.prefix)

    def tell_damage(self, value: dict[str, Any]) -> None:
        report(self._connected(), value, prefix=self._env.prefix, queue=DAMAGED)

    def prepared(self, value: dict[str, Any]) -> None:
        """Tell the launcher that this hot standby waits for its rank's place."""
        report(self._connected(), value, prefix=self._env.prefix, queue=PREPARED)

    def _connected(self) -> RemoteStore:
        with self._lock:
            if self._client is None:
                self._client = connect_store(self._env.config.detection.wait_timeout_s, self._env)
            return self._client

"""Helpers inside a worker: what the launcher told it, its own connection to the store, progress, goodbye.

Importing this module is cheap: torch is imported when a store is connected.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import struct
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shared_core.checkpoint.command import Command
from shared_core.config import SwiftConfig
from shared_core.errors import ConfigError, CorruptFile, WaitTimeout
from shared_core.events import RUN, console
from shared_core.plain_json import is_count, parse
from shared_core.waiting import Wait

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

JOB_DIR = "SWIFT_RECOVERY_JOB_DIR"
STORE = "SWIFT_RECOVERY_STORE"
GENERATION = "SWIFT_RECOVERY_GENERATION"
INCARNATION = "SWIFT_RECOVERY_INCARNATION"
EVENTS = "SWIFT_RECOVERY_EVENTS"
CONFIG = "SWIFT_RECOVERY_CONFIG"
RESTART = "SWIFT_RECOVERY_RESTART"
ADDRESS = "SWIFT_RECOVERY_ADDRESS"
RESIZED = "SWIFT_RECOVERY_RESIZED"
MACHINES = "SWIFT_RECOVERY_MACHINES"
JOB = "SWIFT_RECOVERY_JOB"
COMMAND = "SWIFT_RECOVERY_COMMAND"
#: Set where a script was started by itself and has become ``swiftrun``: its user gives no flags.
HANDED_OVER = "SWIFT_RECOVERY_HANDED_OVER"

#: Layout of a progress file: batch tops passed, 1 inside a wait for a collective, ``time.time()`` of the last change.
PROGRESS = struct.Struct("<QQd")
PROGRESS_BYTES = 64
#: A wait that is meant to last, in seconds: torch warns of each store wait that times out, and counts in 32 bits of ms.
FOREVER_S = 20 * 86400.0
#: Longest time to connect to the launcher's store, in seconds.
_CONNECT_S = 60.0
#: Store queues that wake the agents, one for each machine's place, under the attempt's prefix.
WORDS = "words"
#: Store queues of what workers report to the agent of their machine's place, under the attempt's prefix.
REPORTS = "reports"
#: File in a rank's folder: variables of the environment for its newcomers.
_LEFT = "environment.json"

_failed = False
_done = False
_at_end: list[Callable[[], None]] = []
_leaves_with: int | None = None


@dataclass(frozen=True)
class Resized:
    """The attempt before, which had another number of workers and has handed its state on.

    Attributes:
        attempt: its number.
        world_size: its number of logical ranks.
        stay: those of them whose workers handed over.
        top: the batch top from which the job goes on.
    """

    attempt: int
    world_size: int
    stay: tuple[int, ...]
    top: int

    def to_json(self) -> str:
        """Inverse of :meth:`from_json`."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, raw: str) -> Resized:
        """Inverse of :meth:`to_json`.

        Raises:
            ConfigError: it is none.
        """
        try:
            values = parse(raw)
            found = cls(values["attempt"], values["world_size"], tuple(values["stay"]), values["top"])
        except (LookupError, TypeError, ValueError) as error:
            raise ConfigError(f"this names no attempt to go on from: {error!r}") from error
        if not all(map(is_count, (found.attempt, found.world_size, *found.stay, found.top))):
            raise ConfigError(f"this names no attempt to go on from: {raw[:80]!r}")
        return found


@dataclass(frozen=True)
class WorkerEnv:
    """What the launcher told this worker.

    Attributes:
        rank: logical rank.
        world_size: number of logical ranks.
        generation: generation in which this worker starts; 0 for the first workers.
        incarnation: this is the n-th worker that holds the rank, from 0.
        restart: number of whole-job restarts before this one; store keys are prefixed with it.
        job_dir: private folder of the job on this machine, in memory where possible.
        store_host: host of the agent's store.
        store_port: its port.
        events: ``events.jsonl`` of the job, None when events are not written.
        config: the options of the job.
        slot: place of this machine, from 0.
        job: what checkpoints name as the job they belong to, equal on all machines.
        command: the program and its arguments.
        handed_over: the script was started by itself, so that its user gives ``swiftrun`` no flags.
        machines: who holds which place in the generation in which this worker starts; empty on one machine.
        resized: the attempt from which this one goes on, if the number of workers has changed.
        run: id of this start of the job, equal on all machines and in all attempts.
    """

    rank: int
    world_size: int
    generation: int
    incarnation: int
    restart: int
    job_dir: Path
    store_host: str
    store_port: int
    events: Path | None
    config: SwiftConfig
    slot: int = 0
    job: str = ""
    command: Command = Command()
    handed_over: bool = False
    machines: tuple[str | None, ...] = ()
    resized: Resized | None = None
    run: str = ""

    @property
    def prefix(self) -> str:
        """Prefix of every store key of this attempt, ``swift/{restart}/``."""
        return f"swift/{self.restart}/"

    @property
    def rank_dir(self) -> Path:
        """Folder for what this rank publishes."""
        return self.job_dir / f"rank{self.rank}"


def launched(environ: Mapping[str, str] | None = None) -> bool:
    """Whether this process is a worker of ``swiftrun``."""
    return JOB_DIR in (os.environ if environ is None else environ)


def env(environ: Mapping[str, str] | None = None) -> WorkerEnv:
    """Parse the variables the launcher sets.

    Raises:
        ConfigError: if this process was not started by ``swiftrun``.
    """
    source = os.environ if environ is None else environ
    if JOB_DIR not in source:
        raise ConfigError(
            f"{JOB_DIR} is not set: this process was not started by swiftrun. Start it with: swiftrun SCRIPT ..."
        )
    try:
        return _parsed(source)
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"the variables that the launcher sets are damaged: {error!r}") from error


def _parsed(source: Mapping[str, str]) -> WorkerEnv:
    host, _, port = source[STORE].rpartition(":")
    machines = parse(source.get(MACHINES) or "[]")
    if not isinstance(machines, list) or not all(each is None or isinstance(each, str) for each in machines):
        raise ValueError(f"{MACHINES} names no machines")
    return WorkerEnv(
        rank=int(source["RANK"]),
        world_size=int(source["WORLD_SIZE"]),
        generation=int(source.get(GENERATION, "0")),
        incarnation=int(source.get(INCARNATION, "0")),
        restart=int(source.get(RESTART, "0")),
        job_dir=Path(source[JOB_DIR]),
        store_host=host,
        store_port=int(port),
        events=Path(source[EVENTS]) if source.get(EVENTS) else None,
        config=SwiftConfig.from_env(source),
        job=source.get(JOB, source[JOB_DIR]),
        command=Command.from_json(source.get(COMMAND, "")),
        handed_over=HANDED_OVER in source,
        slot=int(source.get("GROUP_RANK", "0")),
        machines=tuple(machines),
        resized=Resized.from_json(source[RESIZED]) if source.get(RESIZED) else None,
        run=source.get(RUN, ""),
    )


def connect_store(timeout_s: float = 60.0, where: WorkerEnv | None = None) -> TCPStore:
    """A new client of the agent's store. A client serves one thread at a time: every thread that blocks needs its own.

    Args:
        timeout_s: longest wait of a blocking ``get`` or ``wait`` of this client, in seconds.
        where: the store's place; this process' own environment when None.

    Raises:
        WaitTimeout: if the agent cannot be reached.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    here = env() if where is None else where
    whom, limit_s = f"the launcher's store at {here.store_host}:{here.store_port} to answer", min(timeout_s, _CONNECT_S)
    try:
        with Wait(f"rank {here.rank}", whom, limit_s, bound="a fixed limit").announced():
            store = TCPStore(
                here.store_host,
                here.store_port,
                is_master=False,
                timeout=timedelta(seconds=limit_s),
                wait_for_workers=False,
            )
        store.set_timeout(timedelta(seconds=timeout_s))
        return store
    except RuntimeError as error:
        raise WaitTimeout(
            f"rank {here.rank}: no answer from the agent's store at {here.store_host}:{here.store_port} ({error}); "
            "is swiftrun alive?"
        ) from error


def tell(store: TCPStore, name: str, value: Any, *, prefix: str | None = None) -> None:
    """Set a key that the agent acts on (``fail``, ``divergent``, ``restart``, ``done/{rank}``) and wake the agent.

    Setting the key alone works too; the agent then notices it at its next tick (``--monitor-interval``).

    Args:
        store: a client of the agent's store that no other thread is blocked in.
        name: key without prefix.
        value: plain data, stored as JSON.
        prefix: key prefix; this worker's own when None.
    """
    prefix = env().prefix if prefix is None else prefix
    store.set(prefix + name, json.dumps(value))
    slot = os.environ.get("GROUP_RANK", "0")
    store.queue_push(f"{prefix}{WORDS}/{slot}", name)  # one step: a worker killed here leaves no half-said word


def report(store: TCPStore, value: Mapping[str, Any], *, prefix: str) -> None:
    """Tell the agent of this machine something that it shows to the user; none of the reports is lost.

    Args:
        store: a client of the agent's store that no other thread is blocked in.
        value: plain data.
        prefix: key prefix of the attempt.
    """
    slot = os.environ.get("GROUP_RANK", "0")
    store.queue_push(f"{prefix}{REPORTS}/{slot}", json.dumps(value))
    store.queue_push(f"{prefix}{WORDS}/{slot}", REPORTS)


def leave_environment(job_dir: Path, rank: int, variables: Mapping[str, str]) -> None:
    """Have the newcomers of a rank find ``variables`` in their environment, where the user has not set them."""
    new = job_dir / f"rank{rank}" / (_LEFT + ".new")
    new.write_text(json.dumps(dict(variables)))
    new.replace(new.with_name(_LEFT))


def left_environment(job_dir: Path, rank: int) -> dict[str, str]:
    """What predecessors on this machine have left with :func:`leave_environment`.

    Raises:
        CorruptFile: it is damaged.
    """
    path = job_dir / f"rank{rank}" / _LEFT
    try:
        left = parse(path.read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise CorruptFile(f"{path} is damaged: {error}") from error
    # A variable of the environment holds no NUL, and its name no "=".
    if not isinstance(left, dict) or not all(
        name and "=" not in name and isinstance(value, str) and "\0" not in name + value for name, value in left.items()
    ):
        raise CorruptFile(f"{path} is damaged: it holds no variables")
    return left


class ProgressFile:
    """Writer of ``rank{r}/progress``, which the agent reads for the progress time-out. A write costs a microsecond."""

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        target = env().rank_dir / "progress" if path is None else Path(path)
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(target, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(fd, PROGRESS_BYTES)
            self._map = mmap.mmap(fd, PROGRESS_BYTES)
        finally:
            os.close(fd)
        self._tops = 0

    def top(self, tops: int) -> None:
        """Batch top number ``tops`` is passed; outside any collective."""
        self._tops = tops
        self._write(0)

    def waiting(self, inside: bool) -> None:
        """Entering (True) or leaving (False) a wait for a collective."""
        self._write(int(inside))

    def _write(self, flag: int) -> None:
        PROGRESS.pack_into(self._map, 0, self._tops, flag, time.time())

    def close(self) -> None:
        """Release the mapping; the file stays."""
        self._map.close()


def read_progress(path: str | os.PathLike[str]) -> tuple[int, bool, float] | None:
    """``(tops, inside a collective, time of the last change)``; None if nothing was written yet."""
    try:
        with open(path, "rb") as file:
            raw = file.read(PROGRESS.size)
    except OSError:
        return None
    if len(raw) < PROGRESS.size:
        return None
    tops, flag, changed = PROGRESS.unpack(raw)
    return (tops, bool(flag), changed) if changed else None


def mark_failed(code: int | None = None) -> None:
    """The user's program ended with an error: no goodbye will be said for it.

    Args:
        code: of the process' end; None to leave it to the interpreter.
    """
    global _failed, _leaves_with
    _failed, _leaves_with = True, code


def at_end(call: Callable[[], None]) -> None:
    """Have ``call`` run when the user's program has ended without an error, before the goodbye."""
    _at_end.append(call)


def program_ended() -> None:
    """The user's program has ended without an error."""
    while _at_end:
        _at_end.pop()()


def get_ready_to_say_done() -> None:
    """Import what a goodbye needs while that is possible: at exit, a module cannot register its own exit handlers."""
    import torch.distributed  # noqa: F401


def say_done_and_wait() -> None:
    """Say goodbye, then wait for the agent's ``release``; this process' other threads go on serving its peers.

    Registered with ``atexit``; later calls, and calls after an error or outside ``swiftrun``, do nothing.
    """
    global _done, _leaves_with
    if _done or _failed or not launched() or hasattr(sys, "last_type"):
        return
    _done = True
    here = env()
    try:
        store = connect_store(where=here)
        tell(store, f"done/{here.rank}", {"pid": os.getpid(), "time": time.time()}, prefix=here.prefix)
    except (RuntimeError, WaitTimeout) as error:
        console(f"rank {here.rank} could not say goodbye: {error}")
        return
    with suppress(RuntimeError):
        store.wait([here.prefix + "release"], timedelta(seconds=FOREVER_S))
        if store.check([here.prefix + "stop"]):
            os._exit(1)
        _leaves_with = 0


def leave() -> None:
    """The last of all exit handlers: end a worker whose goodbye was heard, or whose program has failed, before the
    interpreter takes itself apart.

    Threads that wait for a peer inside of gloo would be ended then with C++ on their stacks, and abort the process
    ("terminate called without an active exception"): an exception would look like an accident.
    """
    if _leaves_with is None:
        return
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # closed, or none
            stream.flush()
    os._exit(_leaves_with)

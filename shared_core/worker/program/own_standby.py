"""The worker's own hot standby: a copy of its process, forked where the script comes to its loop.

The copy has what the script has made up to there, and waits in the call that made it. When the worker fails, it makes
another copy of itself, becomes the replacement, and continues in the script as any replacement does. So the script's
start runs once, in rank 0 too.
"""

from __future__ import annotations

import gc
import io
import os
import random
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from contextlib import suppress
from pathlib import Path

import torch

from shared_core.events import EventLog
from shared_core.faults import inject
from shared_core.protocol import worker_env
from shared_core.protocol.preparing import LEAST_STARTUP_S, Forkable, Measured, why_not
from shared_core.protocol.worker_env import WorkerEnv
from shared_core.system import process
from shared_core.system.process import machine_bytes, private_bytes, set_title
from shared_core.transport import local
from shared_core.worker.comm import Runtime
from shared_core.worker.comm.gloo import NATIVE_THREADS
from shared_core.worker.program.options import ProgramOptions
from shared_core.worker.program.trained import Trained
from shared_core.worker.recovery.start_point import WorkerStart
from shared_core.worker.start import hot_standby
from shared_core.worker.start.hot_standby import descriptors, inherited

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


class OwnStandby:
    """Makes the copies of one worker. ``begin_again`` makes the parts of a copy those of a hot standby."""

    def __init__(
        self,
        runtime: Runtime,
        start: WorkerStart,
        trained: Trained,
        options: ProgramOptions,
        events: EventLog,
        begin_again: Callable[[WorkerEnv], None],
    ) -> None:
        self._runtime, self._start, self._trained, self._options = runtime, start, trained, options
        self._events, self._begin_again = events, begin_again
        self._asked = False

    def make(self) -> None:
        """Fork where a replacement would wait for its place. In the copy, returns as the replacement."""
        if self._asked or self._start.spare.waits:
            return
        self._asked = True
        startup_s, config, agent = time.time() - process.begun(), self._options.env.config, os.getppid()
        if startup_s < LEAST_STARTUP_S or config.standby.prepared != "auto":
            return
        if reason := why_not(config, self._look(startup_s, agent)):
            self._tell(f"the worker makes no copy of itself: {reason}")
            return
        flush()
        generation = None
        while self._fork(agent):
            generation = self._wait()
        if generation is not None:
            self._start.take_place(generation)

    def may_leave(self) -> bool:
        """Whether a copy of this worker can continue where it is, at a step boundary."""
        config, why = self._options.env.config, ""
        if config.checkpoint.dir is not None or config.resizes:
            why = "it makes checkpoints, or the number of workers may change"
        elif process.children():
            why = "it has child processes"
        if why := why or why_not(config, self._look(time.time() - process.begun(), os.getppid())):
            self._tell(f"a worker that leaves makes no copy of itself: {why}")
        return not why

    def copy(self) -> bool:
        """Fork this worker; True in the copy, once it is the replacement and knows its generation."""
        drawn = random.getstate()
        if not self._fork(os.getppid()):
            return False
        random.setstate(drawn)  # Python seeds it anew in each fork
        self._start.take_place(self._wait())
        return True

    def _look(self, startup_s: float, agent: int) -> Forkable:
        env, environ = self._options.env, os.environ
        store = f"{environ.get('MASTER_ADDR', '')} {environ.get('MASTER_PORT', '')}"
        known = {*self._runtime.addresses, store, f"pid {agent}"}
        return Forkable(
            workers=int(environ.get("LOCAL_WORLD_SIZE", "1")),
            machines=max(1, len(env.machines)),
            compute_threads=torch.get_num_threads(),
            threads=other_threads(),
            files=other_files(env.job_dir, known),
            unfit=self._unfit(),
            measured=Measured(startup_s, private_bytes(os.getpid()), *machine_bytes()),
        )

    def _unfit(self) -> str:
        if torch.accelerator.is_available():
            return "there is a device, whose driver does not survive a fork"
        if self._trained.shard is not None or self._trained.replicas:
            return "of a sharded model, or a pipeline, this rank has a part that not all have"
        return ""

    def _fork(self, agent: int) -> bool:
        with self._runtime.lock:  # what it guards is whole in the copy
            return fork(agent)

    def _wait(self) -> int:
        """In a copy: be a hot standby, until there is a place."""
        env = self._options.begin_again(self._options.env.incarnation + 1)
        os.environ[worker_env.INCARNATION], os.environ[worker_env.SPARE] = str(env.incarnation), "1"
        inject.arm_from_env()
        hot_standby.begin()
        set_title(f"standby of rank {env.rank}", sys.argv[0], sys.argv[1:])
        self._begin_again(env)
        return self._start.await_place()

    def _tell(self, reason: str) -> None:
        rank, generation = self._options.env.rank, self._runtime.generation
        self._events.emit("preparing", rank=rank, generation=generation, number=0, reason=reason)

"""A batch computed a second time, by a copy of the worker, against arithmetic that fails in silence
(``state.recompute_every``).

At a step boundary the worker forks a copy of itself. It runs the batch from there to the end of the first backward pass
that reduces gradients, on another core if it may, and sums what it would give to other ranks; what they give comes from
the worker. Where the two differ, another copy, forked before the batch, decides.

The copy changes nothing outside: what it writes to shared memory stays its own, it writes to no file, has no
connection, and ends where it would make a file, a process or a connection. Whatever else goes wrong in it, the batch
counts as not computed again.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import mmap
import os
import random
import resource
import select
import signal
import stat
import struct
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from shared_core.encoding.plain import dumps, loads
from shared_core.errors import SwiftError
from shared_core.protocol.frontier import StepBoundary
from shared_core.system import process
from shared_core.worker.comm import Runtime
from shared_core.worker.comm.groups import GroupState
from shared_core.worker.comm.op import Op
from shared_core.worker.comm.state import KeptBucketInput
from shared_core.worker.messages.group_log import Logged
from shared_core.worker.start.hot_standby import descriptors
from shared_core.worker.state.checksums import checksum, combined

#: A copy may take so many times what the worker took, and at least so many seconds.
_LONGER, _LEAST_S = 10, 20.0
_POLL_S = 5e-4
_MAP_FIXED = 0x10
#: Group, number and length of a result that follows.
_HEAD = struct.Struct("QQQ")
#: What ends a copy: Python's audit events of calls that others could see.
_SEEN_OUTSIDE = frozenset(
    f"os.{name}"
    for name in (
        *("remove", "rename", "mkdir", "rmdir", "link", "symlink", "truncate", "chmod", "chown", "utime", "setxattr"),
        *("kill", "killpg", "system", "exec", "posix_spawn", "fork", "forkpty"),
    )
) | {"subprocess.Popen", "socket.connect", "socket.bind", "signal.pthread_kill", "sqlite3.connect"}
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


#: What a worker may find of its computation: as that of a copy; wrong, as two copies agree on another; nobody knows.
AGREES, DIFFERS, UNKNOWN = range(3)


def why_no_copy(job_dir: Path) -> str:
    """Why a forked copy cannot compute what this process computes, whatever is in the batch; empty if it can."""
    if torch.accelerator.is_available():
        return "there is a device, whose driver does not survive a fork"
    if torch.get_num_threads() > 1:
        return f"operations of torch use {torch.get_num_threads()} threads: set OMP_NUM_THREADS=1"
    if process.children():
        return "this worker has child processes (of a loader, or a pool), which serve one process: set num_workers=0"
    shared = next((path for *_, path in process.shared_memory() if not path.startswith(f"{job_dir}/")), None)
    if shared is not None:
        return f"this worker shares memory ({shared or 'without a file'}), which may change while a copy reads it"
    return ""


def _sum(inputs: Sequence[torch.Tensor]) -> list[int]:
    """One checksum of what a rank gives in one operation; none for pickles, whose bytes mean nothing."""
    if all(each.dtype == torch.uint8 for each in inputs):
        return []
    return combined(1, [0] * len(inputs), [checksum(each) for each in inputs])


class SecondRun:
    """The copies that compute one batch, in the worker that forks them, and in each of them.

    Attributes:
        copy: this process is a copy.

    Raises:
        OSError: no process, or no descriptor, can be made.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._began = time.monotonic()
        self._sums: list[int] = []
        self._lock, self._keeps = threading.Lock(), True
        drawn, core, offsets = random.getstate(), process.core(), _offsets()  # the worker moves on in its files
        with ExitStack() as opened:
            self._results = os.memfd_create("swift-results")
            opened.callback(os.close, self._results)
            (go, self._go), (reads, first), (also, second) = (_pipe(opened) for _ in range(3))
            with runtime.lock:  # what it guards is whole in the copies
                self._pids = [os.fork(), 0]
            opened.pop_all()
        self._read, self.copy = (reads, also), self._pids[0] == 0
        if not self.copy:
            for fd in (go, first, second):
                os.close(fd)
            runtime.operations.observe(self._saw)
            return
        try:
            self._pids[1] = os.fork()
        except OSError:
            os._exit(1)
        decides = self._pids[1] == 0
        os.close(self._go)
        os.close(first if decides else second)  # the worker sees when the other one ends
        if decides and not os.read(go, 1):
            os._exit(0)  # nobody needs it
        random.setstate(drawn)  # Python seeds it anew in each fork
        self._write = second if decides else first
        cores = os.sched_getaffinity(0)
        with suppress(OSError):
            os.sched_setaffinity(0, cores - {core} or cores)
        if not decides:
            os.write(self._write, b"%d\n" % self._pids[1])
            process.die_with_parent(os.getppid())
        _isolate({self._write, self._results}, offsets, self._give_up)
        self._graph = -1
        runtime.computes_again(_CopyListener(self), self._answer)

    # -- in the worker -------------------------------------------------------------------------------

    def _saw(self, group: GroupState, op: Op, inputs: Sequence[torch.Tensor]) -> None:
        self._sums += _sum(inputs)
        if op.again is None:  # not one of DDP's buckets, whose sums the copy does not use
            op.record = lambda: self._keep(group.id, op)

    def _keep(self, group: int, op: Op) -> None:
        """On the thread that completes the operation, perhaps after the copies have ended."""
        data = dumps(op.results)
        with self._lock:
            if self._keeps:
                os.write(self._results, _HEAD.pack(group, op.seq, len(data)) + data)

    def verdict(self) -> tuple[int, str]:
        """What the copies say of the worker's computation, and a text for people, empty where all is well. Blocks; no
        other method is called afterwards.
        """
        self._runtime.operations.observe(None)
        limit = _LEAST_S + _LONGER * (time.monotonic() - self._began)
        try:
            other, found = self._told(0, limit)
            if isinstance(found, str):
                return AGREES, found
            if found == self._sums:
                return AGREES, ""
            self._pids[1] = int(other)
            os.write(self._go, b"g")
            decides = self._told(1, limit)[1]
        finally:
            self.end()
        if decides == self._sums:
            return AGREES, "its copy had computed something else, and another copy did not"
        if decides == found:
            return DIFFERS, ""
        why = decides if isinstance(decides, str) else "it has computed something else again"
        return UNKNOWN, f"another copy was to decide: {why}"

    def end(self) -> None:
        """Kill the copies. The deciding copy exits by itself if it was never asked."""
        self._runtime.operations.observe(None)
        for pid in filter(None, self._pids):
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        with self._lock:
            self._keeps = False
            for fd in (self._go, self._results, *self._read):
                os.close(fd)
        if self._pids[0]:
            with suppress(OSError):
                os.waitpid(self._pids[0], 0)

    def _told(self, which: int, limit_s: float) -> tuple[str, list[int] | str]:
        """What a copy has written: lines before the last, and its checksums or why there are none."""
        text, until = b"", time.monotonic() + limit_s
        with self._runtime.compute_lock.passed_on():
            while select.select([self._read[which]], [], [], max(0.0, until - time.monotonic()))[0]:
                piece = os.read(self._read[which], 1 << 16)
                text += piece
                if not piece:
                    break
        *before, last = text.decode().splitlines() or [""]
        try:
            found = json.loads(last)
        except ValueError:
            found = None
        if not isinstance(found, list | str):
            late = time.monotonic() > until
            found = f"a copy took over {limit_s:.0f} s" if late else f"a copy ended{self._end_of(which)}"
        return "".join(before), found

    def _end_of(self, which: int) -> str:
        """How a copy ended that has said nothing, in brackets; nobody knows it of the second, a child of the first."""
        if which:
            return ""
        try:
            status = os.waitpid(self._pids[0], 0)[1]
        except ChildProcessError:  # the script ignores SIGCHLD
            return ""
        self._pids[0] = 0
        return f" ({process.describe_exit(os.waitstatus_to_exitcode(status))})"

    # -- in a copy -----------------------------------------------------------------------------------

    def _answer(self, group: GroupState, op: Op, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        self._sums += _sum(inputs)
        seq = group.next
        group.next += 1
        return inputs if op.again is not None else self._result(group.id, seq)

    def _result(self, group: int, seq: int) -> Sequence[torch.Tensor]:
        """What the worker got from this operation; waits for it."""
        at = 0
        while True:
            head = os.pread(self._results, _HEAD.size, at)
            if len(head) < _HEAD.size:
                time.sleep(_POLL_S)
                continue
            *key, size = _HEAD.unpack(head)
            if key == [group, seq]:
                break
            at += _HEAD.size + size
        while len(data := os.pread(self._results, size, at + _HEAD.size)) < size:
            time.sleep(_POLL_S)
        found: Sequence[torch.Tensor] = loads(data)
        return found

    def before_bucket(self) -> None:
        """The copy ends with the first backward pass in which gradients are reduced."""
        graph = torch._C._current_graph_task_id()
        if graph != self._graph:
            self._graph = graph
            Variable._execution_engine.queue_callback(lambda: self._tell(self._sums))

    def _give_up(self, why: str) -> NoReturn:
        self._tell(f"a copy ended, because {why}")

    def _tell(self, found: list[int] | str) -> NoReturn:
        with suppress(OSError):
            os.write(self._write, json.dumps(found).encode())
        os._exit(0)


class _CopyListener:
    """Of the operations in a copy: it publishes nothing, and looks after nobody."""

    def __init__(self, run: SecondRun) -> None:
        self.before_bucket = run.before_bucket

    def first_group(self) -> None:
        pass

    def made_again(self, group: str) -> tuple[StepBoundary | None, Mapping[int, Logged]]:
        raise SwiftError("a copy makes no group")

    def exact(self) -> bool:
        return True

    def bucket_input(self, bucket: torch.Tensor) -> KeptBucketInput | None:
        return None

    def bucket_handed_over(self, op: Op) -> None:
        pass

    def bucket_order(self, ddp: DistributedDataParallel, op: Op) -> None:
        pass

    def waiting_changed(self, waiting: bool) -> None:
        pass

    def whereabouts(self) -> str:
        return ""

    def await_absent(self) -> bool:
        return True


def _pipe(opened: ExitStack) -> tuple[int, int]:
    ends = os.pipe()
    for end in ends:
        opened.callback(os.close, end)
    return ends


def _offsets() -> dict[int, int]:
    """Where each open file is that can be put at a place."""
    found = {}
    for fd in descriptors():
        with suppress(OSError):
            found[fd] = os.lseek(fd, 0, os.SEEK_CUR)
    return found


def _isolate(own: set[int], offsets: Mapping[int, int], give_up: Any) -> None:
    """From now on nothing that this process does is seen outside, but for what it writes to ``own`` descriptors. Files
    are read on from ``offsets``.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_DFL)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for fd in descriptors().keys() - own:
        with suppress(OSError):
            _cut_off(fd, nowhere, offsets.get(fd, 0))
    _keep_memory_apart()
    sys.excepthook = lambda kind, error, trace: give_up(f"{kind.__name__}: {error}")
    sys.addaudithook(lambda event, args: _look(event, args, give_up))


def _keep_memory_apart() -> None:
    """Writes to shared memory stay in this process. Where that cannot be had, because the memory has no file that can
    be opened, they end it.
    """
    libc = ctypes.CDLL(None)
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.mmap.restype = ctypes.c_void_p
    for start, end, offset, inode, path in process.shared_memory():
        with suppress(OSError):
            fd = os.open(path, os.O_RDONLY)
            same = os.fstat(fd).st_ino == inode
            how = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _MAP_FIXED
            there = libc.mmap(start, end - start, *how, fd, offset) if same else None
            os.close(fd)
            if there == start:
                continue
        libc.mprotect(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.PROT_READ)


def _cut_off(fd: int, nowhere: int, offset: int) -> None:
    """What two processes would read on from one place is opened again; reading from anything else is an error."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    if stat.S_ISREG(os.fstat(fd).st_mode) and flags & os.O_ACCMODE != os.O_WRONLY:
        again = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
        os.lseek(again, offset, os.SEEK_SET)
        os.dup2(again, fd, inheritable=False)
        os.close(again)
    elif not os.path.samestat(os.fstat(fd), os.fstat(nowhere)):
        os.dup2(nowhere, fd, inheritable=False)


def _look(event: str, args: tuple[Any, ...], give_up: Any) -> None:
    opens = event == "open" and isinstance(args[2], int) and args[2] & _WRITES and args[0] != os.devnull
    if opens or event in _SEEN_OUTSIDE or event.startswith("shutil."):
        give_up(f"the batch calls {event}{f' to write {args[0]}' if opens else ''}")

"""The fault injector: the core calls :func:`point` at named places; an armed fault strikes there.

Faults are armed by ``swiftrun --faults FILE``, which sets :func:`variables` for its workers; the variables alone do
nothing. The first point that a worker reaches reads them. Afterwards an unarmed point costs one test of a
module-level flag.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from shared_core.errors import ConfigError
from shared_core.events import RUN, EventLog, console
from shared_core.faults.spec import ANY_STEP, EXIT_CODE, FLIP_VALUE, FLIPS, REFUSALS, SLOW, Fault, dumps, loads
from shared_core.kinds import open_regular
from shared_core.waiting import Wait, poll

FAULTS = "SWIFT_FAULTS"
#: Process id of the launcher that was given the faults: only processes below it arm them.
LAUNCHER = "SWIFT_FAULTS_LAUNCHER"
STRUCK = "SWIFT_FAULTS_STRUCK"
#: Seconds for which a fault waits for the one that must strike before it.
AFTER_S = 40.0

#: What flips a bit, by its kind and number; told by the worker that has the state.
_flip: Callable[[str, int], None] = lambda kind, bit: None  # noqa: E731

#: That share the core of a worker that is made slow.
_BUSY_LOOPS = 2
_NOTHING: AbstractContextManager[None] = nullcontext()


class FaultInjected(RuntimeError):
    """Raised by a fault of kind ``exception``."""


class _Injector:
    """Faults of one worker, with the counts that decide when they strike; ``lock`` is held when they change."""

    def __init__(self, faults: Iterable[Fault], rank: int, incarnation: int) -> None:
        self.pid = os.getpid()
        self.rank = rank
        self.incarnation = incarnation
        self.boundaries = 0
        self.counts: Counter[str] = Counter()
        self.lock = threading.Lock()
        self.pending = {
            index: fault
            for index, fault in enumerate(faults)
            if fault.rank == rank and fault.incarnation == incarnation
        }
        for index in _struck_indices():
            self.pending.pop(index, None)

    def visit(self, name: str, tensors: Sequence[Any] = ()) -> None:
        """Count one occurrence of a point and strike, on this thread, if a fault is due."""
        if os.getpid() != self.pid:  # a child of the worker, such as a data loader's: not a rank
            return
        with self.lock:
            if name == "step_boundary":
                self.boundaries += 1
                self.counts.clear()
            self.counts[name] += 1
            due = self._take(name)
        if due is not None:
            strike(due[1], due[0], self.boundaries, tensors)

    def _take(self, name: str) -> tuple[int, Fault] | None:
        for index, fault in self.pending.items():
            if fault.point == name and fault.nth == self.counts[name] and self._now(fault):
                del self.pending[index]
                return index, fault
        return None

    def _now(self, fault: Fault) -> bool:
        """Whether it is the fault's step. Forming the first groups is no recovery: those wait for the first batch."""
        if fault.step == ANY_STEP:
            return self.boundaries > 0 or self.incarnation > 0 or not fault.point.startswith("recovery.")
        return fault.step == self.boundaries

    def awaits(self, name: str) -> bool:
        if os.getpid() != self.pid:
            return False
        with self.lock:
            return any(fault.point == name and self._now(fault) for fault in self.pending.values())


#: True while points must be looked at: before the environment was read, and while faults are armed.
_active = True
_injector: _Injector | None = None


def point(name: str, tensors: Sequence[Any] = (), **info: Any) -> None:
    """A place, one of :data:`shared_core.faults.spec.POINTS`, where a fault may strike; ``info`` is for readers.
    ``tensors``: what the program has there, on the CPU, in which a bit may flip.
    """
    if _active:
        _visit(name, tensors)


def _visit(name: str, tensors: Sequence[Any]) -> None:
    injector = _resolve()
    if injector is not None:
        injector.visit(name, tensors)


def _resolve() -> _Injector | None:
    """The armed injector, read from the environment the first time."""
    global _active
    if _injector is None and _active and not arm_from_env():
        # A standby imports this before it has a rank; it keeps looking, all others are done.
        _active = FAULTS in os.environ and "RANK" not in os.environ
    return _injector


def arm(faults: Iterable[Fault], rank: int, incarnation: int = 0) -> None:
    """Arm those of ``faults`` that concern this worker, in place of what was armed before.

    A fault's place in ``faults``, those of the whole job, identifies it in the record of struck ones.
    """
    global _active, _injector
    _injector = _Injector(faults, rank, incarnation)
    _active = bool(_injector.pending)


def disarm() -> None:
    global _active, _injector
    _active, _injector = False, None


def arm_from_env() -> bool:
    """Arm what :func:`variables` names for this rank; whether there was something, from a launcher above this."""
    env = os.environ
    if "RANK" not in env or FAULTS not in env or not _comes_from(env.get(LAUNCHER, "")):
        return False
    arm(loads(env[FAULTS]), int(env["RANK"]), int(env.get("SWIFT_RECOVERY_INCARNATION", "0")))
    return True


def variables(faults: Iterable[Fault]) -> dict[str, str]:
    """What arms ``faults`` in the processes that this one starts, and in those that they start."""
    return {FAULTS: dumps(faults), LAUNCHER: str(os.getpid())}


def read_file(path: str | os.PathLike[str]) -> list[Fault]:
    """The faults in a file, a JSON list. Raises ConfigError where it cannot be read."""
    try:
        with open_regular(path) as file:
            return loads(file.read().decode())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--faults: cannot read {path}: {error}") from error


def take_out(env: MutableMapping[str, str]) -> bool:
    """Remove what would arm faults; returns whether there was something."""
    env.pop(LAUNCHER, None)
    return env.pop(FAULTS, None) is not None


def _comes_from(launcher: str) -> bool:
    """Whether the process of that id is an ancestor of this one."""
    here = os.getppid()
    while here > 1 and str(here) != launcher:
        try:
            here = int(Path(f"/proc/{here}/stat").read_bytes().rpartition(b")")[2].split()[1])
        except OSError:
            return False
    return here > 1


def flips_by(flip: Callable[[str, int], None]) -> None:
    """Faults of kinds :data:`~shared_core.faults.spec.FLIPS` call ``flip``, with the kind and the number of the bit."""
    global _flip
    _flip = flip


def flip_bit(tensors: Sequence[Any], bit: int) -> None:
    """Flip one bit of tensors on the CPU as faulty memory does: no version counter and no hook sees it.

    Args:
        bit: its number in all of them, one behind the other; taken modulo their number. Raises IndexError if there are
            none.
    """
    sizes = [8 * tensor.nbytes for tensor in tensors]
    bit = bit % sum(sizes) if any(sizes) else 0
    place = 0
    while bit >= sizes[place]:
        bit, place = bit - sizes[place], place + 1
    raw = (ctypes.c_uint8 * tensors[place].nbytes).from_address(tensors[place].data_ptr())
    raw[bit // 8] ^= 1 << bit % 8


def set_step(boundaries: int) -> None:
    """Set the rank's step boundaries, the one of the present batch included; a replacement calls it when it joins."""
    injector = _resolve() if _active else _injector
    if injector is not None:
        with injector.lock:
            injector.boundaries = boundaries
            injector.counts.clear()


def update_window() -> AbstractContextManager[Any]:
    """Context of the optimizer update: strikes at its n-th tensor operation when a fault at ``update.during`` is due.

    Operations are counted from the step boundary, so those of a second optimizer follow those of the first.
    """
    if not _active:
        return _NOTHING
    injector = _resolve()
    if injector is None or not injector.awaits("update.during"):
        return _NOTHING
    return _operations(lambda: injector.visit("update.during"))


def _operations(each: Callable[[], None]) -> AbstractContextManager[Any]:
    """A context that calls ``each`` before every tensor operation; torch is imported here, not by unarmed programs."""
    from shared_core.faults.dispatch import BeforeEach

    return BeforeEach(each)


def strike(fault: Fault, index: int = -1, boundaries: int = 0, tensors: Sequence[Any] = ()) -> None:
    """Record a fault and carry it out on this process; ``index`` is its place in the job's list, -1 for none.
    ``tensors``: see :func:`point`.

    Raises FaultInjected, an OSError of :data:`~shared_core.faults.spec.REFUSALS`, or WaitTimeout for ``after``.
    """
    if fault.after is not None:
        first = fault.after
        wait = Wait(f"rank {fault.rank}, struck at {fault.point},", f"fault {first} to strike", AFTER_S, bound="after")
        poll(lambda: first in _struck_indices(), lambda: False, wait)
    if fault.delay_s:
        timer = threading.Timer(fault.delay_s, _carry_out, (fault, index, boundaries, tensors))
        timer.daemon = True
        timer.start()
    else:
        _carry_out(fault, index, boundaries, tensors)


def _carry_out(fault: Fault, index: int, boundaries: int, tensors: Sequence[Any]) -> None:
    _record(fault, index, boundaries)
    if fault.kind == "exception":
        raise FaultInjected(f"injected into rank {fault.rank} at {fault.point}, step {boundaries}")
    if fault.kind in REFUSALS:
        number = getattr(errno, fault.kind)
        raise OSError(number, os.strerror(number))
    if fault.kind in FLIPS:
        _flip(fault.kind, fault.bit)
        return
    if fault.kind == FLIP_VALUE:
        flip_bit(tensors, fault.bit)
        return
    if fault.kind == SLOW:
        _share_core()
        return
    if fault.kind == "os._exit":
        os._exit(EXIT_CODE)
    if fault.kind == "segfault":
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        ctypes.string_at(0)
    os.kill(os.getpid(), getattr(signal, fault.kind))


def _share_core() -> None:
    """Pin this worker, all of its threads, to one core, and start busy loops there. They end with its process group."""
    core = {min(os.sched_getaffinity(0))}
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), core)
    for _ in range(_BUSY_LOOPS):
        subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"], stdin=subprocess.DEVNULL)


def _record(fault: Fault, index: int, boundaries: int) -> None:
    """Write down a strike before it happens, with one appending write to the file named by ``SWIFT_FAULTS_STRUCK``."""
    path = os.environ.get(STRUCK)
    if path:
        line = {
            "index": index,
            "fault": fault.to_dict(),
            "pid": os.getpid(),
            "time": time.time(),
            "boundaries": boundaries,
        }
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(fd, (json.dumps(line) + "\n").encode())
        finally:
            os.close(fd)
    events = os.environ.get("SWIFT_RECOVERY_EVENTS")
    if events:
        generation = int(os.environ.get("SWIFT_RECOVERY_GENERATION", "0"))
        log = EventLog(events, os.environ.get(RUN, ""))
        log.emit("fault", rank=fault.rank, generation=generation, fault=fault.to_dict(), boundaries=boundaries)
    console(f"fault injector: {fault}")


def read_struck(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Records of the faults that struck, in order: ``index``, ``fault``, ``pid``, ``time``, ``boundaries``."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def _struck_indices() -> set[int]:
    path = os.environ.get(STRUCK)
    return {record["index"] for record in read_struck(path)} if path else set()

"""Linux primitives: subreaper, parent-death signal, process states and titles, wait statuses, memory."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from shared_core.errors import Unsupported

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_MADV_COLLAPSE = 25
_HUGE = 2 << 20


#: Folder that holds the package; stays importable for workers where the package is run from a checkout.
PACKAGE_ROOT = str(Path(__file__).resolve().parents[2])
#: ``python -c`` and ``-m`` put the working directory first, from which torchrun's workers import nothing.
NOT_FROM_HERE = "import sys; sys.path[:1] = [p for p in sys.path[:1] if getattr(sys.flags, 'safe_path', 0)]; "


def run_module(module: str, *args: str) -> list[str]:
    """Command line that runs a module of this package, with this interpreter's flags, without the working directory."""
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # as multiprocessing's spawn does
    code = f"{NOT_FROM_HERE}sys.path.append({PACKAGE_ROOT!r}); import runpy; runpy._run_module_as_main({module!r})"
    return [sys.executable, *flags, "-c", code, *args]


def _prctl(option: int, value: int) -> None:
    if not sys.platform.startswith("linux"):
        raise Unsupported(
            f"swiftrun supervises processes with Linux' prctl; this is {sys.platform}. Use torchrun here."
        )
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl({option}, {value}): {os.strerror(error)}")


def become_subreaper() -> None:
    """Adopt orphaned descendants of this process, to wait for them and end them. Linux only, else Unsupported."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int, sig: signal.Signals = signal.SIGKILL) -> bool:
    """Have the kernel send this process a signal when its parent dies; False if ``parent`` is not the parent."""
    _prctl(_PR_SET_PDEATHSIG, sig)
    return os.getppid() == parent


def fork_away(tell: Callable[[int], None] = lambda _: None) -> bool:
    """Fork a process that the nearest subreaper adopts. Returns True in it, once it is adopted, and False here.
    ``tell``: called here with its pid, or with ``-errno`` where no process can be made, before it continues.
    """
    opened: list[int] = []
    try:
        opened += os.pipe()
        opened += os.pipe()
        middle = os.fork()
    except OSError as error:  # no processes or descriptors are left: later there may be some
        for fd in opened:
            os.close(fd)
        tell(-(error.errno or errno.EAGAIN))
        return False
    go_read, go_write, pid_read, pid_write = opened
    if middle == 0:
        try:
            forked = os.fork()
        except OSError as error:
            forked = -(error.errno or errno.EAGAIN)
        if forked != 0:
            os.write(pid_write, str(forked).encode())
            os._exit(0)
        os.close(go_write)
        os.close(pid_read)
        os.close(pid_write)
        # A byte comes when the middle process is gone and this one is adopted.
        adopted = os.read(go_read, 1)
        os.close(go_read)
        if not adopted:
            os._exit(1)
        return True
    os.close(go_read)
    os.close(pid_write)
    pid = int(os.read(pid_read, 32) or -errno.EAGAIN)
    os.close(pid_read)
    os.waitpid(middle, 0)
    tell(pid)
    if pid > 0:
        os.write(go_write, b"g")
    os.close(go_write)
    return False


def state_of(pid: int) -> str | None:
    """Letter of a process' state as in ``/proc/PID/stat``; None if it is gone, ``?`` if nobody can look."""
    try:
        return _stat(pid)[0].decode()
    except OSError as error:
        return "?" if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM) else None


def _stat(pid: int | str) -> list[bytes]:
    """The fields of ``/proc/PID/stat`` from the third on."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        raw = file.read()
    # the second, the command name, stands in parentheses and may hold parentheses itself
    return raw[raw.rindex(b")") + 2 :].split()


def usage(pid: int) -> tuple[float, int] | None:
    """Seconds of processor time that a process has used, and bytes of memory that it holds; None if nobody can look."""
    try:
        words = _stat(pid)
        ticks, pages = int(words[11]) + int(words[12]), int(words[21])
    except (OSError, ValueError, IndexError):
        return None
    return ticks / os.sysconf("SC_CLK_TCK"), pages * os.sysconf("SC_PAGE_SIZE")


def core() -> int:
    """The core that this thread has run on last."""
    return int(_stat("thread-self")[36])


def shared_memory() -> Iterator[tuple[int, int, int, int, str]]:
    """What this process may write to and others see: start, end, offset in the file, its inode and its path."""
    for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
        bounds, rights, offset, _, inode, *path = line.split(maxsplit=5)
        if rights.startswith("rw") and rights.endswith("s"):
            start, end = (int(bound, 16) for bound in bounds.split("-"))
            yield start, end, int(offset, 16), int(inode), path[0] if path else ""


def begun() -> float:
    """When this process was started, in seconds since the epoch. An ``exec`` since then does not count."""
    now = time.time()
    try:
        ticks = int(_stat("self")[19])
    except OSError:
        return now
    return now - max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))


def collapse_memory() -> int:
    """Gather this process' anonymous memory in huge pages, and return how many bytes were.

    A fork copies, and an exit frees, one entry for each page: with an imported torch and Lightning a fork takes 3 ms
    instead of 9, and the end of a killed worker is noticed after 4 ms instead of 14. Does nothing before Linux 6.1.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    gathered = 0
    for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
        fields = line.split(maxsplit=5)
        if fields[1] != "rw-p" or fields[4] != "0" or fields[5:] == ["[stack]"]:
            continue
        start, end = (int(bound, 16) for bound in fields[0].split("-"))
        start, end = -(-start // _HUGE) * _HUGE, end // _HUGE * _HUGE
        if end > start and libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_COLLAPSE) == 0:
            gathered += end - start
    return gathered


def thread_count() -> int:
    """Threads of this process, those of libraries included."""
    return len(os.listdir("/proc/self/task"))


def children() -> list[int]:
    """Direct children of this process, adopted ones included."""
    found: list[int] = []
    for task in os.listdir("/proc/self/task"):
        with suppress(OSError), open(f"/proc/self/task/{task}/children", encoding="ascii") as file:
            found += map(int, file.read().split())
    return found


def kill_group(pid: int, sig: signal.Signals = signal.SIGKILL) -> None:
    """Send ``sig`` to the process group that ``pid`` leads and to ``pid`` itself, where there are such."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, sig)
    # a process that was forked an instant ago leads its group only after its setsid
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, sig)


def peek_dead() -> int | None:
    """A child that has exited and was not reaped, or None. It is left a zombie: its pid and group stay its own."""
    try:
        info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return info.si_pid if info is not None else None


def reap(pid: int) -> int | None:
    """Exit code of a dead child (negative: the signal that killed it); None if it cannot be waited for."""
    try:
        _, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return None
    return os.waitstatus_to_exitcode(status)


def describe_exit(code: int) -> str:
    """``killed by SIGKILL`` or ``exited with code 1``."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def open_pidfd(pid: int) -> int | None:
    """A descriptor that becomes readable when ``pid`` dies; None where the kernel has none (SIGCHLD tells then)."""
    try:
        return os.pidfd_open(pid)
    except (OSError, AttributeError):
        return None


# -- what ``ps`` and ``top`` show: rank and script -------------------------------------------------------------------
# ``ps`` reads the memory that held the command line. It is written over in place: that needs no privilege and no other
# package, and a forked child has its own copy. The title has at most the room of the command line before it.

_PR_SET_NAME = 15
#: Longest name in ``top`` and ``ps -e``, in bytes.
_NAME_BYTES = 15
#: Places of ``arg_start`` and ``arg_end`` in ``/proc/PID/stat`` after the name, which is the second field.
_ARG_START, _ARG_END = 45, 46

_bounds: tuple[int, int] | None = None


def set_title(role: str, target: str = "", args: Sequence[str] = ()) -> None:
    """Have this process shown as ``swift ROLE: TARGET ARGS``, as far as there is room; else nothing happens."""
    set_name(role)
    with suppress(OSError, ValueError, IndexError):
        start, end = _arguments()
        text = fitting(f"swift {role}", target, args, end - start - 1)
        ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


def set_name(role: str) -> None:
    """Have this process named ``swift ROLE`` in ``top``; its command line stays."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_NAME, f"swift {role}".encode()[:_NAME_BYTES], 0, 0, 0)


def fitting(name: str, target: str, args: Sequence[str], room: int) -> bytes:
    """The title in at most ``room`` bytes; of a long path the end is kept, by which it can be found.

    A last byte of zero must follow, by which the kernel knows that the title ends where the command line did.
    """
    if not target:
        return name.encode(errors="surrogateescape")[:room]
    head = f"{name}: ".encode()
    path = target.encode(errors="surrogateescape")
    if len(head) + len(path) > room:
        path = Path(target).name.encode(errors="surrogateescape")
    rest = b"".join(b" " + arg.encode(errors="surrogateescape") for arg in args)
    return (head + path + rest).replace(b"\0", b" ")[:room]


def _arguments() -> tuple[int, int]:
    """Where the command line of this process lies in its memory; of a forked child where its parent's did."""
    global _bounds
    if _bounds is None:
        fields = _stat("self")
        start, end = int(fields[_ARG_START]), int(fields[_ARG_END])
        if not 0 < start < end:
            raise ValueError("the command line of this process cannot be found")
        _bounds = start, end
    return _bounds


# -- memory of this machine, and of one process --------------------------------------------------------------------

_CGROUP = Path("/sys/fs/cgroup")


def private_bytes(pid: int) -> int:
    """Memory that a process has to itself; 0 if nobody knows."""
    found = _fields(Path(f"/proc/{pid}/smaps_rollup"))
    return sum(found.get(name, 0) for name in ("Private_Clean", "Private_Dirty", "Private_Hugetlb"))


def machine_bytes(root: Path | None = None, meminfo: Path = Path("/proc/meminfo")) -> tuple[int, int]:
    """``(free, total)``: what processes can still get, and all there is; the limit of the control group counts too.
    ``root``: its folder (cgroups 2), by default that of this process.
    """
    found = _fields(meminfo)
    free, total = found.get("MemAvailable", 0), found.get("MemTotal", 0)
    with suppress(OSError, ValueError):
        group = root or _CGROUP / Path("/proc/self/cgroup").read_text().rpartition("0::")[2].strip().strip("/")
        limit = int((group / "memory.max").read_text())  # "max" where there is none
        used = int((group / "memory.current").read_text())
        counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        # Pages of files can be freed, but those of memory file systems cannot.
        free = min(free, limit - used + int(counts.get("file", 0)) - int(counts.get("shmem", 0)))
        total = min(total, limit)
    return max(0, free), total


def _fields(path: Path) -> dict[str, int]:
    """The ``Name: N kB`` lines of a file in ``/proc``, in bytes."""
    found: dict[str, int] = {}
    with suppress(OSError):
        for line in path.read_text().splitlines():
            name, _, rest = line.partition(":")
            words = rest.split()
            if len(words) == 2 and words[1] == "kB":
                found[name] = int(words[0]) << 10
    return found

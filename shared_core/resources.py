"""What the system refuses a job - room, processes, threads, descriptors, memory - and what people can do about it."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

from shared_core.errors import OutOfResources

#: What the system says when a file cannot grow: full device, quota, limit of the process.
FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
#: What one process has used up, and its replacement has again.
OF_PROCESS = frozenset({errno.EMFILE, errno.ENOMEM, errno.EAGAIN})
#: Start of the names of files in the job's folder, each of which says that the user knows of something.
TOLD = "told-"
#: Seconds between two tries: the first, and the longest, which each try comes nearer to.
FIRST_S, LONGEST_S = 0.1, 5.0

_ADVICE = {
    **dict.fromkeys(FULL, "make room there"),
    **dict.fromkeys((errno.EROFS, errno.EACCES, errno.EPERM), "make it writable for this user"),
    **dict.fromkeys((errno.ENOENT, errno.ENOTDIR), "see that its folder is there"),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "raise the limit of open files (ulimit -n)"),
    errno.EAGAIN: "raise the limit of processes and threads (ulimit -u, in a container --pids-limit)",
    errno.ENOMEM: "free memory, or run fewer workers on this machine",
    **dict.fromkeys((errno.EIO, errno.ESTALE, errno.ENODEV), "see to this disk"),
}

_NO_THREAD = "Resource temporarily unavailable|can't start new thread"
_TEXTS = {
    "No space left on device|Disk quota exceeded": _ADVICE[errno.ENOSPC],
    "Read-only file system": _ADVICE[errno.EROFS],
    "Too many open files": _ADVICE[errno.EMFILE],
    _NO_THREAD: _ADVICE[errno.EAGAIN],
    "MemoryError|[Cc]annot allocate memory|can't allocate memory": _ADVICE[errno.ENOMEM],
}


def reason(error: OSError) -> str:
    return error.strerror or str(error)


def advice(error: OSError) -> str:
    """What people can do; empty for an error that is not about resources."""
    return _ADVICE.get(error.errno or 0, "")


def no_thread(error: Exception) -> bool:
    """Whether an error says, in its text, that the system has no thread or process left."""
    return re.search(_NO_THREAD, str(error)) is not None


def advice_on(text: str) -> str:
    """What people can do about an exception of which only the text is known; empty if it is not about resources."""
    return next((found for pattern, found in _TEXTS.items() if re.search(pattern, text)), "")


def what_to_do(error: OSError) -> str:
    """``(No space left on device): make room there``."""
    found = advice(error)
    return f"({reason(error)}){f': {found}' if found else ''}"


class Retries:
    """When to try again what the system has refused. The user hears of it once, until it works again."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._say, self._clock = say, clock
        self._wait_s, self._next = 0.0, 0.0
        self.error: OSError | None = None

    @property
    def due(self) -> bool:
        return self.error is None or self._clock() >= self._next

    def refused(self, what: str, error: OSError) -> None:
        """``what`` could not be had; the next try is later than after the one before."""
        self._wait_s = min(LONGEST_S, 2 * self._wait_s or FIRST_S)
        self._next = self._clock() + self._wait_s
        if self.error is None:
            self._say(f"{what} {what_to_do(error)}; it is tried again")
        self.error = error

    def worked(self) -> None:
        self.error, self._wait_s = None, 0.0


def told_before(folder: Path, what: str) -> bool:
    """Whether a process that shares ``folder`` has told the user of the word ``what``; the next one hears yes."""
    try:
        os.close(os.open(folder / f"{TOLD}{what}", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        return True
    except OSError:
        return False
    return False


def map_file(path: Path, size: int) -> mmap.mmap:
    """As :func:`map_room`, for a file that recovery needs: OutOfResources where there is no room."""
    try:
        return map_room(path, size)
    except OSError as error:
        if error.errno in OF_PROCESS:
            raise
        raise unwritable(path, size, error) from error


def map_room(path: str | os.PathLike[str], size: int) -> mmap.mmap:
    """Map the first ``size`` bytes of a file, made if it is not there, with the space allocated.

    A file that has only been given its length is a trap where memory is short: the first touch of a page ends the
    process with SIGBUS. Raises OSError if there is no room, or this process may do no more.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.posix_fallocate(fd, 0, size)
        return mmap.mmap(fd, size)
    finally:
        os.close(fd)


def unwritable(path: Path, size: int, error: OSError, nor: str = "") -> OutOfResources:
    message = f"{size} bytes cannot be written to {path} ({reason(error)}){nor}: "
    if error.errno in FULL and path.is_relative_to("/dev/shm"):
        message += "give the job more shared memory (docker run --shm-size=..., or mount -o remount,size=... /dev/shm)"
    elif error.errno in (errno.ENOENT, errno.ENOTDIR):
        message += "its folder was removed while the job ran; start the job again"
    else:
        message += advice(error) or "see to this disk"
    return OutOfResources(error.errno, message)


def write_all(fd: int, data: bytes | memoryview) -> None:
    """Write all of ``data``: the kernel takes at most 2 GiB at once."""
    left = memoryview(data)
    while left:
        left = left[os.write(fd, left) :]


def free_bytes(folder: str | os.PathLike[str]) -> int:
    """Room that is left where a folder lies; 0 if nobody knows."""
    with contextlib.suppress(OSError):
        found = os.statvfs(folder)
        return found.f_bavail * found.f_frsize
    return 0

"""One job at a time writes to the folder of a run, or continues with it.

In a local folder the kernel keeps the lock: each process of the job that needs it holds a shared ``flock`` on one file,
and the file says whose it is. It is free as soon as none of them is alive. Behind a URL, and on a file system without
``flock``, the file is a lease: its holder writes it again every few seconds, and it is free once it has not changed for
:data:`LEASE_S`, by the clock of who looks. Does not import torch.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from shared_core.checkpoint import store
from shared_core.checkpoint.storage import Storage
from shared_core.errors import CorruptFile, RunInUse
from shared_core.plain_json import is_count, parse
from shared_core.system.process import state_of

#: Name of the file in the folder of a run.
FILE = "in_use.json"
#: An unchanged lease is free after so long; its holder renews it this often; in seconds.
LEASE_S, RENEW_S = 30.0, 5.0
#: A start waits so long for another job to leave, such as the writer of one that was killed, in seconds.
WAIT_S = 10.0
_LOOK_S = 0.1
#: A larger file is not ours.
_MOST_BYTES = 1 << 16
#: Two jobs that take a lease at the same time see after so many seconds which one was last.
_SETTLE_S = 0.5
#: Errors of file systems without ``flock``.
_NO_LOCKS = frozenset({errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})


class RunLock:
    """The lock of one run's folder for one job. Used by one thread, except for :meth:`renew`. ``storage`` is the folder
    of the run, made when the lock is taken. ``owner`` is a unique name of the job; its processes share the lock.
    """

    def __init__(self, storage: Storage, owner: str) -> None:
        self._storage, self._owner = storage, owner
        self._fd = -1
        self._renewed = -1.0
        self._beat = 0

    def take(self, wait_s: float = 0.0) -> None:
        """Take it, or check that it is still held.

        ``wait_s``: how long to wait for another job to leave, in seconds. A lease is watched until it has ended or was
        renewed; with 0 it is not.

        Raises:
            RunInUse: another job holds it.
            OSError: the storage cannot be written.
        """
        local = self._storage.local(FILE)
        if local is not None and self._renewed < 0:
            deadline = time.monotonic() + wait_s
            try:
                while not self._try(local):
                    if time.monotonic() >= deadline:
                        found = _content(local.read_bytes()) if local.exists() else None
                        raise _in_use(self._storage.root, found)
                    time.sleep(_LOOK_S)
                return
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
        if self._renewed < 0:
            self._take_lease(wait_s)
        self.renew()

    def renew(self) -> None:
        """Write a lease again if it is time. Any thread may call it. Raises RunInUse if another job took it, as this
        one had not renewed it in time; OSError.
        """
        if self._renewed >= 0 and time.monotonic() >= self._renewed + RENEW_S:
            found = self._read_lease()
            if found and found.get("owner") != self._owner:
                self._renewed = -1.0
                raise _in_use(self._storage.root, found)
            self._write_lease()

    @property
    def is_lease(self) -> bool:
        """Whether it must be renewed."""
        return self._renewed >= 0

    def release(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        if self._renewed >= 0:
            self._renewed = -1.0
            with suppress(OSError):
                if (self._read_lease() or {}).get("owner") == self._owner:
                    self._storage.remove(FILE)

    # -- where the kernel keeps it -------------------------------------------------------------------------------------

    def _try(self, path: Path) -> bool:
        if self._fd >= 0 and _is(self._fd, path):
            return True
        self.release()
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            with suppress(BlockingIOError):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                raw = json.dumps(self._said()).encode()
                os.pwrite(fd, raw, 0)
                os.ftruncate(fd, len(raw))
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            # Between the two locks another job may have come.
            found = _content(os.pread(fd, _MOST_BYTES, 0))
            if _is(fd, path) and found is not None and found.get("owner") == self._owner:
                self._fd, fd = fd, -1
                return True
            return False
        except BlockingIOError:
            return False
        finally:
            if fd >= 0:
                os.close(fd)

    # -- a lease -------------------------------------------------------------------------------------------------------

    def _take_lease(self, wait_s: float) -> None:
        begun = changed = time.monotonic()
        first = found = self._read_lease()
        alive = False
        while found is not None and found.get("owner") != self._owner and not _is_dead(found):
            now = time.monotonic()
            alive = alive or found != first
            if not wait_s or (alive and now >= begun + wait_s):
                raise _in_use(self._storage.root, found)
            if now >= changed + LEASE_S:
                break
            time.sleep(_LOOK_S if self._storage.local() is not None else 10 * _LOOK_S)
            again = self._read_lease()
            if again != found:
                found, changed = again, time.monotonic()
        self._write_lease()
        time.sleep(_SETTLE_S)
        found = self._read_lease()
        if found is None:  # another process of this job is just renewing it, or a job has released it
            time.sleep(_SETTLE_S)
            found = self._read_lease()
        if not found or found.get("owner") != self._owner:
            self._renewed = -1.0
            raise _in_use(self._storage.root, found)

    def _read_lease(self) -> dict[str, Any] | None:
        """Content of the file: None where it is absent, empty where it cannot be read. Behind a URL, a file that is
        being written may look empty. That is no free lease, so it is read again.
        """
        deadline = time.monotonic() + _SETTLE_S
        while True:
            found = None
            with suppress(CorruptFile):
                try:
                    found = _content(store.read_file(self._storage, FILE, _MOST_BYTES))
                except FileNotFoundError:
                    return None
            if found is not None or self._storage.local() is not None:
                return found
            if time.monotonic() >= deadline:
                return {}
            time.sleep(_LOOK_S)

    def _write_lease(self) -> None:
        self._beat += 1
        self._renewed = time.monotonic()
        raw = json.dumps(self._said() | {"beat": f"{os.getpid()}.{self._beat}"}).encode()
        self._storage.write(FILE, [raw], len(raw))

    def _said(self) -> dict[str, Any]:
        return {"owner": self._owner, "host": socket.gethostname(), "pid": os.getpid(), "place": _place()}


def owner_of(meta: Mapping[str, Any]) -> str:
    """The job that has made a checkpoint; its processes share one lock."""
    return str(meta.get("job") or meta.get("session") or "")


def _in_use(where: str, found: dict[str, Any] | None) -> RunInUse:
    who = f" (process {found.get('pid')} on {found.get('host')})" if found else ""
    return RunInUse(
        f"another job{who} writes to {where}: wait for its end or end it; or start from scratch, in a folder of its "
        "own, with checkpoint.resume='never' (SWIFT_RECOVERY_CHECKPOINT_RESUME=never)"
    )


def _content(raw: bytes) -> dict[str, Any] | None:
    with suppress(ValueError):
        found = parse(raw)
        return found if isinstance(found, dict) else None
    return None


def _is(fd: int, path: Path) -> bool:
    with suppress(OSError):
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    return False


def _place() -> str:
    """The scope of a process id: this boot of this machine, and the pid namespace. Empty if unknown."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    return ""


def _is_dead(found: dict[str, Any]) -> bool:
    """Whether the holder of a lease was a process of this machine that has ended."""
    pid: Any = found.get("pid")
    here = _place()
    return bool(here) and found.get("place") == here and is_count(pid) and state_of(pid) in (None, "Z", "X")

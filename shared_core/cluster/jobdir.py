"""The private folder of a job, in memory where possible, and gone afterwards even if the agent was killed."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from shared_core.cluster.secret import FILE as SECRET

PREFIX = "swift_"
_LOGS = "swift-log-"
_LOCK = "lock"
#: Folder of other machines' publications.
MIRROR = "mirror"
#: Folder of snapshots and of the process that writes them to storage, see shared_core/checkpoint/spool.py.
CHECKPOINTS = "checkpoints"


def log_folder(parent: str | os.PathLike[str] | None, job_dir: Path) -> Path:
    """Where the workers of a job on this machine log to disk.

    Args:
        parent: the folder that the user has chosen; None for that of temporary files.
        job_dir: the private folder of the job.
    """
    return Path(parent or tempfile.gettempdir()) / f"{_LOGS}{job_dir.name}"


class JobDir:
    """Makes the folder (mode 0700) and holds a lock in it for as long as this process lives.

    Args:
        logs: parent of the folder for logs on disk, which is removed with it; see :func:`log_folder`.

    Attributes:
        path: the folder.
    """

    def __init__(self, logs: str | None = None) -> None:
        for parent in ("/dev/shm", tempfile.gettempdir()):
            with suppress(OSError):
                self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
                break
        else:
            raise OSError("no folder for temporary files can be written to: set TMPDIR")
        self._lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._logs = log_folder(logs, self.path)
        sweep(self.path.parent)
        for left in self._logs.parent.glob(f"{_LOGS}{PREFIX}*"):  # of jobs that are gone
            if not (self.path.parent / left.name.removeprefix(_LOGS)).exists():
                shutil.rmtree(left, ignore_errors=True)

    def clear(self, keep: int | None = None) -> None:
        """Remove what an attempt has left, but not the lock, snapshots, and what is kept for other machines.

        Args:
            keep: number of an attempt from which the next one goes on: its publications and what it handed on stay.
        """
        shutil.rmtree(self._logs, ignore_errors=True)
        if keep is not None:
            self._clear_before(keep)
            return
        for entry in self.path.iterdir():
            if entry.name in (MIRROR, CHECKPOINTS, SECRET):
                continue
            if entry.is_dir():
                shutil.rmtree(entry, ignore_errors=True)
            elif entry.name != _LOCK:
                entry.unlink(missing_ok=True)

    def _clear_before(self, attempt: int) -> None:
        for folder in self.path.glob("rank*/attempt*"):
            if int(folder.name.removeprefix("attempt")) != attempt:
                shutil.rmtree(folder, ignore_errors=True)
        for progress in self.path.glob("rank*/progress"):
            progress.unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove the folder. A second call does nothing."""
        shutil.rmtree(self._logs, ignore_errors=True)
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def sweep(parent: Path) -> None:
    """Remove folders that killed agents left in ``parent``: nobody holds their locks."""
    for folder in parent.glob(PREFIX + "*"):
        with suppress(OSError):
            fd = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(fd)

"""The private folder of a job, in memory where possible, and gone afterwards even if the agent was killed."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

PREFIX = "swift_"
_LOCK = "lock"
#: Folder of other machines' publications.
MIRROR = "mirror"


class JobDir:
    """Makes the folder (mode 0700) and holds a lock in it for as long as this process lives.

    Attributes:
        path: the folder.
    """

    def __init__(self) -> None:
        for parent in ("/dev/shm", tempfile.gettempdir()):
            with suppress(OSError):
                self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
                break
        else:
            raise OSError("no folder for temporary files can be written to: set TMPDIR")
        self._lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        sweep(self.path.parent)

    def clear(self, keep: int | None = None) -> None:
        """Remove what an attempt has left, but not the lock and what is kept for other machines.

        Args:
            keep: number of an attempt from which the next one goes on: its publications and what it handed on stay.
        """
        if keep is not None:
            self._clear_before(keep)
            return
        for entry in self.path.iterdir():
            if entry.name == MIRROR:
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

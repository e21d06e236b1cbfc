"""Where publications go that the job's folder in memory has no room for: to disk, with a link in their place."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from shared_core.events import console_once
from shared_core.faults import inject
from shared_core.protocol.worker_env import WorkerEnv
from shared_core.resources import FULL, OF_PROCESS, reason, unwritable
from shared_core.system.jobdir import DISK, ON_DISK

T = TypeVar("T")


def overflow(env: WorkerEnv) -> Overflow:
    """For the publisher of a worker: beside the logs on disk, whose folder the agent has made and removes."""
    logs = env.job_dir / DISK
    return Overflow(logs / f"{ON_DISK}{env.rank}" / f"attempt{env.restart}" if logs.is_dir() else None)


class Overflow:
    """The disk behind one rank's publisher. Readers follow the links and need not know. ``folder``: on disk, private to
    the job; made when first needed. None: there is none.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder, self._told = folder, False
        self.used = folder is not None and folder.exists()

    def write(self, path: Path, size: int, write: Callable[[Path], T]) -> T:
        """Have ``write`` make the file ``path``, or, where that does not fit, a file on disk to which ``path`` links.

        Args:
            size: in bytes, about, for the error.
            write: makes a file, and leaves nothing where it raises.

        Raises:
            OutOfResources: it cannot be written at all.
            OSError: this process may do no more.
        """
        try:
            inject.point("publish")
            return write(path)
        except OSError as error:
            return self.elsewhere(path, size, write, error)

    def elsewhere(self, path: Path, size: int, write: Callable[[Path], T], full: OSError) -> T:
        """As :meth:`write`, after the memory has refused the file with the error ``full``."""
        if full.errno in OF_PROCESS:
            raise full
        if full.errno not in FULL or self._folder is None:
            raise unwritable(path, size, full) from full
        there = self._folder / f"{path.name}.{os.urandom(4).hex()}"
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.used = True
            done = write(there)
            link = path.with_name(f"{path.name}.link.tmp")
            link.unlink(missing_ok=True)
            link.symlink_to(os.path.relpath(there, path.parent))
            os.rename(link, path)
        except OSError as error:
            with suppress(OSError):
                there.unlink()
            raise unwritable(path, size, full, f", nor to {there.parent} ({reason(error)})") from error
        if not self._told:
            self._told = True
            disk = there.resolve().parents[1]
            console_once(
                "memory",
                f"memory is full at {path.parent}: what workers publish at each batch goes to {disk} where "
                "it does not fit, which takes longer. For more memory: docker run --shm-size=..., or "
                "mount -o remount,size=... /dev/shm",
            )
        return done

    def remove(self, path: Path) -> None:
        """Remove a file, and what it links to; nothing if it is not there."""
        if self.used:
            with suppress(OSError):  # no link, or not there
                os.unlink(path.parent / os.readlink(path))
        path.unlink(missing_ok=True)

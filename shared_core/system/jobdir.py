"""The private folder of a job, in memory where possible, and gone afterwards even if the agent was killed; in it a card
by which those who watch find the job.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from shared_core.codec import Between, Count, OsText, Record, fit
from shared_core.errors import ConfigError, OutOfResources
from shared_core.plain_json import parse
from shared_core.resources import TOLD, free_bytes
from shared_core.system import marker
from shared_core.system.marker import MADE
from shared_core.system.secret import FILE as SECRET

PREFIX = "swift_"
#: A file system in memory.
MEMORY = "/dev/shm"
_LOGS = "swift-log-"
#: Link to the folder for logs on disk: short links lead through it, which take no room in memory.
DISK = "disk"
#: Start of the names of folders beside the logs on disk: publications of a rank that did not fit into memory.
ON_DISK = "publications"
#: Bytes of free memory that are left to others: with less, the folder is among temporary files.
LEAST_BYTES = 16 << 20
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
#: Locked for as long as the launcher lives.
LOCK = "lock"
#: Which job it is, see :class:`Card`.
CARD = "card.json"
#: Start of the names of files that are made when a rank begins to train, see shared_core/worker/start/truncation.py.
TRAINS = "trains."
#: Socket of the launcher, for its workers, see shared_core/launcher/control_socket.py.
AGENT = "agent"
#: Folder of other machines' publications.
MIRROR = "mirror"
#: Folder of snapshots and of the process that writes them to storage, see shared_core/checkpoint/spool.py.
CHECKPOINTS = "checkpoints"


def log_folder(parent: str | os.PathLike[str] | None, job_dir: Path) -> Path:
    """Where the workers of a job on this machine log to disk. ``parent`` None: among temporary files."""
    return Path(parent or _temporary()) / f"{_LOGS}{job_dir.name}"


def own(folder: Path) -> bool:
    """Make a folder of mode 0700; returns whether it was made. ConfigError if another user's or no folder is there."""
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        folder.mkdir(mode=0o700)
        return True
    except FileExistsError:
        found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise ConfigError(
            f"{folder} is not a folder of this user, so its contents cannot be trusted: choose another log.dir"
        )
    folder.chmod(0o700)
    return False


class JobDir:
    """Makes the folder (mode 0700) and locks it for as long as this process lives; likewise that for logs on disk.

    Args:
        logs: parent of the folder for logs on disk, which is removed with it; see :func:`log_folder`.
        logging: there may be such logs.

    ``note``: for the user, where the folder is not in memory, or others are left over; empty otherwise. Raises
    OutOfResources if there is no place for it.
    """

    def __init__(self, logs: str | None = None, *, logging: bool = True) -> None:
        self._log_lock = -1
        self.note = ""
        for parent in places():
            if parent == MEMORY and (free := free_bytes(parent)) < LEAST_BYTES:
                self.note = (
                    f"{MEMORY} has room for {free >> 20} MiB only: what workers publish at each batch goes to "
                    f"{_temporary()}, which takes longer. For more memory: docker run --shm-size=1g, or "
                    f"mount -o remount,size=1g {MEMORY}"
                )
                continue
            with suppress(OSError):
                self.path, self._lock = _make(parent)
                break
        else:
            raise OutOfResources(errno.ENOSPC, "no folder for temporary files can be written to: set TMPDIR")
        self._logs = log_folder(logs, self.path)
        try:
            if logging and own(self._logs):
                self._log_lock = _lock(self._logs)
                _sign(self._logs)
                (self.path / DISK).symlink_to(self._logs)
        except ConfigError:
            self.remove()
            raise
        except OSError:
            pass  # whoever wants to write there says so
        sweep(self.path.parent)
        # Their jobs may run where other folders in memory are seen.
        _sweep(self._logs.parent, _LOGS + PREFIX)

    @property
    def folders(self) -> tuple[str, str]:
        return str(self.path), str(self._logs)

    def clear(self, keep: int | None = None) -> None:
        """Remove what an attempt has left, but not what belongs to the job.

        ``keep``: number of an attempt from which the next one continues: its publications and what it handed on stay.
        """
        with suppress(OSError):
            for left in [*self._logs.glob("rank*"), *self._logs.glob(f"{ON_DISK}*/attempt*")]:
                if keep is None or left.name != f"attempt{keep}":
                    shutil.rmtree(left, ignore_errors=True)
        if keep is not None:
            self._clear_before(keep)
            return
        for entry in self.path.iterdir():
            if entry.name in (MIRROR, CHECKPOINTS, SECRET, CARD, MADE, AGENT):
                continue
            if entry.is_dir():
                shutil.rmtree(entry, ignore_errors=True)
            elif entry.name != LOCK and not entry.name.startswith((TOLD, TRAINS)):
                entry.unlink(missing_ok=True)

    def _clear_before(self, attempt: int) -> None:
        for folder in self.path.glob("rank*/attempt*"):
            if int(folder.name.removeprefix("attempt")) != attempt:
                shutil.rmtree(folder, ignore_errors=True)
        for progress in self.path.glob("rank*/progress"):
            progress.unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove the folders. A second call does nothing."""
        if self._log_lock >= 0:
            shutil.rmtree(self._logs, ignore_errors=True)
            os.close(self._log_lock)
            self._log_lock = -1
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def places() -> tuple[str, str]:
    """Where folders of jobs are: in memory, or else among temporary files."""
    return MEMORY, _temporary()


def _temporary() -> str:
    """The folder for temporary files; the one that is meant, where none can be written to."""
    try:
        return tempfile.gettempdir()
    except OSError:
        return os.environ.get("TMPDIR") or "/tmp"


def _make(parent: str) -> tuple[Path, int]:
    """A new folder and the descriptor of its lock."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        try:
            fd = _lock(path)
            _sign(path)
            return path, fd
        except FileNotFoundError:
            continue
        except OSError:
            shutil.rmtree(path, ignore_errors=True)
            raise


def _lock(folder: Path) -> int:
    """Lock a new folder until the descriptor is closed; FileNotFoundError if somebody who sweeps has removed it."""
    fd = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        if not _holds(fd, folder):
            raise FileNotFoundError(folder)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _holds(fd: int, folder: Path) -> bool:
    """Whether the file that is open is still the lock of the folder."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(fd), os.lstat(folder / LOCK))
    return False


def _sign(folder: Path) -> None:
    """Leave the marker without which nobody sweeps a folder."""
    fd = os.open(folder / MADE, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with open(fd, "wb") as file:
        file.write(marker.make(_identity(folder.name, os.stat(folder))))


def _identity(name: str, found: os.stat_result) -> str:
    """What its copies, and folders of the same name elsewhere, do not have."""
    return f"{name} {found.st_ino}"


def sweep(parent: Path) -> None:
    """Remove folders that killed agents left in ``parent``, and their logs among temporary files.

    They are this user's, nobody holds their locks, and a marker says that this product has made them. No link is
    followed.
    """
    _sweep(parent, PREFIX)
    _sweep(Path(_temporary()), _LOGS + PREFIX)


def _sweep(parent: Path, prefix: str) -> None:
    with suppress(OSError):
        at = os.open(parent, _FOLDER)
        try:
            for name in os.listdir(at):
                if name.startswith(prefix):
                    with suppress(OSError):
                        _remove_abandoned(at, name)
        finally:
            os.close(at)


def _remove_abandoned(at: int, name: str) -> None:
    """Remove a folder if a killed agent has left it.

    ``at`` is a descriptor of its parent. Raises OSError if it is a link, or somebody holds its lock.
    """
    folder = os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=at)
    try:
        found = os.fstat(folder)
        if found.st_uid != os.geteuid():
            return
        lock = os.open(LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            now = os.stat(LOCK, dir_fd=folder, follow_symlinks=False)
            if not os.path.samestat(os.fstat(lock), now):
                return
            with suppress(FileNotFoundError):
                made = os.open(MADE, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
                with open(made, "rb") as file:
                    if marker.fits(file.read(marker.MOST_BYTES), _identity(name, found)):
                        shutil.rmtree(name, dir_fd=at, ignore_errors=True)
        finally:
            os.close(lock)
    finally:
        os.close(folder)


@dataclass(frozen=True)
class Card(Record):
    """One job on this machine.

    Attributes:
        name: of the job, as ``--rdzv-id`` gives it.
        begun: ``time.time()`` of its start.
        events: path of ``events.jsonl``; empty if there is none.
        events_from: size of that file before the job's first event, in bytes.
    """

    run: str = ""
    name: str = ""
    script: OsText = ""
    host: str = ""
    agent: Count = 0
    begun: Annotated[float, Between(-1e11, 1e11)] = 0.0
    events: OsText = ""
    events_from: Count = 0

    def write(self, job_dir: Path) -> None:
        """Leave it in the job's folder, atomically; an OSError is ignored, as no job depends on it."""
        with suppress(OSError):
            fresh = job_dir / f"{CARD}.new"
            fresh.write_text(self.to_json(), encoding="utf-8")
            os.replace(fresh, job_dir / CARD)

    @classmethod
    def read(cls, job_dir: Path) -> Card | None:
        """The card in a job's folder; None if there is none, or it is damaged."""
        with suppress(OSError, ValueError):
            card: Card = fit(parse((job_dir / CARD).read_bytes()), cls)
            return card
        return None


def jobs_here() -> Iterator[tuple[Path, Card]]:
    """Folders and cards of the jobs of this user that run on this machine."""
    for parent in places():
        for folder in sorted(Path(parent).glob(f"{PREFIX}*")):
            with suppress(OSError):
                if os.lstat(folder).st_uid != os.geteuid():
                    continue
                card = Card.read(folder)
                if card is not None and is_held(folder):
                    yield folder, card


def is_held(job_dir: Path) -> bool:
    """Whether the launcher of the job lives: it holds a lock in the folder."""
    try:
        fd = os.open(job_dir / LOCK, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(fd)
    return False

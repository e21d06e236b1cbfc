"""Files that a script cuts off when it runs again from its start: what was written there is lost.

A script that opens its log with ``"w"`` before the loop does so again in a replacement, in a hot standby, and in
all workers when they start again. An audit hook sees each file that is opened, and costs next to nothing once the
worker trains. It cannot be removed, so the first workers of a job have none.
"""

from __future__ import annotations

import math
import os
import site
import sys
import sysconfig
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from shared_core.events import EventLog, console_once, read_events
from shared_core.protocol import worker_env
from shared_core.protocol.worker_env import WorkerEnv
from shared_core.system import process
from shared_core.system.jobdir import CARD, TRAINS
from shared_core.worker.start import hot_standby

#: The ``began`` event comes from rank 0; a rank of another machine begins at most so much later.
_LATER_NS = 1_000_000_000
_watching = False


def training_begins(job_dir: Path, rank: int) -> None:
    """First batch of a rank in an attempt: from now on files of the script are new. Stops the warnings."""
    stop()
    with suppress(OSError):  # no room: then nobody is warned
        (job_dir / f"{TRAINS}{rank}").touch()


def watch() -> None:
    """Where the script runs again: warn of each file that it truncates, until :func:`stop`. The hook stays."""
    global _watching
    if not worker_env.launched():
        return
    if {os.environ.get(name, "0") for name in (worker_env.INCARNATION, worker_env.RESTART)} == {"0"}:
        return
    looker = _looker(worker_env.env())
    if looker is None:
        return
    look, _watching = looker.look, True
    sys.addaudithook(lambda event, args: look(event, args) if _watching else None)


def stop() -> None:
    global _watching
    _watching = False


def _looker(env: WorkerEnv) -> _Looker | None:
    """None where the job starts again from its beginning: its files do, too."""
    if env.incarnation:
        now = time.time_ns()
        # While a standby runs the script, its worker still writes, so nothing is too new. What is newer than another
        # replacement comes from other replacements.
        return _Looker(env, math.inf if hot_standby.is_hot_standby() else now, now)
    if env.resized is None and env.config.checkpoint.dir is None:
        return None
    with suppress(OSError):
        # What other workers of this attempt have written since then is new.
        until = (env.job_dir / CARD).stat().st_mtime_ns
        return _Looker(env, until, until)
    return None


@dataclass(frozen=True)
class _Looker:
    """Sees the files that are opened.

    Attributes:
        until: a file changed later than this is passed over, in nanoseconds since the epoch.
        started: start of this worker or its attempt, in nanoseconds since the epoch.
    """

    env: WorkerEnv
    until: float
    started: int

    def look(self, event: str, args: tuple[object, ...]) -> None:
        if event != "open" or not isinstance(args[2], int) or not args[2] & os.O_TRUNC:
            return
        if not isinstance(args[0], (str, bytes, os.PathLike)) or not _by_script(sys._getframe(2)):
            return
        with suppress(OSError, ValueError):  # not there yet
            path = os.path.realpath(os.fsdecode(args[0]))
            found = os.stat(path)
            if not found.st_size or found.st_mtime_ns > self.until or path.startswith(_ignored(self.env.job_dir)):
                return
            if (since := self._since()) is not None and found.st_mtime_ns > since:
                self._warn(path, found.st_size)

    def _since(self) -> int | None:
        """When the rank began to train, in nanoseconds since the epoch; None if nobody knows.

        Another worker of this machine may have begun later and written shared files until then, so the latest time
        counts, but none later than this worker's start.
        """
        env = self.env
        with suppress(OSError):
            own = (env.job_dir / f"{TRAINS}{env.rank}").stat().st_mtime_ns
            others = [path.stat().st_mtime_ns for path in env.job_dir.glob(f"{TRAINS}*")]
            return max([own, *(other for other in others if other <= self.started)])
        if env.events is None:
            return None
        # The rank's former worker ran on another machine, which has failed.
        began = [each.time for each in read_events(env.events) if each.kind == "began" and each.run == env.run]
        return int(began[-1] * 1e9) + _LATER_NS if began else None

    def _warn(self, path: str, size: int) -> None:
        env, who, again = self.env, "rank", "Each worker runs the script from its start again"
        if hot_standby.is_hot_standby():
            who, again = "standby of rank", "A hot standby runs the script up to its loop while the worker trains"
        elif env.incarnation:
            again = "A replacement runs the script from its start"
        message = (
            f"{who} {env.rank}: the script opens {path} for writing and cuts it off, {size} bytes are lost, some of "
            f'them written since the training began. {again}: open the file with "a"'
        )
        if env.incarnation:
            hot_standby.tell(message)
        else:
            console_once("truncation", message)  # else each of the workers says it
        EventLog(env.events, env.run).emit("warning", rank=env.rank, generation=env.generation, message=message)


def _ignored(job_dir: Path) -> tuple[str, ...]:
    folders = [str(job_dir), "/dev", "/proc"]
    with suppress(OSError):  # no place for temporary files
        folders.append(os.environ.get("TMPDIR") or tempfile.gettempdir())
    return tuple(os.path.join(os.path.realpath(folder), "") for folder in folders)


def _by_script(frame: FrameType | None) -> bool:
    """Whether the script's own code opens the file, perhaps through the standard library. What other packages write
    (loggers, trackers), they or this product continue.
    """
    library = os.path.join(sysconfig.get_path("stdlib"), "")
    packages = (*_PACKAGES, *(os.path.join(process.PACKAGE_ROOT, name, "") for name in _OURS))
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(packages) or name.startswith("<frozen"):
            return False
        if not name.startswith(library):
            return True
        frame = frame.f_back
    return False


_OURS = ("shared_core", "lightning_swift", "accelerate_swift")
_PACKAGES = tuple(
    os.path.join(folder, "")
    for folder in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()}
)

"""Files that a newcomer cuts off in the script's code before its place: what its predecessor wrote there is lost.

A script that opens its log with ``"w"`` before the loop does so again in a newcomer. An audit hook sees each file that
is opened, and costs next to nothing once the place is reached. It cannot be removed, so newcomers alone have one.
"""

from __future__ import annotations

import os
import site
import sys
import sysconfig
import tempfile
from contextlib import suppress
from pathlib import Path
from types import FrameType

from shared_core.events import EventLog, console
from shared_core.protocol import worker_env
from shared_core.system import process

#: File in a rank's folder, made when its first worker begins to train.
_TRAINS = "trains"
_watching = False


def training_begins(rank_dir: Path) -> None:
    """The first worker of a rank comes to its first batch: what the script wrote before, a newcomer writes again."""
    with suppress(OSError):  # no room: then nobody is warned
        (rank_dir / _TRAINS).touch()


def watch() -> None:
    """In a newcomer: warn of each file that its script cuts off, until :func:`stop`. Other workers do nothing."""
    global _watching
    if not worker_env.launched() or os.environ.get(worker_env.INCARNATION, "0") == "0":
        return
    env = worker_env.env()
    with suppress(OSError):
        since = (env.rank_dir / _TRAINS).stat().st_mtime_ns
        ignored = tuple(os.path.join(os.path.realpath(folder), "") for folder in _ignored(env.job_dir))
        _watching = True
        sys.addaudithook(lambda event, args: _look(event, args, env, since, ignored) if _watching else None)


def stop() -> None:
    """The newcomer has reached its place: what its script opens now, its predecessor had not opened."""
    global _watching
    _watching = False


def _ignored(job_dir: Path) -> list[str]:
    folders = [str(job_dir), "/dev", "/proc"]
    with suppress(OSError):  # none can be written to
        folders.append(os.environ.get("TMPDIR") or tempfile.gettempdir())
    return folders


def _look(
    event: str, args: tuple[object, ...], env: worker_env.WorkerEnv, since: int, ignored: tuple[str, ...]
) -> None:
    if event != "open" or not isinstance(args[2], int) or not args[2] & os.O_TRUNC:
        return
    if not isinstance(args[0], (str, bytes, os.PathLike)) or not _by_script(sys._getframe(2)):
        return
    with suppress(OSError, ValueError):  # not there yet
        path = os.path.realpath(os.fsdecode(args[0]))
        found = os.stat(path)
        if not found.st_size or found.st_mtime_ns <= since or path.startswith(ignored):
            return
        message = (
            f"rank {env.rank}: the script opens {path} for writing and cuts it off, {found.st_size} bytes "
            "are lost, some of them written since the training began. A newcomer runs the script from its start: open "
            'the file with "a"'
        )
        console(message)
        EventLog(env.events, env.run).emit("warning", rank=env.rank, generation=env.generation, message=message)


def _by_script(frame: FrameType | None) -> bool:
    """Whether the script's own code opens the file, perhaps through the standard library: what other packages write
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

"""Damage to what a rank has on disk, done by the rank itself so that the moment is always the same."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path


def do(kind: str) -> None:
    """Damage files of this rank, in the first worker of the first attempt only.

    Args:
        kind: ``no room``, or one of the tables below; for a checkpoint with its step boundary, as ``"flip checkpoint
            3"``.
    """
    if os.environ.get("SWIFT_RECOVERY_INCARNATION") != "0" or os.environ.get("SWIFT_RECOVERY_RESTART", "0") != "0":
        return
    from shared_core.checkpoint.spool import FOLDER, Spool
    from shared_core.job import current_job

    job = current_job()
    assert job is not None
    name, _, boundary = kind.rpartition(" ")
    if boundary.isdecimal():
        assert job.config.checkpoint.dir is not None
        for spool in Spool(job.env.job_dir / FOLDER).all_attempts():
            spool.drop(int(boundary))  # that in memory would do as well
        (folder,) = Path(job.config.checkpoint.dir).glob(f"*/step-{int(boundary):010d}")
        _CHECKPOINTS[name](folder)
        return
    archive = job.runtime.disk.archive
    if archive is None:
        raise AssertionError("there is no log on disk to damage")
    with archive._changed:
        written = archive._changed.wait_for(lambda: archive.stats.failed or not archive.stats.bytes_waiting, 30.0)
    assert written, "the log was not written"
    if kind == "no room":
        # The next write beyond what is there fails as on a full disk. The files of other kinds are smaller.
        limit = max(path.stat().st_size for path in archive.folder.glob("*.log"))
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        return
    segments = sorted(archive.folder.glob("*.log"))
    if len(segments) < 3:
        raise AssertionError(f"there are too few segments to damage: {segments}")
    _LOGS[kind](segments)


def _flip(path: Path, at: float) -> None:
    """Flip one bit of a file, at a part of its length."""
    data = bytearray(path.read_bytes())
    data[int(at * (len(data) - 1))] ^= 16
    path.write_bytes(data)


def _truncate(path: Path, part: float) -> None:
    os.truncate(path, int(path.stat().st_size * part))


def _each(change: Callable[[Path], object]) -> Callable[[list[Path]], None]:
    def run(paths: list[Path]) -> None:
        for path in paths:
            change(path)

    return run


def _without_index(path: Path) -> None:
    """Cut off the last bytes, which say where the index is."""
    os.truncate(path, max(0, path.stat().st_size - 16))


_LOGS: dict[str, Callable[[list[Path]], object]] = {
    "flip log": _each(lambda path: [_flip(path, at) for at in (0.2, 0.5, 0.8)]),  # not only what is needed no more
    "truncate log": _each(lambda path: _truncate(path, 0.4)),
    "truncate newest segments": lambda paths: _each(lambda path: _truncate(path, 0.3))(paths[len(paths) // 2 :]),
    "remove segments": lambda paths: _each(Path.unlink)(paths[len(paths) // 2 :]),
    "remove index": _each(_without_index),
    "remove log": lambda paths: shutil.rmtree(paths[0].parent),
}
_CHECKPOINTS: dict[str, Callable[[Path], object]] = {
    "flip checkpoint": lambda folder: _each(lambda path: _flip(path, 0.5))(sorted(folder.glob("r*"))),
    "truncate checkpoint": lambda folder: _each(lambda path: _truncate(path, 0.9))(sorted(folder.glob("r*"))),
    "remove part": lambda folder: _each(Path.unlink)(sorted(folder.glob("replicated*"))),
    "flip manifest": lambda folder: _flip(folder / "manifest.json", 0.5),
    "remove checkpoint": lambda folder: shutil.rmtree(folder),
}

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
        kind: see ``KINDS``; for checkpoints with the batch top appended, as ``"flip checkpoint 3"``.
    """
    if os.environ.get("SWIFT_RECOVERY_INCARNATION") != "0" or os.environ.get("SWIFT_RECOVERY_RESTART", "0") != "0":
        return
    name, _, top = kind.rpartition(" ")
    if top.isdecimal():
        _CHECKPOINTS[name](Path(os.environ["SWIFT_RECOVERY_CHECKPOINT_DIR"]) / f"step-{int(top):010d}")
        return
    from shared_core.job import current_job

    job = current_job()
    archive = job._runtime.archive if job is not None else None
    if archive is None:
        raise AssertionError("there is no log on disk to damage")
    archive.flush(20.0)
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
    "flip log": _each(lambda path: _flip(path, 0.5)),
    "truncate log": _each(lambda path: _truncate(path, 0.4)),
    "truncate newest segment": lambda paths: _truncate(paths[-1], 0.7),
    "remove segment": lambda paths: paths[len(paths) // 2].unlink(),
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
KINDS = (*_LOGS, *_CHECKPOINTS, "no room")

"""Atomic checkpoints: bytes in, bytes out, with checksums.

A checkpoint of step 40 is the folder ``step-0000000040`` holding one file for each part and, written last,
``manifest.json`` with the SHA-256 of every part. A folder without a manifest is not a checkpoint. Each file is written
under a temporary name, flushed to the device and renamed, so that a kill or a power cut at any moment leaves the
earlier checkpoints as they were.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shared_core.errors import CorruptFile, StorageFull
from shared_core.events import console

MANIFEST = "manifest.json"
FORMAT = 1
_FOLDER = re.compile(r"step-(\d{10,})")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_TEMPORARY = ".tmp-"
#: What the system says when a file cannot grow: full device, quota, limit of the process.
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint.

    Attributes:
        path: its folder.
        step: batch tops passed when it was taken.
        parts: SHA-256 (hexadecimal) of each part, by name.
        meta: plain data given to :func:`commit`, ``world_size`` among it.
    """

    path: Path
    step: int
    parts: Mapping[str, str]
    meta: Mapping[str, Any] = field(default_factory=dict)


def write_part(dir: str | os.PathLike[str], step: int, name: str, payload: bytes) -> str:
    """Write one part of the checkpoint of ``step``; nobody reads it before :func:`commit` lists it.

    Ranks write their parts at the same time, each under its own name. Returns the SHA-256 of ``payload``, for the
    manifest.

    Raises:
        StorageFull: no room; what was begun is removed, earlier checkpoints are as they were.
        ValueError: ``name`` is no plain file name, or ``step`` is negative.
    """
    if not _NAME.fullmatch(name) or name == MANIFEST:
        raise ValueError(f"part name {name!r} must be a plain file name other than {MANIFEST}")
    _write(_folder(dir, step), name, payload)
    return hashlib.sha256(payload).hexdigest()


def commit(dir: str | os.PathLike[str], step: int, parts: Mapping[str, str], meta: Mapping[str, Any]) -> Checkpoint:
    """Make the checkpoint of ``step`` valid, once every part in ``parts`` (name: SHA-256) has been written.

    ``meta`` is plain data; ``meta["world_size"]`` is what :func:`newest_valid` compares.

    Raises:
        CorruptFile: a part is missing; nothing is committed.
        StorageFull: no room for the manifest; earlier checkpoints are as they were.
    """
    folder = _folder(dir, step)
    missing = [name for name in parts if not (folder / name).is_file()]
    if missing:
        raise CorruptFile(f"checkpoint {folder} cannot be committed: {', '.join(missing)} was never written")
    manifest = {"format": FORMAT, "step": step, "parts": dict(parts), "meta": dict(meta)}
    body = json.dumps(manifest, sort_keys=True)
    # The manifest checks itself too: a flipped bit in a checksum or in meta must not go unseen.
    sealed = json.dumps({"sha256": hashlib.sha256(body.encode()).hexdigest(), "manifest": body})
    _write(folder, MANIFEST, sealed.encode())
    _sync_folder(folder.parent)
    return Checkpoint(folder, step, dict(parts), dict(meta))


def newest_valid(
    dir: str | os.PathLike[str], world_size: int, wanted: Callable[[Checkpoint], bool] = lambda found: True
) -> Checkpoint | None:
    """The newest checkpoint of a job of ``world_size`` ranks whose every checksum holds, or ``None``.

    Damaged ones are passed over with one line on the console each, those that are not ``wanted`` without a word.
    """
    for step, folder in sorted(_folders(dir), reverse=True):
        try:
            found = _load_manifest(folder, step)
            if not wanted(found):
                continue
            for name, digest in found.parts.items():
                if _digest_of(folder / name) != digest:
                    raise CorruptFile(f"the checksum of {name} does not match the manifest's")
        except (CorruptFile, OSError) as error:
            console(f"checkpoint {folder} is passed over: {error}")
            continue
        theirs = found.meta.get("world_size")
        if theirs != world_size:
            console(f"checkpoint {folder} is passed over: it is of {theirs} ranks, this job has {world_size}")
            continue
        return found
    return None


def committed(dir: str | os.PathLike[str], world_size: int) -> list[Checkpoint]:
    """Checkpoints of jobs of ``world_size`` ranks that have a manifest, oldest first; parts are not looked at."""
    found = []
    for step, folder in sorted(_folders(dir)):
        with contextlib.suppress(CorruptFile, OSError):
            checkpoint = _load_manifest(folder, step)
            if checkpoint.meta.get("world_size") == world_size:
                found.append(checkpoint)
    return found


def read_part(checkpoint: Checkpoint, name: str) -> bytes:
    """The bytes given to :func:`write_part`.

    Raises:
        CorruptFile: they are not those that were committed, or there is no part of this name.
    """
    if name not in checkpoint.parts:
        raise CorruptFile(
            f"checkpoint {checkpoint.path} has no part {name!r}; it has {', '.join(sorted(checkpoint.parts))}"
        )
    try:
        payload = (checkpoint.path / name).read_bytes()
    except OSError as error:
        raise CorruptFile(f"part {name!r} of checkpoint {checkpoint.path} cannot be read: {error}") from error
    if hashlib.sha256(payload).hexdigest() != checkpoint.parts[name]:
        raise CorruptFile(f"part {name!r} of checkpoint {checkpoint.path} fails its checksum; use an older checkpoint")
    return payload


def prune(
    dir: str | os.PathLike[str], keep: int = 2, wanted: Callable[[Checkpoint], bool] = lambda found: True
) -> list[Path]:
    """Remove all but the newest ``keep`` committed checkpoints, and what killed writers left below the newest of them.

    Returns the folders removed. A folder newer than the newest committed one is being written and stays, and so does
    a checkpoint that is not ``wanted``: it is another job's.

    Raises:
        ValueError: ``keep`` is less than 1.
    """
    if keep < 1:
        raise ValueError(f"keep must be at least 1, got {keep}")
    folders = sorted(_folders(dir), reverse=True)
    mine: list[tuple[int, Path]] = []
    others: set[Path] = set()
    for step, folder in folders:
        if (folder / MANIFEST).is_file():
            if _is_wanted(folder, step, wanted):
                mine.append((step, folder))
            else:
                others.add(folder)
    if not mine:
        return []
    kept = {folder for _, folder in mine[:keep]} | others
    removed = [folder for step, folder in folders if folder not in kept and step < mine[0][0]]
    for folder in removed:
        # The manifest goes first: a kill in the middle must not leave a folder that looks complete.
        with contextlib.suppress(FileNotFoundError):
            (folder / MANIFEST).unlink()
        shutil.rmtree(folder, ignore_errors=True)
    return removed


def _is_wanted(folder: Path, step: int, wanted: Callable[[Checkpoint], bool]) -> bool:
    try:
        return wanted(_load_manifest(folder, step))
    except (CorruptFile, OSError):
        return True  # whosever it was, nobody can read it


def _folder(dir: str | os.PathLike[str], step: int) -> Path:
    if step < 0:
        raise ValueError(f"step must not be negative, got {step}")
    return Path(dir) / f"step-{step:010d}"


def _folders(dir: str | os.PathLike[str]) -> Iterator[tuple[int, Path]]:
    root = Path(dir)
    if not root.is_dir():
        return
    for entry in root.iterdir():
        match = _FOLDER.fullmatch(entry.name)
        if match and entry.is_dir():
            yield int(match.group(1)), entry


def _load_manifest(folder: Path, step: int) -> Checkpoint:
    try:
        sealed = json.loads((folder / MANIFEST).read_bytes())
        body = sealed["manifest"]
        if hashlib.sha256(body.encode()).hexdigest() != sealed["sha256"]:
            raise CorruptFile("the manifest fails its own checksum")
        manifest = json.loads(body)
        if manifest["format"] != FORMAT:
            raise CorruptFile(f"its format is {manifest['format']}, this version reads {FORMAT}")
        if manifest["step"] != step:
            raise CorruptFile(f"the manifest is of step {manifest['step']}")
        return Checkpoint(folder, step, manifest["parts"], manifest["meta"])
    except FileNotFoundError as error:
        raise CorruptFile("it was never completed (no manifest)") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptFile(f"the manifest cannot be read ({error})") from error


def _digest_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write(folder: Path, name: str, payload: bytes) -> None:
    """Put ``payload`` at ``folder/name``: whole and on the device, or not at all."""
    temporary = folder / f"{_TEMPORARY}{name}-{uuid.uuid4().hex}"
    try:
        # Two ranks may create the folder at once; an absent parent of it is created too.
        folder.mkdir(parents=True, exist_ok=True)
        try:
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                view = memoryview(payload)
                while view:
                    view = view[os.write(fd, view) :]
                os.fsync(fd)
            finally:
                os.close(fd)
            os.replace(temporary, folder / name)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        _sync_folder(folder)
    except OSError as error:
        if error.errno in _FULL:
            with contextlib.suppress(OSError):
                folder.rmdir()  # only where it is empty
            raise StorageFull(
                f"no room to write {len(payload)} bytes to {folder / name} ({error.strerror}); earlier checkpoints "
                "are as they were: make room, or set checkpoint_dir to a larger device"
            ) from error
        raise


def _sync_folder(folder: Path) -> None:
    """Make names in ``folder`` durable: a rename is only on the device once its folder is."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)

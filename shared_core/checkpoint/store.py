"""Atomic checkpoints: bytes in, bytes out, with checksums.

A checkpoint of step 40 is the folder ``step-0000000040`` with one file for each part and, written last,
``manifest.json`` with the SHA-256 of every part. A folder without a manifest is not a checkpoint. Each file is written
under a temporary name, flushed to the device and renamed, so that a kill or a power cut at any moment leaves the
earlier checkpoints as they were.

Without a coordinator the folder also holds one mark for each rank, ``rank0.done``: the rank's parts are durable, with
these checksums. Who finds the marks of all ranks writes the manifest. Does not import torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

from shared_core.checkpoint.command import Command
from shared_core.checkpoint.storage import TEMPORARY, Storage, open_storage
from shared_core.codec import FILE_NAME, Count, FileName, fit
from shared_core.errors import CorruptFile, NotAFile, StorageFull
from shared_core.faults import inject
from shared_core.plain_json import parse
from shared_core.system import marker
from shared_core.system.marker import MADE

MANIFEST = "manifest.json"
FORMAT = 1
#: Suffixes of files that are no parts: a rank's parts are durable; it has none of this step; it will have none of a
#: newer one. The last name: the step was chosen.
DONE, MISSED, LAST, BEGUN = ".done", ".missed", ".last", "begun.json"
#: No manifest, mark or note has more bytes than this.
MOST_BYTES = 64 << 20
_FOLDER = re.compile(r"step-(\d{10,})")
_MARK = re.compile(r"rank(\d+)\.(?:done|missed|last)")

#: A folder, a URL, or storage that is open.
Where = str | os.PathLike[str] | Storage


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint.

    Attributes:
        step: step boundaries passed when it was taken.
        parts: SHA-256 (hexadecimal) of each part, by name.
        meta: plain data given to :func:`commit`, ``world_size`` among it.
        sizes: of the parts in bytes, as far as known.
        time: when it was committed, in seconds since the epoch.
    """

    storage: Storage
    step: int
    parts: Mapping[str, str]
    meta: Mapping[str, Any] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    time: float = 0.0

    @property
    def run(self) -> str:
        """Whose it is; empty if unknown."""
        return str(self.meta.get("run", ""))

    @property
    def command(self) -> Command:
        return Command(str(self.meta.get("command", "")), str(self.meta.get("words", "")))

    @property
    def folder(self) -> str:
        return folder_name(self.step)

    @property
    def path(self) -> Path:
        """Its folder; for a URL, only to be shown."""
        return self.storage.local(self.folder) or Path(self.storage.root, self.folder)


@dataclass(frozen=True)
class StoreMark:
    """What one rank has made durable: SHA-256 and size in bytes of each part, by name; metadata of their checkpoint."""

    parts: Mapping[FileName, tuple[str, Count]]
    meta: Mapping[str, Any]


class _Manifest(TypedDict):
    parts: dict[FileName, str]
    meta: dict[str, Any]
    sizes: dict[str, Count]
    time: float


class _Sealed(TypedDict):
    sha256: str
    manifest: str


def copy_part(dir: Where, step: int, name: str, chunks: Iterable[bytes | memoryview], size: int) -> str:
    """Write one part, of ``size`` bytes; it is not read before :func:`commit` lists it. Returns its SHA-256.

    Ranks write their parts at the same time, each under its own name.

    Raises:
        StorageFull: no room; the begun file is removed, earlier checkpoints are as they were.
        ValueError: ``name`` is no plain file name, or ``step`` is negative.
    """
    if FILE_NAME.wrong(name) or name in (MANIFEST, BEGUN, MADE) or _MARK.fullmatch(name):
        raise ValueError(f"part name {name!r} must be a plain file name other than {MANIFEST} and rank*{DONE}")
    storage, folder = _open(dir), folder_name(step)
    sign(storage, step)
    try:
        return storage.write(f"{folder}/{name}", chunks, size)
    except StorageFull:
        if storage.names(folder) == [MADE]:
            storage.remove_folder(folder)
        raise


def commit(
    dir: Where, step: int, parts: Mapping[str, str], meta: Mapping[str, Any], sizes: Mapping[str, int] | None = None
) -> Checkpoint:
    """Make the checkpoint of ``step`` valid, once every part in ``parts`` (name: SHA-256) has been written.

    ``meta`` is plain data; ``meta["world_size"]`` is what :func:`committed` compares.

    Raises:
        CorruptFile: a part is missing; nothing is committed.
        StorageFull: no room for the manifest; earlier checkpoints are as they were.
    """
    storage, folder = _open(dir), folder_name(step)
    inject.point("checkpoint.manifest")
    missing = sorted(set(parts).difference(storage.names(folder)))
    if missing:
        raise CorruptFile(
            f"checkpoint {storage.root}/{folder} cannot be committed: {', '.join(missing)} was never written"
        )
    made = Checkpoint(storage, step, dict(parts), dict(meta), dict(sizes or {}), time.time())
    manifest = {"format": FORMAT, "step": step, "parts": made.parts, "meta": made.meta, "sizes": made.sizes}
    manifest["time"] = made.time
    _write(storage, f"{folder}/{MANIFEST}", _seal(manifest))
    inject.point("checkpoint.committed")
    return made


class NeverCompleted(CorruptFile):
    """The folder of a step has no manifest: it is no checkpoint, only what a killed writer has left."""


@dataclass(frozen=True)
class PassedOver:
    """A checkpoint, or the folder of a run, that cannot be used.

    Attributes:
        step: of a checkpoint; -1 for a folder.
        run: whose it is; empty if unknown.
    """

    path: str
    reason: str
    step: int = -1
    run: str = ""

    def __str__(self) -> str:
        return f"checkpoint {self.path} is passed over: {self.reason}"


def read_all(dir: Where) -> tuple[list[Checkpoint], list[PassedOver]]:
    """Readable checkpoints, and those with a damaged manifest; oldest first. Parts are not read. Raises OSError."""
    storage, found, passed = _open(dir), [], []
    for step in steps(storage):
        try:
            found.append(load_manifest(storage, step))
        except NeverCompleted:
            continue
        except (CorruptFile, OSError) as error:
            reason = cannot_be_read(error) if isinstance(error, OSError) else str(error)
            passed.append(PassedOver(_shown(storage, step), reason, step))
    return found, passed


def committed(dir: Where) -> list[Checkpoint]:
    """Checkpoints whose manifest can be read, oldest first; parts are not read."""
    return read_all(dir)[0]


def cannot_be_read(error: OSError) -> str:
    return f"it cannot be read ({error.strerror or error})"


@dataclass(frozen=True)
class Found:
    """What lies in the folder of a step.

    Attributes:
        state: ``valid``, ``unchecked`` (parts were not read), ``incomplete`` or ``damaged``.
        reason: why it is not valid.
        checkpoint: content of the manifest, where one can be read.
    """

    step: int
    state: str
    reason: str
    checkpoint: Checkpoint | None
    bytes: int


def survey(dir: Where, *, check: bool = True) -> list[Found]:
    """All folders of steps, oldest first; ``check`` reads all parts and their checksums. Raises OSError."""
    storage = _open(dir)
    found = []
    for step in steps(storage):
        size, checkpoint = 0, None
        try:
            size = parts_size(storage, step)
            checkpoint = load_manifest(storage, step)
            if check:
                verify(checkpoint)
            state, reason = "valid" if check else "unchecked", ""
        except NeverCompleted as error:
            state, reason = "incomplete", str(error)
        except CorruptFile as error:
            state, reason = "damaged", str(error)
        except PermissionError as error:
            state, reason = "damaged", cannot_be_read(error)
        found.append(Found(step, state, reason, checkpoint, size))
    return found


def verify(checkpoint: Checkpoint) -> None:
    """Compare all parts with the manifest; raises CorruptFile for one that differs or is missing."""
    for name in checkpoint.parts:
        for _ in part_chunks(checkpoint, name):
            pass


def read_part(checkpoint: Checkpoint, name: str) -> bytes:
    """A part, as it was written. Raises CorruptFile if it is damaged, or if there is none of this name."""
    return b"".join(part_chunks(checkpoint, name))


def part_chunks(checkpoint: Checkpoint, name: str) -> Iterator[bytes]:
    """A part in pieces. Do not use the pieces before the end has been reached: it is checked there. Raises CorruptFile
    at the end if they are damaged, and at once if there is no part of this name.
    """
    if name not in checkpoint.parts:
        raise CorruptFile(
            f"checkpoint {checkpoint.path} has no part {name!r}; it has {', '.join(sorted(checkpoint.parts))}"
        )
    digest, size, most = hashlib.sha256(), 0, checkpoint.sizes.get(name)
    try:
        for chunk in checkpoint.storage.chunks(f"{checkpoint.folder}/{name}"):
            size += len(chunk)
            if most is not None and size > most:
                raise CorruptFile(
                    f"part {name!r} of checkpoint {checkpoint.path} is larger than the {most} bytes that were written; "
                    "use an older checkpoint"
                )
            digest.update(chunk)
            yield chunk
    except OSError as error:
        raise CorruptFile(f"part {name!r} of checkpoint {checkpoint.path} cannot be read: {error}") from error
    if digest.hexdigest() != checkpoint.parts[name]:
        raise CorruptFile(f"part {name!r} of checkpoint {checkpoint.path} fails its checksum; use an older checkpoint")


def prune(
    dir: Where, keep: int = 2, wanted: Callable[[Checkpoint], bool] = lambda found: True, spare: Iterable[int] = ()
) -> list[Path]:
    """Remove all but the newest ``keep`` committed checkpoints, and what killed writers left below the newest of them.

    Returns the folders removed. A folder newer than the newest committed one is being written and stays, and so does
    a checkpoint that is not ``wanted``: it is another job's. Steps in ``spare`` stay in any case, and so does a folder
    that nothing says this product has made. Nothing is removed where the folder of the run is a link.

    Raises:
        ValueError: ``keep`` is less than 1.
    """
    if keep < 1:
        raise ValueError(f"keep must be at least 1, got {keep}")
    storage = _open(dir)
    if storage.is_link():
        return []
    found = sorted(steps(storage), reverse=True)
    mine: list[int] = []
    others: set[int] = set(spare)
    for step in found:
        if not made_here(storage, step):
            others.add(step)
        elif MANIFEST in storage.names(folder_name(step)):
            if _is_wanted(storage, step, wanted):
                mine.append(step)
            else:
                others.add(step)
    if not mine:
        return []
    kept = others.union(mine[:keep])
    removed = [step for step in found if step not in kept and step < mine[0]]
    for step in removed:
        remove(storage, step)
    return [Path(_shown(storage, step)) for step in removed]


def remove(dir: Where, step: int) -> None:
    """Remove a checkpoint. The manifest goes first: a kill in the middle must not leave what looks complete."""
    inject.point("checkpoint.prune")
    _open(dir).remove_folder(folder_name(step), MANIFEST)


def made_here(dir: Where, step: int) -> bool:
    """Whether this product has made the folder of a step: it has a readable manifest, or a marker."""
    storage = _open(dir)
    with contextlib.suppress(CorruptFile, OSError):
        load_manifest(storage, step)
        return True
    with contextlib.suppress(CorruptFile, OSError):
        return marker.fits(read_file(storage, f"{folder_name(step)}/{MADE}", marker.MOST_BYTES), folder_name(step))
    return False


def write_mark(dir: Where, step: int, rank: int, mark: StoreMark) -> None:
    """Note that a rank's parts are durable. Raises StorageFull if there is no room."""
    body = {"format": FORMAT, "step": step, "parts": {name: list(each) for name, each in mark.parts.items()}}
    _write(_open(dir), f"{folder_name(step)}/rank{rank}{DONE}", _seal(body | {"meta": dict(mark.meta)}))


def read_mark(dir: Where, step: int, rank: int) -> StoreMark | None:
    """A rank's mark for a step; None if there is none that can be read."""
    with contextlib.suppress(OSError, CorruptFile, ValueError):
        mark: StoreMark = _unseal(read_file(_open(dir), f"{folder_name(step)}/rank{rank}{DONE}"), step, StoreMark)
        return mark
    return None


def commit_marked(dir: Where, step: int, world_size: int, meta: Mapping[str, Any]) -> Checkpoint | None:
    """Commit a step if the marks of all ranks are there and of this ``meta``; None if one is missing yet.

    Whoever does it, the manifest is the same, except for its time.

    Raises:
        CorruptFile: two ranks have written a part of the same name, or a part is gone.
        StorageFull: no room for the manifest.
    """
    storage = _open(dir)
    with contextlib.suppress(CorruptFile, OSError):
        done = load_manifest(storage, step)
        if done.meta == meta:
            return done
    there = set(storage.names(folder_name(step)))
    if any(f"rank{rank}{DONE}" not in there for rank in range(world_size)):
        return None
    parts: dict[str, tuple[str, int]] = {}
    for rank in range(world_size):
        mark = read_mark(storage, step, rank)
        if mark is None or mark.meta != meta:
            return None
        twice = sorted(parts.keys() & mark.parts.keys())
        if twice:
            raise CorruptFile(f"step {step} cannot be committed: rank {rank} and another have written {twice[0]}")
        parts |= mark.parts
    digests = {name: parts[name][0] for name in sorted(parts)}
    return commit(storage, step, digests, meta, {name: parts[name][1] for name in sorted(parts)})


def folder_name(step: int) -> str:
    """Folder of a checkpoint; raises ValueError for a negative step."""
    if step < 0:
        raise ValueError(f"step must not be negative, got {step}")
    return f"step-{step:010d}"


def step_of(folder: str) -> int | None:
    """Inverse of :func:`folder_name`; None for another name."""
    match = _FOLDER.fullmatch(folder)
    return int(match.group(1)) if match else None


def steps(dir: Where) -> list[int]:
    """Steps of which there is a folder, complete or not, oldest first."""
    found = (step_of(name) for name in _open(dir).names())
    return sorted(step for step in found if step is not None)


def parts_size(storage: Storage, step: int) -> int:
    """Bytes in the folder of a step; files that vanish meanwhile count nothing."""
    total = 0
    for name in storage.names(folder_name(step)):
        with contextlib.suppress(OSError):
            total += storage.size(f"{folder_name(step)}/{name}")
    return total


def left_over(name: str, of: Iterable[str]) -> bool:
    """Whether ``name`` is a temporary file of one of these, left by a killed writer."""
    return any(name.startswith(f"{TEMPORARY}{each}-") for each in of)


def load_manifest(dir: Where, step: int) -> Checkpoint:
    """The checkpoint of a step; parts are not read. Raises NeverCompleted (no manifest), CorruptFile or OSError."""
    storage = _open(dir)
    try:
        return Checkpoint(
            storage, step, **_unseal(read_file(storage, f"{folder_name(step)}/{MANIFEST}"), step, _Manifest)
        )
    except (FileNotFoundError, NotADirectoryError) as error:
        if MANIFEST in storage.names(folder_name(step)):
            raise CorruptFile(f"the manifest cannot be read ({error})") from error
        raise NeverCompleted("it was never completed (no manifest)") from error
    except (NotAFile, ValueError) as error:
        raise CorruptFile(f"the manifest cannot be read ({error})") from error


def _shown(storage: Storage, step: int) -> str:
    return str(storage.local(folder_name(step)) or Path(storage.root, folder_name(step)))


def _open(dir: Where) -> Storage:
    return open_storage(dir) if isinstance(dir, str | os.PathLike) else dir


def sign(dir: Where, step: int) -> None:
    """Note in the folder of a step, made if needed, that this product has made it. Raises OSError."""
    storage, folder = _open(dir), folder_name(step)
    if MADE not in storage.names(folder):
        _write(storage, f"{folder}/{MADE}", marker.make(folder))


def read_file(storage: Storage, name: str, most: int = MOST_BYTES) -> bytes:
    """A file of at most ``most`` bytes. Raises CorruptFile if it has more, OSError if it cannot be read."""
    found = bytearray()
    for chunk in storage.chunks(name):
        found += chunk
        if len(found) > most:
            raise CorruptFile(f"{name} has more than {most} bytes")
    return bytes(found)


def _write(storage: Storage, name: str, payload: bytes) -> None:
    storage.write(name, [payload], len(payload))


def _seal(body: Mapping[str, Any]) -> bytes:
    """JSON with its own checksum: a flipped bit in a part's checksum or in meta must be noticed."""
    text = json.dumps(body, sort_keys=True)
    return json.dumps({"sha256": hashlib.sha256(text.encode()).hexdigest(), "manifest": text}).encode()


def _unseal(raw: bytes, step: int, shape: Any) -> Any:
    """Inverse of :func:`_seal`, as a value of type ``shape``. Raises CorruptFile or ValueError."""
    sealed = fit(parse(raw), _Sealed)
    if hashlib.sha256(sealed["manifest"].encode()).hexdigest() != sealed["sha256"]:
        raise CorruptFile("the manifest fails its own checksum")
    body = fit(parse(sealed["manifest"]), dict[str, Any])
    if body.get("format") != FORMAT:
        raise CorruptFile(f"its format is {body.get('format')}, this version reads {FORMAT}")
    if body.get("step") != step:
        raise CorruptFile(f"the manifest is of step {body.get('step')}")
    return fit(body, shape)


def _is_wanted(storage: Storage, step: int, wanted: Callable[[Checkpoint], bool]) -> bool:
    try:
        return wanted(load_manifest(storage, step))
    except (CorruptFile, OSError):
        return True  # it cannot be read, whoever made it

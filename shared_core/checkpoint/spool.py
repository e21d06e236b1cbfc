"""The folder in a machine's memory where workers leave snapshots and the writer finds them.

``JOB_DIR/checkpoints/``::

    attempt0/step-0000000040/rank0          files of the snapshot, each with its name once it is whole
    attempt0/step-0000000040/rank0.sealed   JSON: rank 0's snapshot is whole, and what it consists of; written last
    spare/                                  files whose memory may be used again
    bell                                    a named pipe: a byte in it makes the writer look
    status.json                             what the writer has done; replaced by it
    claim.json                              the run that the job continues with: the writer holds its lock
    held.json                               snapshots that the writer does not let go: another machine has a copy
    kept/                                   the copy of another machine's snapshot, a folder like this one

Everything the writer has to know lies here, so its death loses nothing but the copy that was under way: the next one
looks again. Does not import torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from shared_core.checkpoint.store import folder_name
from shared_core.codec import Between, Count, FileName, OsText, Record, fit
from shared_core.errors import CorruptFile, StorageFull
from shared_core.faults import inject
from shared_core.plain_json import is_count, parse
from shared_core.resources import FULL
from shared_core.system.process import machine_bytes

#: Name of the folder in the job's folder.
FOLDER = "checkpoints"
BELL = "bell"
SEALED = ".sealed"
_STATUS, _SPARE, _HELD, _CLAIM = "status.json", "spare", "held.json", "claim.json"
_STEP = re.compile(r"step-(\d{10,})")
#: A larger world size is refused: the writer looks for the part of each rank.
_MOST_RANKS = 1 << 20
#: Share of the machine's memory that snapshots leave free.
_RESERVE = 0.05
#: Who waits for a commit looks so often, in seconds.
_LOOK_S = 0.01


@dataclass(frozen=True)
class Target:
    """Where checkpoints go.

    Attributes:
        keep: committed checkpoints of this job that stay, at least 2.
        quota_bytes: most that all of them may take, those being written included; 0 is no limit.
    """

    where: OsText
    keep: int = 2
    quota_bytes: int = 0


@dataclass(frozen=True)
class Sealed(Record):
    """One rank's part of a snapshot.

    Attributes:
        world_size: ranks of the job; a checkpoint has one part of each.
        local: ranks of this machine: its writer waits for all of them.
        files: names of files in the snapshot's folder; no two ranks use the same name.
        meta: plain data of the checkpoint, equal on all ranks and in all generations; ``attempt`` and ``world_size``
            are added. Parts whose meta differ never make a checkpoint together; ``run`` is its owner: old checkpoints
            of the same run are removed.
        target: where it is to be written; None keeps it in memory only.
    """

    step: Count
    rank: Count
    world_size: Annotated[int, Between(0, _MOST_RANKS)]
    local: tuple[Count, ...]
    files: tuple[FileName, ...]
    meta: Mapping[str, Any] = field(default_factory=dict)
    target: Target | None = None


@dataclass(frozen=True)
class Status(Record):
    """What the writer reports.

    Attributes:
        committed: meta of the newest checkpoint it knows to be committed, with ``step``; empty for none.
        attempt: of the job, to which the next three belong.
        writing: step under way; -1 for none.
        waiting: step that is next; -1 for none.
        failed: step of the newest one that was given up since the last commit; -1 for none.
        cause: why, in one word (``full``, ``quota``, ``read-only``, ``gone``, ``config``, ``incomplete``, ``error``).
        seconds: duration of the newest committed one, from its first byte to the manifest.
        bytes: written by this machine for it.
    """

    pid: int = 0
    committed: Mapping[str, Any] = field(default_factory=dict)
    attempt: int = 0
    writing: int = -1
    waiting: int = -1
    failed: int = -1
    cause: str = ""
    message: OsText = ""
    seconds: float = 0.0
    bytes: int = 0


def sealed_of(raw: str | bytes) -> Sealed:
    """The part of a snapshot that a note seals. Raises CorruptFile for anything else."""
    try:
        part: Sealed = fit(parse(raw), Sealed)
        return part
    except ValueError as error:
        raise CorruptFile(f"this does not seal a snapshot: {error}") from error


class Spool:
    """The folder, seen from a worker or the writer. Any process of the machine may make one. ``folder`` is
    ``JOB_DIR/checkpoints``, made with mode 0700 when first written to. Snapshots of other attempts are not seen.
    """

    def __init__(self, folder: Path, attempt: int = 0) -> None:
        self.folder, self.attempt = folder, attempt
        self._status, self._seen = folder / _STATUS, (0, 0)

    def folder_of(self, step: int) -> Path:
        """The folder of a snapshot, made if it is not there."""
        path = self._path(step)
        inject.point("checkpoint.stage")
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        return path

    def spare(self, name: str, to: Path) -> bool:
        """Move a file that held a part called ``name`` and is no longer needed to ``to``; False if there is none. Its
        pages exist already: to write to it takes half as long as to a new one.
        """
        for found in sorted((self.folder / _SPARE).glob(f"{name}~*")):
            with contextlib.suppress(FileNotFoundError):  # another process took it
                inject.point("checkpoint.stage")
                os.rename(found, to)
                return True
        return False

    def check_room(self, nbytes: int) -> None:
        """Raises StorageFull if the machine's memory does not hold so many more bytes; skip the snapshot then."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        stat = os.statvfs(self.folder)
        free = min(stat.f_bavail * stat.f_frsize, available_memory())
        if nbytes > free:
            raise StorageFull(
                f"a snapshot of {nbytes} bytes does not fit into memory: {free} bytes are free at {self.folder}"
            )

    def seal(self, part: Sealed) -> None:
        """Note that a rank's files are whole, and ring the bell. Raises StorageFull if there is no room."""
        meta = {**part.meta, "attempt": self.attempt, "world_size": part.world_size}
        _replace(self._path(part.step) / f"rank{part.rank}{SEALED}", replace(part, meta=meta).to_json())
        self.ring()

    def ring(self) -> None:
        """Make the writer look. Never blocks. Without a writer it does nothing: a writer looks when it starts."""
        with contextlib.suppress(OSError):
            fd = os.open(self.folder / BELL, os.O_WRONLY | os.O_NONBLOCK)
            try:
                os.write(fd, b".")
            finally:
                os.close(fd)

    def steps(self) -> list[int]:
        with contextlib.suppress(FileNotFoundError):
            matches = (_STEP.fullmatch(name) for name in os.listdir(self.folder / f"attempt{self.attempt}"))
            return sorted(int(match.group(1)) for match in matches if match)
        return []

    def parts(self, step: int) -> dict[int, Sealed]:
        """Sealed parts of a step, by rank; one whose note is damaged is not sealed."""
        found = {}
        for path in self._path(step).glob(f"*{SEALED}"):
            with contextlib.suppress(FileNotFoundError, CorruptFile):  # dropped meanwhile
                part = sealed_of(path.read_bytes())
                if (part.step, f"rank{part.rank}{SEALED}") == (step, path.name):
                    found[part.rank] = part
        return found

    def path_of(self, part: Sealed, name: str) -> Path:
        return self._path(part.step) / name

    def complete(self, step: int) -> bool:
        """Whether all ranks of this machine have sealed their parts, all of one meta."""
        parts = self.parts(step)
        if not parts:
            return False
        one = next(iter(parts.values()))
        return all(rank in parts and parts[rank].meta == one.meta for rank in one.local)

    def newest_complete(self) -> int | None:
        return next((step for step in reversed(self.steps()) if self.complete(step)), None)

    def drop(self, step: int) -> None:
        """Remove a snapshot; its files become spare, one of each name."""
        path, spare = self._path(step), self.folder / _SPARE
        inject.point("checkpoint.stage")
        spare.mkdir(mode=0o700, exist_ok=True)
        for note in path.glob(f"*{SEALED}"):  # first, so that it does not look whole any more
            note.unlink(missing_ok=True)
        for file in sorted(path.glob("*")):
            if file.name.startswith(".") or any(spare.glob(f"{file.name}~*")):
                continue
            with contextlib.suppress(OSError):
                inject.point("checkpoint.stage")
                os.rename(file, spare / f"{file.name}~{self.attempt}-{step}")
        shutil.rmtree(path, ignore_errors=True)

    def hold(self, keys: Collection[tuple[int, int]]) -> None:
        """Keep these snapshots (attempt and step) until the next call. Used by the agent."""
        _replace(self.folder / _HELD, json.dumps(sorted(keys)))
        self.ring()

    def held(self) -> set[tuple[int, int]]:
        """(attempt, step) of the snapshots to be kept; empty if the file is damaged."""
        with contextlib.suppress(FileNotFoundError, ValueError):
            keys: set[tuple[int, int]] = fit(parse((self.folder / _HELD).read_bytes()), set[tuple[Count, Count]])
            return keys
        return set()

    def claim(self, where: str, owner: str) -> None:
        """Have the writer hold the lock of a run. ``where`` is the run's folder, ``owner`` the job,
        see :mod:`shared_core.checkpoint.run_lock`.
        """
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _replace(self.folder / _CLAIM, json.dumps([where, owner]))
        self.ring()

    def claimed(self) -> tuple[str, str] | None:
        """The newest claim; None if there is none, or if it is damaged."""
        with contextlib.suppress(FileNotFoundError, ValueError):
            claim: tuple[str, str] = fit(parse((self.folder / _CLAIM).read_bytes()), tuple[OsText, OsText])
            return claim
        return None

    def all_attempts(self) -> Iterator[Spool]:
        """The folder as each attempt sees it, the newest first."""
        numbers = [int(path.name.removeprefix("attempt")) for path in self.folder.glob("attempt*")]
        return (Spool(self.folder, number) for number in sorted(numbers, reverse=True))

    def drop_attempt(self) -> None:
        for step in self.steps():
            self.drop(step)
        shutil.rmtree(self.folder / f"attempt{self.attempt}", ignore_errors=True)

    def status(self) -> Status:
        """The writer's newest report; an empty one before the first, or if it is damaged."""
        with contextlib.suppress(FileNotFoundError, ValueError):
            status: Status = fit(parse(self._status.read_bytes()), Status)
            if not status.committed or is_count(status.committed.get("step")):
                return status
        return Status()

    def news(self) -> Status | None:
        """The writer's report if it is new since the last call; else None. Costs microseconds then."""
        try:
            stat = os.stat(self._status)
        except OSError:
            return None
        stamp = stat.st_mtime_ns, stat.st_ino  # clocks of file systems are coarse: two may have one time
        if stamp == self._seen:
            return None
        self._seen = stamp
        return self.status()

    def set_status(self, status: Status) -> None:
        """Used by the writer only."""
        with contextlib.suppress(OSError):  # it lies in memory, which may be full
            _replace(self._status, status.to_json())

    def wait_committed(self, step: int, timeout_s: float) -> bool:
        """Wait until a checkpoint of ``step`` or later of this attempt is committed; False on failure or time-out."""
        deadline = time.monotonic() + timeout_s
        while True:
            status = self.status()
            if status.committed.get("attempt") == self.attempt and status.committed["step"] >= step:
                return True
            if (status.attempt == self.attempt and status.failed >= step) or time.monotonic() > deadline:
                return False
            time.sleep(_LOOK_S)

    def _path(self, step: int) -> Path:
        return self.folder / f"attempt{self.attempt}" / folder_name(step)


def available_memory() -> int:
    """Free memory of this machine in bytes, less a reserve."""
    free, total = machine_bytes()
    return max(0, free - int(_RESERVE * total))


def _replace(path: Path, text: str) -> None:
    """Put ``text`` at ``path``, whole or not at all. Raises StorageFull if there is no room."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        inject.point("checkpoint.stage")
        temporary.write_text(text)
        inject.point("checkpoint.stage")
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        if error.errno in FULL:
            raise StorageFull(f"no room in memory to write {path} ({error.strerror})") from error
        raise

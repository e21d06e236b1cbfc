"""The folder in a machine's memory where workers leave snapshots and the writer finds them.

``JOB_DIR/checkpoints/``::

    step-0000000040/rank0             files of the snapshot, sealed (see :mod:`shared_core.checkpoint.image`)
    step-0000000040/rank0.sealed      JSON: rank 0's snapshot is whole, and what it consists of; written last
    spare/                            files whose memory may be used again
    bell                              a pipe with a name: a byte in it makes the writer look
    status.json                       what the writer has done; replaced by it

Everything the writer has to know lies here, so its death loses nothing but the copy that was under way: the next one
looks again. Does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

#: Its name in the job's folder.
FOLDER = "checkpoints"


@dataclass(frozen=True)
class Target:
    """Where checkpoints go.

    Attributes:
        where: a local folder or an fsspec URL.
        keep: committed checkpoints of this job that stay, at least 2.
        quota_bytes: most that all of them may take, those being written included; 0 is no limit.
    """

    where: str
    keep: int = 2
    quota_bytes: int = 0


@dataclass(frozen=True)
class Sealed:
    """One rank's part of a snapshot.

    Attributes:
        step: batch tops passed.
        rank: logical rank.
        world_size: ranks of the job; as many parts make a checkpoint.
        local: ranks of this machine: its writer waits for all of them.
        files: names of parts, each a file in the snapshot's folder; no two ranks use the same name.
        meta: plain data of the checkpoint, equal on all ranks (``job``, ``attempt``, ``version``, ...); parts whose
            meta differ never make a checkpoint together.
        target: where it is to be written; None keeps it in memory only.
    """

    step: int
    rank: int
    world_size: int
    local: tuple[int, ...]
    files: tuple[str, ...]
    meta: Mapping[str, Any] = field(default_factory=dict)
    target: Target | None = None


@dataclass(frozen=True)
class Status:
    """What the writer says.

    Attributes:
        pid: of the writer.
        committed: meta of the newest checkpoint it knows to be committed, with ``step``; empty for none.
        writing: step under way; -1 for none.
        waiting: step that is next; -1 for none.
        failed: step of the newest one that was given up since the last commit; -1 for none.
        cause: why, in one word (``full``, ``read-only``, ``gone``, ``quota``, ``error``); empty if none was.
        message: the same, for people.
        seconds: that the newest committed one took, from the first byte written to the manifest.
        bytes: that it took from this machine.
    """

    pid: int = 0
    committed: Mapping[str, Any] = field(default_factory=dict)
    writing: int = -1
    waiting: int = -1
    failed: int = -1
    cause: str = ""
    message: str = ""
    seconds: float = 0.0
    bytes: int = 0


class Spool:
    """The folder, seen from a worker or the writer. Any process of the machine may make one.

    Args:
        folder: ``JOB_DIR/checkpoints``; made when first written to, mode 0700.
    """

    def __init__(self, folder: Path) -> None:
        raise NotImplementedError

    def folder_of(self, step: int) -> Path:
        """The folder of a snapshot, made if it is not there."""
        raise NotImplementedError

    def spare(self, name: str) -> Path | None:
        """A file that nobody needs any more and that held a part of the same name; only the caller has it then."""
        raise NotImplementedError

    def check_room(self, nbytes: int) -> None:
        """See whether the machine's memory holds so much more.

        Raises:
            StorageFull: it does not; the snapshot must be skipped.
        """
        raise NotImplementedError

    def seal(self, part: Sealed) -> None:
        """A rank's files are whole: note it, and ring the bell.

        Raises:
            StorageFull: no room for the note.
        """
        raise NotImplementedError

    def ring(self) -> None:
        """Make the writer look. Never blocks; without a writer nothing happens (it looks when it starts)."""
        raise NotImplementedError

    def steps(self) -> list[int]:
        """Steps of which there is something, oldest first."""
        raise NotImplementedError

    def parts(self, step: int) -> dict[int, Sealed]:
        """Sealed parts of a step, by rank."""
        raise NotImplementedError

    def newest_complete(self, ranks: Sequence[int], meta: Mapping[str, Any] | None = None) -> int | None:
        """The newest step of which ``ranks`` have sealed their parts, with this meta if it is given (those keys)."""
        raise NotImplementedError

    def drop(self, step: int) -> None:
        """Remove a snapshot; its files become spare."""
        raise NotImplementedError

    def status(self) -> Status:
        """What the writer said last; an empty one before it has said anything."""
        raise NotImplementedError

    def wait_committed(self, step: int, timeout_s: float) -> bool:
        """Wait until a checkpoint of ``step`` or a later one is committed; False if it failed or time ran out."""
        raise NotImplementedError

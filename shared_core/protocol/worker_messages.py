"""What workers say to the agent of their machine: typed records in the job's store, as plain data.

What the script wishes of its checkpoints is none of them: options come over the agent's own socket only, of which the
kernel says who is at the other end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shared_core.errors import DamagedRecord
from shared_core.protocol.codec import Count, decode
from shared_core.protocol.preparing import Prepared


@dataclass(frozen=True)
class Failed:
    """``fail``: the job ends.

    Attributes:
        message: why.
        rank: who says so.
    """

    message: str
    rank: Count = 0


@dataclass(frozen=True)
class Restart:
    """``restart``: all workers start again.

    Attributes:
        reason: why.
    """

    reason: str


@dataclass(frozen=True)
class Saved:
    """``saved``: the last checkpoint is committed, or cannot be.

    Attributes:
        done: it is committed.
        boundary: its step boundary; 0 if there is none.
    """

    done: bool = False
    boundary: Count = 0


@dataclass(frozen=True)
class Handed:
    """``handed``: the state is handed on, because the number of workers changes.

    Attributes:
        generation: in which.
        boundary: the step boundary from which the job continues.
    """

    generation: Count
    boundary: Count


@dataclass(frozen=True)
class Declined:
    """``declined``: the number of workers cannot change.

    Attributes:
        generation: in which.
        reason: why.
    """

    generation: Count
    reason: str


@dataclass(frozen=True)
class Trains:
    """``reports``: a worker trains again, see :class:`~shared_core.worker.recovery.reporting.RecoveryReporter`.

    Attributes:
        rank: which one.
        time: since when, in seconds since the epoch.
        pid: of the worker.
        boundary: the step boundary that it began at.
        whence: the checkpoint that all begin from, in words.
        behind: it does not train yet: it computes the job again from its beginning.
    """

    rank: Count
    time: float
    pid: Count | None = None
    boundary: Count | None = None
    whence: str = ""
    behind: bool = False


#: Kind of the frame in which a worker asks its agent for options of checkpoints, by full name.
WISH = b"W"
#: Longest wish, in bytes.
WISH_BYTES = 1 << 16
#: Shapes by key. What the first two say is shown to people, so any words will do there.
SHAPES: dict[str, Any] = {
    "fail": Failed,
    "restart": Restart,
    "saved": Saved,
    "handed": Handed,
    "declined": Declined,
    "reports": Trains,
    "divergent": list[Count],
    "prepared": Prepared,
}
_WORDS = ("fail", "restart")


def read(name: str, raw: bytes) -> Any:
    """What was said under a key.

    Raises:
        DamagedRecord: it is nothing that a worker says.
    """
    try:
        return decode(raw, SHAPES[name], name)
    except DamagedRecord:
        if name not in _WORDS:
            raise
        return SHAPES[name](_words(raw, name))


def _words(raw: bytes, name: str) -> str:
    try:
        found: str = decode(raw, str, name)
        return found
    except DamagedRecord:
        return raw.decode(errors="replace")

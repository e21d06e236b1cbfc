"""Messages of workers to the agent of their machine, and of agents to each other: typed records in the job's store.

The script's options of checkpoints are not among them: these come over the agent's own socket only, whose other end the
kernel tells.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Any

from shared_core.codec import Count, decode
from shared_core.protocol.leaving import Leave
from shared_core.protocol.preparing import Prepared

#: Queues of the store, one for each machine's place: what wakes its agent, workers' reports to it, workers whose state
#: is damaged, agents that tell each other who is to leave, hot standbys that wait for their rank's place.
WORDS, REPORTS, DAMAGED, LEAVES, PREPARED = "words", "reports", "damaged", "leaves", "prepared"
#: Name of a file in the job's folder, and of a key in the attempt's store: they tell rank 0 that the job ends.
ENDING = "ending"
#: Key that rank 0 sets when the last checkpoint is committed, or cannot be.
SAVED = "saved"
#: Signals that ask for a last checkpoint some time before the end.
EARLY_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True)
class Failed:
    """``fail``: the job ends. ``rank`` is the sender."""

    message: str
    rank: Count = 0


@dataclass(frozen=True)
class Restart:
    """``restart``: all workers start again."""

    reason: str


@dataclass(frozen=True)
class CheckpointSaved:
    """``saved``: the last checkpoint is committed, or cannot be. ``boundary`` is 0 if there is none."""

    done: bool = False
    boundary: Count = 0


@dataclass(frozen=True)
class Handed:
    """``handed``: the state is written, because the number of workers changes. The job continues from ``boundary``."""

    generation: Count
    boundary: Count


@dataclass(frozen=True)
class Declined:
    """``declined``: the number of workers cannot change."""

    generation: Count
    reason: str


@dataclass(frozen=True)
class Trains:
    """``reports``: a worker trains again, see :class:`~shared_core.worker.recovery.reporting.RecoveryReporter`.

    Attributes:
        time: since when, in seconds since the epoch.
        behind: it does not train yet: it computes the job again from its beginning.
    """

    rank: Count
    time: float
    pid: Count | None = None
    boundary: Count | None = None
    whence: str = ""
    behind: bool = False


@dataclass(frozen=True)
class Damaged:
    """``damaged``: the sender's state is not that of most of its replicas, which ``what`` says for people."""

    rank: Count
    pid: Count
    what: str


#: Kind of the frame in which a worker asks its agent for options of checkpoints, by full name.
WISH = b"W"
#: Longest such request, in bytes.
WISH_BYTES = 1 << 16
#: Shapes by key.
SHAPES: dict[str, Any] = {
    "fail": Failed,
    "restart": Restart,
    SAVED: CheckpointSaved,
    "handed": Handed,
    "declined": Declined,
    REPORTS: Trains,
    "divergent": list[Count],
    PREPARED: Prepared,
    DAMAGED: Damaged,
    LEAVES: Leave,
}


def read(name: str, raw: bytes) -> Any:
    """A message under its key; raises DamagedRecord if it is none."""
    return decode(raw, SHAPES[name], name)

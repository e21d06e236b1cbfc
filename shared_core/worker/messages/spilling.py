"""Moves the log in memory to disk where it is too large, and does without where the disk takes nothing."""

from __future__ import annotations

import time
from collections.abc import Callable

from shared_core.events import console_once
from shared_core.resources import what_to_do
from shared_core.worker.messages.group_log import GroupLog

#: A disk that has refused is tried again after so long, in seconds.
RETRY_S = 10.0


class Spilling:
    """The log of one rank. Not thread-safe: callers hold the runtime's lock. What the disk refuses stays in memory: two
    step boundaries' worth at most, and nothing is lost.
    """

    def __init__(self, rank: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._rank, self._clock = rank, clock
        self._next, self._told = 0.0, False

    def spill(self, log: GroupLog, keep_bytes: int) -> int:
        """As :meth:`GroupLog.spill`, but where the disk refuses, fewer bytes or none, and no error. Retries
        after ``RETRY_S``.
        """
        if self._clock() < self._next:
            return 0
        before = log.nbytes
        try:
            return log.spill(keep_bytes)
        except OSError as error:
            self._next = self._clock() + RETRY_S
            if not self._told:
                self._told = True
                console_once(
                    "spill",
                    f"rank {self._rank}: logged messages stay in memory, beyond log.spill_bytes={keep_bytes}: "
                    f"the folder for temporary files {log.folder} cannot be written {what_to_do(error)}, or set "
                    "TMPDIR to another folder. The job continues",
                )
            return before - log.nbytes

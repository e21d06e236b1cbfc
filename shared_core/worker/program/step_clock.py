"""How long the program's thread computes in each part of a step, without waits for other ranks."""

from __future__ import annotations

import time

from shared_core.protocol.progress_file import ProgressFile
from shared_core.protocol.stragglers import PARTS
from shared_core.worker.comm import Runtime

DATA, FORWARD, BACKWARD, UPDATE = range(len(PARTS))


class StepClock:
    """Tells the launcher, in ``progress``, the times of each step. The thread of the program calls, or that of its
    backward.
    """

    def __init__(self, runtime: Runtime, progress: ProgressFile) -> None:
        self._compute_lock, self.progress = runtime.compute_lock, progress
        self._part, self._since, self._waited = DATA, time.perf_counter(), 0.0
        self._spent = [0.0] * len(PARTS)
        self._handed_over = False

    def enter(self, part: int) -> None:
        """From now on the program is in this part of a step."""
        now, waited = time.perf_counter(), self._compute_lock.waited_s
        # What follows the last bucket of a backward is a wait for others, inside torch.
        if not (self._handed_over and self._part == BACKWARD):
            self._spent[self._part] += now - self._since - (waited - self._waited)
        self._part, self._since, self._waited, self._handed_over = part, now, waited, False

    def handed_over(self) -> None:
        """DDP has handed over a bucket."""
        self._handed_over = False  # up to here backward has computed
        self.enter(BACKWARD)
        self._handed_over = True

    def boundary(self, number: int) -> None:
        """A step boundary: the step before it is over."""
        self.enter(DATA)
        self.progress.step(number, self._spent)
        self._spent = [0.0] * len(PARTS)

"""Told to end, the agent has its workers make a last checkpoint first, within the grace time.

SIGTERM is what clouds and schedulers send before they take a machine away, SIGUSR1 and SIGUSR2 what SLURM can send some
time before a job's limit (``--signal=USR1@120``). Rank 0 finds the request at its next step boundary; all ranks stop at
the same one and report when the checkpoint is committed. The result is printed once, at the very end, when nobody
writes any more: it is not known before.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shared_core.checkpoint.command import Command
from shared_core.checkpoint.spool import FOLDER, Spool
from shared_core.checkpoint.verdict import verdict
from shared_core.config import SwiftConfig
from shared_core.events import console
from shared_core.protocol.keys import EARLY_SIGNALS, ENDING

#: Share of the grace time that is kept for ending the workers.
_RESERVE = 0.15


class LastCheckpoint:
    """Decides whether the end waits for a checkpoint.

    Args:
        grace_s: seconds from SIGTERM to the end of all workers.
        early_s: seconds from SIGUSR1 or SIGUSR2 to that.
        set_key: sets a key in the attempt's store; does nothing before there is one.
    """

    def __init__(
        self, wanted: bool, grace_s: float, early_s: float, job_dir: Path, set_key: Callable[[str], None]
    ) -> None:
        self._wanted, self._grace_s, self._early_s = wanted, grace_s, early_s
        self._job_dir, self._set_key = job_dir, set_key
        self._handled = 0
        self._over = self._committed = False
        self._boundary = 0
        self.deadline: float | None = None

    def want(self) -> None:
        """The script has asked for checkpoints, and the launcher's own options do not."""
        self._wanted = True

    def signals(self, names: Sequence[str]) -> tuple[str, ...]:
        """The signals to take over: those that end the job, and the early ones if a checkpoint can be made."""
        early = [number.name for number in EARLY_SIGNALS if self._wanted]
        return (*names, *(name for name in early if name not in names))

    def waits(self, received: Sequence[int]) -> bool:
        """Whether the end that these signals ask for waits for a checkpoint. ``received``: all so far. A second signal
        of the same urgency, and any other that ends the job, does not wait.
        """
        for number in received[self._handled :]:
            self._handled += 1
            if not self._wanted or number not in (signal.SIGTERM, *EARLY_SIGNALS):
                self._over = True
            elif self.deadline is None:
                self._ask(number)
            elif number == signal.SIGTERM and received[self._handled - 2] != signal.SIGTERM:
                self.deadline = min(self.deadline, time.monotonic() + self._grace_s * (1 - _RESERVE))
            elif number == signal.SIGTERM:
                self._over = True
        if self.deadline is not None and time.monotonic() >= self.deadline:
            self._over = True
        return self.deadline is not None and not self._over

    def _ask(self, number: int) -> None:
        name, early = signal.Signals(number).name, number in EARLY_SIGNALS
        limit = self._early_s if early else self._grace_s * (1 - _RESERVE)
        console(f"received {name}: a last checkpoint is made, for at most {limit:.0f} s")
        self.deadline = time.monotonic() + limit
        (self._job_dir / ENDING).touch(mode=0o600)
        self._set_key(ENDING)

    def saved(self, fields: Mapping[str, Any]) -> None:
        if self.deadline is None:
            return  # another machine's: this one continues
        self._committed = bool(fields.get("done"))
        self._boundary = int(fields.get("boundary", 0))
        self._over = True

    @property
    def left_s(self) -> float:
        """Seconds left for the workers to end; 0 once the checkpoint is committed."""
        return 0.0 if self._committed else self.writer_s

    @property
    def writer_s(self) -> float:
        if self.deadline is None:
            return self._grace_s
        return max(0.0, self.deadline - time.monotonic()) + self._grace_s * _RESERVE

    def say(self, config: SwiftConfig, command: Command, reached: int) -> None:
        """Print what is committed, at the end of a job that was told to end or whose writer was cut off."""
        if config.checkpoint.dir is not None:
            spool = Spool(self._job_dir / FOLDER)
            reached = self._boundary or reached
            console(verdict(config.checkpoint.dir, command, spool, reached, continues=config.continues))

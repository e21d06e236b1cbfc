"""What an agent is told: the program, and how to treat the workers that run it."""

from __future__ import annotations

import os
from dataclasses import dataclass

from shared_core.checkpoint.command import Command
from shared_core.config import SwiftConfig
from shared_core.protocol.failure_policy import LOOP_LIMIT
from shared_core.protocol.request import Mode


@dataclass(frozen=True)
class Program:
    """The user's program.

    Attributes:
        target: path or name.
        args: ``${local_rank}`` is substituted as torchrun does.
        first: modules that workers import before the program.
    """

    mode: Mode
    target: str
    args: tuple[str, ...] = ()
    preload: tuple[str, ...] = ()
    first: tuple[str, ...] = ()

    @property
    def command(self) -> Command:
        """By which checkpoints are found again."""
        return Command.of(self.target if self.mode == "module" else os.path.abspath(self.target), self.args, self.mode)


@dataclass(frozen=True)
class AgentOptions:
    """How the agent treats its workers.

    Attributes:
        events: path of ``events.jsonl``; None writes none.
        grace_s: seconds between SIGTERM and SIGKILL when the job is ended.
        threads: intra-op threads that a fresh interpreter would use when ``OMP_NUM_THREADS`` is not set.
        loop_limit: see :class:`~shared_core.protocol.failure_policy.FailureBook`.
        store_port: port of the store; 0 takes a free one.
        machines: how many there are at least, and at most.
        note: more text for the line at the start.
    """

    config: SwiftConfig
    standbys: int = 1
    events: str | None = None
    grace_s: float = 5.0
    threads: int = 0
    loop_limit: int = LOOP_LIMIT
    signals: tuple[str, ...] = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
    store_port: int = 0
    machines: tuple[int, int] = (1, 1)
    note: str = ""
    secret: bytes = b""

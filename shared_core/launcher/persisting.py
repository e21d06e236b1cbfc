"""The process that writes a machine's checkpoints, and the last checkpoint of a job that is told to end."""

from __future__ import annotations

import math
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from shared_core.checkpoint.command import Command
from shared_core.checkpoint.spool import FOLDER, Spool
from shared_core.checkpoint.verdict import verdict
from shared_core.config import SwiftConfig
from shared_core.events import RUN, console
from shared_core.protocol.worker_env import EVENTS, INCARNATION
from shared_core.protocol.worker_messages import EARLY_SIGNALS, ENDING
from shared_core.resources import Retries
from shared_core.system import process
from shared_core.system.jobdir import CHECKPOINTS
from shared_core.waiting import Wait

#: Share of the grace time that is kept for ending the workers.
_RESERVE = 0.15


class LastCheckpoint:
    """Told to end, the agent has its workers make a last checkpoint first, within the grace time.

    SIGTERM is what clouds and schedulers send before they take a machine away, SIGUSR1 and SIGUSR2 what SLURM can send
    some time before a job's limit (``--signal=USR1@120``). Rank 0 finds the request at its next step boundary; all
    ranks stop at the same one and report when the checkpoint is committed. The result is printed once, at the very end,
    when nobody writes any more: it is not known before.

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


PROGRAM = "shared_core.checkpoint.writer"
#: After so many deaths in a row, each soon after the start, it is not started again.
GIVE_UP_AFTER = 5
_SOON_S = 5.0
#: Stands for no limit, in seconds.
_PATIENT_S = 1e9


class Persisting:
    """Keeps the writer of one machine running. Used by one thread.

    Args:
        job_dir: private folder of the job; a snapshot that a worker leaves there makes the writer needed.
        events: path of ``events.jsonl``, if there is one.
        grace_s: how long it may continue when this process has been killed.
    """

    def __init__(self, job_dir: Path, events: str | None, grace_s: float, say: Callable[[str], None]) -> None:
        self._folder = job_dir / CHECKPOINTS
        self._events, self._grace_s, self._say = events, grace_s, say
        self._process: subprocess.Popen[bytes] | None = None
        self._pidfd: int | None = None
        self._started = 0.0
        self._refusals = Retries(say)
        self._starts, self._early_deaths, self._rank, self._run = 0, 0, 0, ""

    def look(self, rank: int = 0, run: str = "") -> None:
        """Start the writer if it is needed and does not run. Cheap: call it often. ``rank``: for test faults."""
        self._run = run
        if self._process is not None:
            if self.running:
                return
            self._handle_exits()
        if self._early_deaths < GIVE_UP_AFTER and self._refusals.due and self._folder.exists():
            self._start(rank)

    @property
    def running(self) -> bool:
        """Whether it runs; who reaps all children may have reaped it."""
        if self._process is None:
            return False
        if self._pidfd is None:
            return process.state_of(self._process.pid) not in (None, "Z", "X")
        watch = select.poll()
        watch.register(self._pidfd, select.POLLIN)
        return not watch.poll(0)

    def finish(
        self,
        deadline: float | None,
        wait: Callable[[float], object],
        enough: Callable[[], bool],
        absent: Collection[int] = (),
    ) -> bool:
        """Let it write what is there, then end it; if it fails meanwhile, start another. A second call does nothing.

        Args:
            deadline: ``time.monotonic()`` until which it may continue; None for no limit.
            wait: waits for at most so many seconds, less where something happens; reaps no children.
            absent: ranks without which the job ends: nobody writes their parts.

        Returns:
            False if it was ended while it still had something to do.
        """
        for left in reversed(range(GIVE_UP_AFTER)):
            if self._process is None:
                break
            ended, code = self._finish(deadline, wait, enough, absent)
            if not ended or (code and deadline is not None and time.monotonic() >= deadline):
                return False
            if not code:
                break
            if not left or not self._start(self._rank):
                return False
        return True

    def _finish(
        self,
        deadline: float | None,
        wait: Callable[[float], object],
        enough: Callable[[], bool],
        absent: Collection[int],
    ) -> tuple[bool, int | None]:
        """Whether it ended by itself, and its exit code, if anybody knows."""
        assert self._process is not None and self._process.stdin is not None
        limit = _PATIENT_S if deadline is None else max(0.0, deadline - time.monotonic())
        with suppress(OSError):
            self._process.stdin.write(f"{limit:.3f} {' '.join(map(str, absent))}\n".encode())
        with suppress(OSError):
            self._process.stdin.close()
        whom, ends = "the last checkpoint to be written to storage", "it waits as long as that takes"
        if deadline is not None:
            ends = "what is not written by then is left out"
        # The loop checks the deadline first: the wait only prints the line.
        said = Wait("the launcher", whom, math.inf if deadline is None else limit + 1.0, ends=ends, say=self._say)
        while self.running and not enough() and (deadline is None or time.monotonic() < deadline):
            said.look()
            wait(0.1)
        ended = not self.running
        if not ended:
            with suppress(ProcessLookupError):
                self._process.kill()
        return ended, self._collect()

    def _start(self, rank: int) -> bool:
        """False where no process can be started: :meth:`look` tries again."""
        command = process.run_module(PROGRAM, str(self._folder), f"--grace={self._grace_s}")
        if self._events:
            command.append(f"--events={self._events}")
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                env=self._environment(os.environ, rank),
                bufsize=0,
                start_new_session=True,  # signals of the terminal are not for it
            )
        except OSError as error:
            self._refusals.refused("the writer of checkpoints cannot be started", error)
            return False
        self._refusals.worked()
        self._pidfd = process.open_pidfd(self._process.pid)
        self._started, self._rank = time.monotonic(), rank
        self._starts += 1
        return True

    def _environment(self, environ: Mapping[str, str], rank: int) -> dict[str, str]:
        path = os.pathsep.join(filter(None, [environ.get("PYTHONPATH", ""), process.PACKAGE_ROOT]))
        own = {"RANK": str(rank), INCARNATION: str(self._starts), EVENTS: self._events or "", "PYTHONPATH": path}
        own[RUN] = self._run
        return {**environ, **own}

    def _handle_exits(self) -> None:
        """It has died: the next one finds its work in the folder."""
        code = self._collect()
        cause = process.describe_exit(code) if code is not None else "ended"
        self._early_deaths = self._early_deaths + 1 if time.monotonic() < self._started + _SOON_S else 0
        if self._early_deaths < GIVE_UP_AFTER:
            self._say(f"the writer of checkpoints failed ({cause}); starting another")
        else:
            self._say(
                f"the writer of checkpoints failed {GIVE_UP_AFTER} times in a row ({cause}): no more checkpoints are "
                "written; training continues"
            )

    def _collect(self) -> int | None:
        """Its exit code; None if somebody else has reaped it."""
        assert self._process is not None
        done, self._process = self._process, None
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None
        if done.stdin is not None:
            with suppress(OSError):
                done.stdin.close()
        try:
            _, status = os.waitpid(done.pid, 0)
        except ChildProcessError:
            code = None
        else:
            code = os.waitstatus_to_exitcode(status)
        done.returncode = -signal.SIGKILL if code is None else code  # so that Popen does not wait for it
        return code

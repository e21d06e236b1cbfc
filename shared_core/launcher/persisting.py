"""The process that writes a machine's checkpoints: started when first needed, kept alive, and given time at the end."""

from __future__ import annotations

import math
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path

from shared_core.events import RUN
from shared_core.protocol.worker_env import EVENTS, INCARNATION
from shared_core.resources import Retries
from shared_core.system import process
from shared_core.system.jobdir import CHECKPOINTS
from shared_core.waiting import Wait

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

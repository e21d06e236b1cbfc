"""The worker processes of one agent: starting them from standbys or fresh, and noticing their deaths."""

from __future__ import annotations

import os
import selectors
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from shared_core.errors import OutOfResources, WaitTimeout
from shared_core.launcher.logs import ERROR_FILE
from shared_core.launcher.standby import Preload, Standby, start_fresh
from shared_core.plain_json import parse
from shared_core.protocol.failure_policy import RaisedError
from shared_core.protocol.generation import CauseKind
from shared_core.protocol.request import StartRequest
from shared_core.resources import Retries, what_to_do
from shared_core.system import process
from shared_core.waiting import Wait, ranks_text

#: A standby that does not answer a request for so long is replaced, in seconds.
ANSWER_TIMEOUT_S = 10.0
#: After so many standbys in a row that die before they are ready, workers no longer wait for one. If the imports ended
#: them, no more are made.
GIVE_UP_AFTER = 2
#: Pause before another standby is made then, in seconds: the first, and the longest.
_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
_THREADS = (
    "the standby holds {} threads after its imports; a forked worker has only one of them. If workers hang at start, "
    "leave the module that starts them out of --preload, or use --standbys 0"
)
#: Between two looks for children that have ended, at the end of all, in seconds.
_REAP_S = 0.005
#: Cause of death of a worker that is no longer wanted.
CANCELLED = "cancelled"


@dataclass
class LiveWorker:
    """A running worker process.

    Attributes:
        incarnation: how many workers held the rank before.
        pid: 0 before there is a process.
        started: when it was asked for, in seconds since the epoch.
        born: when its process existed, in seconds since the epoch.
        how: ``standby``, ``respawn``, ``prepared`` or ``forked``.
        spare: a hot standby: it holds no rank yet.
        pidfd: readable when it dies; None without support in the kernel.
        stopped_looks: looks in a row that found it in state T.
        cause: why the agent killed it; empty if it did not.
        leaves: why it is to leave; empty if it is not.
    """

    local_rank: int
    rank: int
    incarnation: int
    request: StartRequest
    pid: int = 0
    started: float = field(default_factory=time.time)
    born: float = 0.0
    how: str = ""
    spare: bool = False
    pidfd: int | None = None
    stopped_looks: int = 0
    cause: str = ""
    kind: CauseKind = CauseKind.DIED
    leaves: str = ""

    def leave(self, why: str, file: Path) -> None:
        """Tell it to leave at its next step boundary, by a file where it looks then."""
        self.leaves = why
        fresh = file.with_name(f"{file.name}.new")
        fresh.write_text(str(self.pid))
        fresh.replace(file)

    def kill(self, cause: str, kind: CauseKind = CauseKind.DIED) -> None:
        """SIGKILL to its process group; ``cause`` is shown to the user."""
        self.cause, self.kind = cause, kind
        process.kill_group(self.pid)

    def take_place(self) -> None:
        """This was a hot standby, and holds its rank from now on."""
        self.spare, self.started = False, time.time()
        self.how = "forked" if self.how == "forked" else "prepared"

    def raised(self, code: int) -> RaisedError | None:
        """The exception with which it ended, if it left one; ``code`` is its exit code."""
        path = self.request.env.get(ERROR_FILE, "")
        if code > 0 and path:
            with suppress(OSError, ValueError):
                return RaisedError.from_error_file(parse(Path(path).read_bytes()))
        return None

    def look(self) -> int:
        """See whether it is stopped. Returns how many looks in a row have found that."""
        self.stopped_looks = self.stopped_looks + 1 if process.state_of(self.pid) == "T" else 0
        return self.stopped_looks


class WorkerPool:
    """Starts workers and reaps every child of the agent.

    Args:
        selector: the agent's; pidfds and standbys are registered there, to wake it.
        standbys: how many zygotes to keep; 0 starts every worker in a fresh interpreter.
        early: a zygote that was started before, to save time; it is told the modules here.
        wait_timeout_s: longest time that a zygote may import when a worker waits for it.

    Attributes:
        live: workers that run, by pid; the lease's thread reads them, too.
        spares: hot standbys that run, by pid.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        standbys: int,
        standby_env: dict[str, str],
        preload: Preload,
        say: Callable[[str], None],
        early: Standby | None = None,
        *,
        wait_timeout_s: float = 300.0,
    ) -> None:
        self.live: dict[int, LiveWorker] = {}
        self.spares: dict[int, LiveWorker] = {}
        self._fallen: list[tuple[LiveWorker, int]] = []
        self._selector = selector
        self._wanted_standbys = standbys
        self._standby_env = standby_env
        self._preload = preload
        self._say = say
        self._standbys: list[Standby] = []
        self._starting: dict[int, LiveWorker] = {}
        self._asked: dict[int, float] = {}
        self._waiting: list[LiveWorker] = []
        self._wait: Wait | None = None
        self._wait_timeout_s = wait_timeout_s
        self._new: list[LiveWorker] = []
        self._early_deaths: dict[int, int] = {}
        self._failed_standbys = 0
        self._next_standby = 0.0
        self._fills = False
        self._refusals = Retries(say)
        self._warned_threads = False
        self._early = early
        self._foreign = set(process.children())  # of whoever became the agent with exec: not ours to end
        self._foreign.discard(early.pid if early else 0)

    # -- starting -----------------------------------------------------------------------------------------------------

    def fill_standbys(self) -> None:
        """Start zygotes until there are as many as wanted; later if no process can be started now."""
        self._fills = True
        while len(self._standbys) < self._wanted_standbys and self._refusals.due and self._pause_over:
            try:
                standby, self._early = self._early or Standby(self._standby_env), None
            except OSError as error:
                self._refusals.refused("no standby can be started", error)
                return
            self._refusals.worked()
            self._standbys.append(standby)
            self._register(standby.fileno())
            if standby.pidfd is not None:
                self._register(standby.pidfd)
            standby.preload(self._preload)

    @property
    def _pause_over(self) -> bool:
        return time.monotonic() >= self._next_standby

    def start(self, worker: LiveWorker) -> None:
        """Start a worker: from a standby, once one is ready, or fresh where there is none. See :meth:`started`."""
        standby = next((one for one in self._standbys if one.ready), None)
        dying = standby is None and self._failed_standbys >= GIVE_UP_AFTER
        if worker.request.mode == "exec" or self._wanted_standbys == 0 or dying:
            worker.how = "respawn"
            try:
                worker.pid = start_fresh(worker.request)
            except OSError as error:
                self._refuse(worker, error)
                return
            self._refusals.worked()
            self.arrive(worker)
            return
        worker.how = "standby"
        if standby is None:
            self._waiting.append(worker)
            return
        self._starting[worker.request.token] = worker
        self._asked[worker.request.token] = time.monotonic()
        standby.start(worker.request)

    def started(self) -> list[LiveWorker]:
        """Workers whose processes exist since the last call."""
        for standby in self._standbys:
            was_ready = standby.ready
            for request, pid in standby.answers():
                self._asked.pop(request.token, None)
                worker = self._starting.get(request.token)
                if worker is not None and pid < 0:
                    del self._starting[request.token]
                    self._refuse(worker, OSError(-pid, os.strerror(-pid)))
                elif worker is not None:
                    self._refusals.worked()
                    worker.pid = pid
            if standby.ready and not was_ready:
                self._welcome(standby)
        waiting, self._waiting = (self._waiting, []) if self._refusals.due else ([], self._waiting)
        for worker in waiting:
            self.start(worker)
        for token, worker in list(self._starting.items()):
            if worker.pid:
                del self._starting[token]
                self.arrive(worker)
        new, self._new = self._new, []
        return new

    def _refuse(self, worker: LiveWorker, error: OSError) -> None:
        self._refusals.refused(f"no process can be started for rank {worker.rank}", error)
        if not worker.cause:
            self._waiting.append(worker)

    def arrive(self, worker: LiveWorker) -> None:
        """The process of a worker or hot standby is there, a child of the agent."""
        worker.pidfd = process.open_pidfd(worker.pid)
        if worker.pidfd is not None:
            self._register(worker.pidfd)
        worker.born = time.time()
        if worker.spare:
            self.spares[worker.pid] = worker
            if worker.cause:
                worker.kill(worker.cause)
            return
        self.live[worker.pid] = worker
        self._new.append(worker)

    def promote(self, spare: LiveWorker) -> None:
        """A hot standby takes its rank's place; the next :meth:`started` returns it."""
        del self.spares[spare.pid]
        spare.take_place()
        self.live[spare.pid] = spare
        self._new.append(spare)

    def fallen(self) -> list[tuple[LiveWorker, int]]:
        """``(standby, exit code)`` of hot standbys that died since the last call."""
        fallen, self._fallen = self._fallen, []
        return fallen

    def cancel_starts(self) -> None:
        """Forget workers without a process. One that a zygote is just forking is killed when its pid is known."""
        self._waiting.clear()
        for worker in self._starting.values():
            worker.cause = CANCELLED

    @property
    def keeps_standbys(self) -> bool:
        """Whether a worker need not wait for the imports."""
        return self._fills and self._wanted_standbys > 0

    @property
    def can_start(self) -> bool:
        """Whether a worker that is asked for now need not wait."""
        return self._wanted_standbys == 0 or any(standby.ready for standby in self._standbys)

    @property
    def starting(self) -> bool:
        return bool(self._waiting or self._starting)

    def _welcome(self, standby: Standby) -> None:
        self._failed_standbys = 0
        threads = int(standby.report.get("threads", 1))
        if threads > 1 and not self._warned_threads:
            self._warned_threads = True
            self._say(_THREADS.format(threads))
        for module, error in standby.report.get("failed", {}).items():
            self._say(f"the standby could not import {module} ({error}); replacements import it themselves")

    # -- deaths -------------------------------------------------------------------------------------------------------

    def reap(self) -> list[tuple[LiveWorker, int]]:
        """``(worker, exit code)`` of those that died; their process groups are killed, and every orphan is reaped."""
        dead: list[tuple[LiveWorker, int]] = []
        while (pid := process.peek_dead()) is not None:
            worker = self.live.pop(pid, None) or self.spares.pop(pid, None)
            if worker is not None:
                process.kill_group(pid)  # while the zombie still holds the pid: its data loader processes end with it
            code = process.reap(pid)
            if worker is not None:
                self._note_death(worker, code, dead)
            elif (standby := next((one for one in self._standbys if one.pid == pid), None)) is not None:
                self._failed_standby(standby, by_signal=code is None or code < 0)
            elif self._starting:
                self._early_deaths[pid] = -signal.SIGKILL if code is None else code
        # a worker may die before its zygote's answer with the pid was read
        for pid in list(self._early_deaths.keys() & {*self.live, *self.spares}):
            worker = self.live.pop(pid, None) or self.spares.pop(pid)
            process.kill_group(pid)
            self._note_death(worker, self._early_deaths.pop(pid), dead)
        if not self._starting:
            self._early_deaths.clear()
        return dead

    def look_after_standbys(self) -> None:
        """Kill standbys that are stopped or do not answer; start those that could not be started before. Call at each
        tick. Raises OutOfResources if no process could be started for a worker for ``wait_timeout_s``.
        """
        late = any(time.monotonic() - asked > ANSWER_TIMEOUT_S for asked in self._asked.values())
        for standby in self._standbys:
            if process.state_of(standby.pid) == "T" or (late and standby.outstanding):
                process.kill_group(standby.pid)
        if self._fills:
            self.fill_standbys()
        self._look_at_wait()

    def _look_at_wait(self) -> None:
        """Workers wait for a zygote that imports: tell the user, and after ``wait_timeout_s`` kill that one."""
        if not self._waiting:
            self._wait = None
            return
        if self._wait is None:
            whom = _awaited(self._preload, self._refusals.error)
            who, ends = ranks_text(worker.rank for worker in self._waiting), "another process tries"
            self._wait = Wait(who, whom, self._wait_timeout_s, ends=ends, say=self._say, advice="Another tries.")
        try:
            self._wait.look()
        except WaitTimeout as error:
            if (refused := self._refusals.error) is not None:
                raise OutOfResources(refused.errno, f"no process could be started {what_to_do(refused)}") from error
            self._say(str(error))
            self._wait = None
            for standby in self._standbys:
                if not standby.ready:
                    process.kill_group(standby.pid)

    def _failed_standby(self, standby: Standby, *, by_signal: bool) -> None:
        """A standby has ended. If a signal ended it, that tells nothing about the next one."""
        self._standbys.remove(standby)
        self._unregister(standby.fileno())
        if standby.pidfd is not None:
            self._unregister(standby.pidfd)
        standby.answers()
        standby.close()
        if not standby.ready:
            self._failed_standbys += 1
        failed = [self._starting.pop(token) for token in standby.outstanding if token in self._starting]
        for token in standby.outstanding:
            self._asked.pop(token, None)
        more = self._failed_standbys - GIVE_UP_AFTER
        if more >= 0 and not by_signal:
            self._say(
                "standbys die while they import; continuing without them: replacements start in fresh interpreters"
            )
            self._wanted_standbys = 0
        else:
            if more < 0:
                self._say(f"a standby died (pid {standby.pid}); starting another")
            else:
                self._next_standby = time.monotonic() + min(_LONGEST_PAUSE_S, _PAUSE_S * 2 ** min(more, 10))
            if more == 0:
                self._say(
                    "standbys are killed while they import: replacements start in fresh interpreters until one is "
                    "ready; others are started"
                )
            self.fill_standbys()
        self._waiting += [worker for worker in failed if not worker.cause]

    def _note_death(self, worker: LiveWorker, code: int | None, dead: list[tuple[LiveWorker, int]]) -> None:
        self._release(worker)
        (self._fallen if worker.spare else dead).append((worker, -signal.SIGKILL if code is None else code))

    def _release(self, worker: LiveWorker) -> None:
        if worker.pidfd is not None:
            self._unregister(worker.pidfd)
            os.close(worker.pidfd)
            worker.pidfd = None

    def _register(self, fd: int) -> None:
        self._selector.register(fd, selectors.EVENT_READ, None)

    def _unregister(self, fd: int) -> None:
        with suppress(KeyError, ValueError):
            self._selector.unregister(fd)

    # -- the end ------------------------------------------------------------------------------------------------------

    def signal_all(self, sig: signal.Signals) -> None:
        for pid in list(self.live):
            process.kill_group(pid, sig)

    def close(self) -> None:
        """Kill standbys, workers and every process that was orphaned to the agent, and reap them all."""
        self._wanted_standbys = 0
        if self._early is not None:
            self._early.close()
        for standby in self._standbys:
            self._unregister(standby.fileno())
            if standby.pidfd is not None:
                self._unregister(standby.pidfd)
            standby.close()
        self._standbys.clear()
        self.signal_all(signal.SIGKILL)
        deadline = time.monotonic() + 5.0
        while (left := set(process.children()) - self._foreign) and time.monotonic() < deadline:
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(_REAP_S)  # one that hangs in a file system may not end: it is not waited for
            for pid in left:  # an orphan's own children become the agent's when it is gone: look again
                with suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
        for worker in (*self.live.values(), *self.spares.values()):
            self._release(worker)
        self.live.clear()
        self.spares.clear()


def _awaited(preload: Preload, refused: OSError | None) -> str:
    if refused is not None:
        return "the system to let a process start"
    packages = dict.fromkeys(name.partition(":")[0].partition(".")[0] for name in preload.modules or ("torch",))
    named = [name for name in packages if name not in ("shared_core", "lightning_swift", "accelerate_swift")]
    return f"the imports of the script ({', '.join(named)})"

"""Planned leaves, as the agent of one machine carries them out, of single workers and of all of the machine; and what
tells that the machine will be taken away.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict

from shared_core.config import SwiftConfig
from shared_core.errors import ConfigError
from shared_core.events import console
from shared_core.launcher.attempts import Attempts
from shared_core.launcher.console import host_of
from shared_core.launcher.other_machines import OtherMachines
from shared_core.launcher.wakeup import Wakeup
from shared_core.launcher.workers import LiveWorker
from shared_core.protocol import stragglers
from shared_core.protocol.agent_phase import AgentPhase
from shared_core.protocol.leaving import AGREED, FILE, REFUSED, Leave, chosen, refused
from shared_core.protocol.progress_file import read_steps
from shared_core.protocol.stragglers import Slow, Steps
from shared_core.protocol.worker_messages import LEAVES

#: Start of an option that is a command, and seconds between two runs of it.
RUN, EVERY_S = "run:", 5.0


class Notice:
    """A signal, a file or a command, as the option ``notice`` names it. Comes at most once. Raises ConfigError for a
    signal that there is not.
    """

    def __init__(self, told: str | None, wakeup: Wakeup) -> None:
        self._told, self._wakeup = told or "", wakeup
        self._over, self._noticed = threading.Event(), threading.Event()
        self._come = False
        if self._told.startswith("SIG"):
            if self._told not in signal.Signals.__members__:
                raise ConfigError(f"notice: {self._told} is no signal")
            wakeup.set_apart(signal.Signals[self._told])
        elif self._told.startswith(RUN):
            threading.Thread(target=self._run, name="swift-notice", daemon=True).start()

    def came(self) -> str:
        """What has told so since the last call; empty if nothing has."""
        if self._come or not self._told:
            return ""
        if not self._told.startswith(("SIG", RUN)):
            self._come = os.path.lexists(self._told)
        else:
            self._come = self._wakeup.apart or self._noticed.is_set()
        return f"notice {self._told}" if self._come else ""

    def close(self) -> None:
        self._over.set()

    def _run(self) -> None:
        """Thread: run the command again and again until it succeeds."""
        # The agent reaps all of its children, so the shell says what the status was.
        command = f"({self._told.removeprefix(RUN)}\n) >/dev/null 2>&1 </dev/null; echo $?"
        while not self._over.is_set():
            try:
                with subprocess.Popen(["/bin/sh", "-c", command], stdout=subprocess.PIPE, text=True) as shell:
                    assert shell.stdout is not None
                    if shell.stdout.read().strip() == "0":
                        self._noticed.set()
                        self._wakeup.tell()
                        return
            except OSError:  # no process can be started now
                pass
            self._over.wait(EVERY_S)


class PlannedLeaves:
    """Lets workers leave once others can take their places. ``machines``: None without other machines.

    Attributes:
        machine: why all workers of this machine leave, and the machine with them; empty while it stays.
    """

    def __init__(
        self,
        config: SwiftConfig,
        attempts: Attempts,
        machines: OtherMachines | None,
        notice: Notice,
    ) -> None:
        self._config, self._attempts, self._machines, self._notice = config, attempts, machines, notice
        self._waiting: dict[int, tuple[LiveWorker, str]] = {}
        self.machine = ""

    def look(self) -> None:
        """Answer who asks, and tell workers to leave whose replacements are ready. Never blocks."""
        for target, answer in self._attempts.control.leaves():
            try:
                answer(AGREED, self.ask(target, "asked by swiftctl"))
            except ConfigError as error:
                answer(REFUSED, str(error))
        if self._attempts.phase is not AgentPhase.RUNNING:
            return
        if why := self._notice.came():
            try:
                self._ask(self._attempts.places.machine, None, why)
            except ConfigError as error:
                console(f"{why}: this machine will be taken away, and nobody takes its ranks: {error}")
        spares = self._attempts.workers.spares
        for rank in [rank for rank in self._waiting if spares.settled(rank)]:
            self._tell(*self._waiting.pop(rank))
        for one in self._attempts.workers.pool.live.values() if self.machine else ():
            self._tell(one, self.machine)

    def ask(self, target: str, why: str) -> str:
        """Have a rank, or all ranks of a host, leave. Returns what will be; raises ConfigError where it cannot be."""
        attempts = self._attempts
        if attempts.phase is not AgentPhase.RUNNING or attempts.now.goodbyes():
            raise ConfigError("nobody can leave now: the job starts or ends, or the number of its workers changes")
        machines, places = attempts.now.ledger.machines, attempts.places
        hosts = [host_of(name) if name else "nobody" for name in machines] or [socket.gethostname()]
        place, rank = chosen(target, hosts, places.local)
        self._ask(place, rank, why)
        if rank is None:
            return f"{hosts[place]} leaves: a spare machine takes its ranks at their next step boundary"
        return f"rank {rank} leaves at its next step boundary, once its replacement is ready"

    def _ask(self, place: int, rank: int | None, why: str) -> None:
        attempts, others = self._attempts, self._machines.membership if self._machines is not None else None
        machines = attempts.now.ledger.machines
        name = machines[place] if machines else None
        if why_not := refused(
            self._config,
            rank,
            attempts.now.ledger.present(),
            spares=others.spares(attempts.now.ledger) if others is not None else 0,
            keeps_store=others is not None and others.rendezvous.job_ends_with(name),
        ):
            raise ConfigError(why_not)
        if place != attempts.places.machine:
            attempts.now.tell(place, LEAVES, Leave(why, rank))
        else:
            self._begin(Leave(why, rank))

    def hear(self, leave: Leave) -> None:
        """Another agent was asked for a leave of this machine's."""
        try:
            self._begin(leave)
        except ConfigError as error:
            console(f"nobody leaves: {error}")

    def _begin(self, leave: Leave) -> None:
        if leave.rank is None:
            self.machine = self.machine or leave.why
            console(f"this machine leaves the job at the next step boundary: {leave.why}")
            return
        live = self._attempts.workers.pool.live.values()
        one = next((one for one in live if one.rank == leave.rank), None)
        if one is None:
            raise ConfigError(f"rank {leave.rank} has no worker now: its replacement is under way")
        self._waiting[one.rank] = one, leave.why
        self._attempts.workers.spares.want(one.rank)

    def takes(self, dead: Sequence[tuple[LiveWorker, int]]) -> bool:
        """Whether these deaths are part of the leave of all of this machine. When the first worker has left, the others
        cannot come to a further step boundary without it: they are ended, and the machine's place is given away.
        """
        if not dead or not self.machine or self._machines is None or self._attempts.phase is not AgentPhase.RUNNING:
            return False
        workers = self._attempts.workers
        workers.lose(one.rank for one, _ in dead)
        for one in workers.pool.live.values():
            one.kill(f"drained: {self.machine}")
        if not workers.pool.live and not workers.pool.starting:
            self._machines.look(leaves=self.machine)
        return True

    def _tell(self, one: LiveWorker, why: str) -> None:
        """Does nothing for a worker that has failed meanwhile: its place is taken already."""
        if one.pid in self._attempts.workers.pool.live and not one.leaves:
            one.leave(why, self._attempts.progress_file(one.rank).with_name(FILE))


#: Seconds from one look to the next: each asks the store for the times of every other machine.
LOOK_S = 1.0


class Stragglers:
    """Looks at the times of the last steps, of all machines."""

    def __init__(self, config: SwiftConfig, attempts: Attempts, leaves: PlannedLeaves) -> None:
        self._answer, self._attempts, self._leaves = config.stragglers, attempts, leaves
        #: Of each rank, the pid of its worker and the newest step of the one before; and who was named, or replaced.
        self._workers: dict[int, tuple[int, int]] = {}
        self._named: set[int] = set()
        self._replaced: set[int] = set()
        self._next = 0.0

    def look(self) -> None:
        """Call at each tick; most calls do nothing."""
        attempts = self._attempts
        if self._answer == "off" or attempts.phase is not AgentPhase.RUNNING or not attempts.workers.complete:
            return
        if (now := time.monotonic()) < self._next:
            return
        self._next = now + LOOK_S
        mine = {one.rank: self._steps(one) for one in attempts.workers.pool.live.values()}
        for one in stragglers.slow(attempts.now.with_others(mine), mine.keys() - self._named):
            self._name(one, self._workers[one.rank][0])

    def _steps(self, one: LiveWorker) -> Steps:
        """Those that this worker has made, and not the one that held the rank before."""
        steps = read_steps(self._attempts.progress_file(one.rank))
        pid, before = self._workers.get(one.rank, (one.pid, 0))
        if pid != one.pid:
            before = max(steps, default=0)
            self._named.discard(one.rank)
        self._workers[one.rank] = one.pid, before
        return {number: parts for number, parts in steps.items() if number > before}

    def _name(self, one: Slow, pid: int) -> None:
        self._named.add(one.rank)
        fields = {name: value for name, value in asdict(one).items() if name != "rank"}
        self._attempts.job_reporter.emit("straggler", rank=one.rank, pid=pid, **fields)
        console(f"rank {one.rank} (pid {pid}) is slow: it {one.text}")
        if self._answer != "replace":
            return
        if one.rank in self._replaced:
            console(f"rank {one.rank} is slow again after it was replaced: its machine may be the reason")
            return
        try:
            self._leaves.ask(str(one.rank), f"slow, {one.factor:.1f} times in {one.part}")
        except ConfigError as error:
            console(f"rank {one.rank} is not replaced: {error}")
            return
        self._replaced.add(one.rank)

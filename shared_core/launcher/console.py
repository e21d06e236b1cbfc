"""What the user reads of a job while it runs: one line at its start, one for each recovery, one at its end.

A wait of more than :data:`MAX_WAIT_S` has a line of its own that says what is waited for.
"""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shared_core.config import SwiftConfig
from shared_core.protocol.failure_policy import AS_ANY

#: A longer wait is explained, in seconds.
MAX_WAIT_S = 5.0
#: And explained again after so many seconds.
AGAIN_S = 60.0
#: A line names so many pids at most.
_MOST = 16


@dataclass
class Away:
    """A rank whose worker failed and that is not back yet.

    Attributes:
        detected: when that was noticed, in seconds since the epoch.
        pid: of the failed worker; 0 if it ran on another machine.
        replacement: pid of the worker that takes its place; 0 before there is one.
        begun: when that one was started, in seconds since the epoch.
        behind: the replacement computes again what the others have done since the beginning of the job.
        back: the replacement trains.
        told: the user knows of the failure.
        planned: it did not fail, but left as planned.
    """

    rank: int
    cause: str
    detected: float
    pid: int = 0
    replacement: int = 0
    begun: float = 0.0
    behind: bool = False
    back: bool = False
    told: bool = False
    planned: bool = False

    @property
    def what(self) -> str:
        return "left" if self.planned else "failed"

    @property
    def who(self) -> str:
        return f"pid {self.pid}: {self.cause}" if self.pid else self.cause


@dataclass
class Change:
    """All workers end and others begin.

    Attributes:
        detected: when the failure was noticed, or the change began, in seconds since the epoch.
        whence: text about where they begin, if the agent knows.
        reached: step boundaries that the workers before had passed.
        boundary: step boundary at which they begin, if the agent knows.
        before: number of workers before, if it changes; else 0.
    """

    detected: float
    what: str
    why: str
    whence: str = ""
    reached: int = 0
    boundary: int | None = None
    before: int = 0


class ConsoleReporter:
    """Prints the lines of one agent, with ``say``. ``begun`` and ``clock`` are in seconds since the epoch."""

    def __init__(self, say: Callable[[str], None], begun: float, clock: Callable[[], float] = time.time) -> None:
        self._say, self._begun, self._clock = say, begun, clock
        self._away: dict[int, Away] = {}
        self._change: Change | None = None
        self._failures = 0
        self._started = False
        self._pids: dict[int, int] = {}
        self._next = 0.0
        self._events: str | None = None

    # -- the start ----------------------------------------------------------------------------------------------------

    def starts(
        self,
        script: str,
        workers: int,
        pids: Mapping[int, int],
        config: SwiftConfig,
        events: str | None,
        machines: Sequence[str] = (),
        note: str = "",
    ) -> None:
        """The first workers run; only the first call prints. ``workers`` counts those of all machines; ``pids`` are
        this machine's, by rank; ``machines`` is empty for a single one.
        """
        self._pids, self._events = dict(pids), events
        if self._started:
            return
        self._started = True
        many = "1 worker runs" if workers == 1 else f"{workers} workers run"
        where = f" on {listed(machines)}" if machines else ""
        here = f"here {ranks(sorted(pids))}, {_named(pids)}" if machines else _named(pids)
        self._say(
            f"{many} {script}{where} ({here}); {_answer(config, workers)}; "
            f"events: {_short(events)}; checkpoints: {_short(config.checkpoint.dir)}" + (f"; {note}" if note else "")
        )

    def checkpoints(self, folder: str | None) -> None:
        """The script, not the launcher, has set where checkpoints go."""
        self._say(f"checkpoints: {_short(folder)}, as the script says")

    # -- failures -----------------------------------------------------------------------------------------------------

    def counts(self, failed: int) -> None:
        self._failures += failed

    def failed(
        self,
        rank: int,
        cause: str,
        detected: float,
        pid: int = 0,
        *,
        continues: bool = False,
        planned: bool = False,
    ) -> None:
        """A worker of this machine failed, or left as ``planned``; or this machine takes a rank over from another, with
        ``pid`` 0. ``detected`` is in seconds since the epoch. ``continues``: the others do not wait for its
        replacement.
        """
        self._failures += bool(pid) and not planned
        before = self._away.get(rank)
        since = detected if before is None or before.back else before.detected
        self._away[rank] = away = Away(rank, cause, since, pid, planned=planned)
        self._pids.pop(rank, None)
        if continues:
            away.told = True
            self._say(f"rank {rank} {away.what} ({away.who}); the others compute its share until it is back")
        if len(self._away) == 1:
            self._next = 0.0

    def replacement(self, rank: int, pid: int) -> None:
        self._pids[rank] = pid
        if rank in self._away:
            self._away[rank].replacement, self._away[rank].begun = pid, self._clock()

    def forget(self, absent: Iterable[int]) -> None:
        for rank in absent:
            self._away.pop(rank, None)

    def changes(self, change: Change, *, tell: bool = True) -> None:
        """All workers end and others begin, because of the failures so far. ``tell``: this agent prints it."""
        if self._change is not None:  # the change before was not complete
            change.detected = min(change.detected, self._change.detected)
            change.reached = max(change.reached, self._change.reached)
            change.before = self._change.before or change.before
            change.why = "; ".join(filter(None, [self._change.why, change.why]))
        failed = sorted(self._away.values(), key=lambda away: away.rank)
        if failed:
            change.detected = min(change.detected, *(away.detected for away in failed))
            who = "; ".join(f"rank {away.rank}, {away.who}" for away in failed)
            change.why = "; ".join(filter(None, [change.why, who]))
        self._away.clear()
        self._pids.clear()
        self._change = change if tell else None
        self._next = 0.0

    def report(self, said: Mapping[str, Any]) -> tuple[float, int, int | None] | None:
        """A worker reports that it trains: see :class:`~shared_core.worker.recovery.reporting.RecoveryReporter`. If
        this ends a :class:`Change`: the stall in seconds, steps lost, and the step boundary at which the workers began.
        """
        rank, when, whence = int(said["rank"]), float(said["time"]), str(said.get("whence", ""))
        done = None
        if said.get("behind"):
            if rank in self._away and said.get("pid") == self._away[rank].replacement:
                self._away[rank].behind = True
            return None
        if rank == 0 and (change := self._change) is not None:
            self._change = None
            boundary = said.get("boundary", change.boundary)
            lost = max(0, change.reached - max(1, int(boundary or 1)))
            if whence:
                whence = f": the job continues from {whence}"
            elif change.whence:
                whence = f", {change.whence}"
            there_were = f"there {'was' if change.before == 1 else 'were'} {change.before}" if change.before else ""
            self._say(
                f"{change.what} after {when - change.detected:.2f} s{whence}; {count(lost, 'step')} lost "
                f"({'; '.join(filter(None, [there_were, change.why, f'now {_named(self._pids)}']))})"
            )
            done = (when - change.detected, lost, boundary)
        elif rank == 0 and whence and rank not in self._away:
            self._say(f"the job continues from {whence}")
        if rank in self._away and said.get("pid") in (
            None,
            self._away[rank].replacement,
        ):  # not of one that failed since
            self._away[rank].back = True
            if all(away.back for away in self._away.values()):
                self._all_back(when, f": it continues from {whence}" if whence else "")
        return done

    def _all_back(self, when: float, whence: str = "") -> None:
        back = sorted(self._away.values(), key=lambda away: away.rank)
        self._away.clear()
        stall = when - min(away.detected for away in back)
        each = []
        for away in back:
            new = f"now pid {away.replacement}" if away.replacement else ""
            each.append("; ".join(filter(None, ("" if away.told else away.who, new))))
        if len(back) > 1:
            each = [f"rank {away.rank}, {one}" for away, one in zip(back, each, strict=True)]
        verb = "is" if len(back) == 1 else "are"
        if all(away.planned for away in back):
            verb = f"left as planned and {verb}"
        named = ranks([away.rank for away in back])
        self._say(f"{named} {verb} back after {stall:.2f} s{whence}; 0 steps lost ({'; '.join(each)})")

    @property
    def quiet(self) -> bool:
        return not self._away and self._change is None

    # -- waits --------------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Print what is waited for, if that takes long. Call at each tick."""
        waiting, now = self._waiting(), self._clock()
        if waiting is None or now < max(waiting[1] + MAX_WAIT_S, self._next):
            return
        self._next = now + AGAIN_S
        self._say(f"waiting for {now - waiting[1]:.0f} s now: {waiting[0]}")

    def _waiting(self) -> tuple[str, float] | None:
        away = [one for one in self._away.values() if not one.back]
        if self._change is not None:
            why = f" ({self._change.why})" if self._change.why else ""
            return f"all workers start again{why}", self._change.detected
        if away:
            return "; ".join(map(self._whereabouts, away)), min(one.detected for one in away)
        return None

    def _whereabouts(self, one: Away) -> str:
        failed = f"rank {one.rank} {one.what} ({one.who}), and its replacement"
        if not one.replacement:
            return f"{failed} is not started yet"
        if one.behind:
            return f"{failed} (pid {one.replacement}) computes all batches since the beginning of the job again"
        runs = f"has been running the script up to the training loop for {self._clock() - one.begun:.0f} s"
        return f"{failed} (pid {one.replacement}) {runs}"

    # -- the end ------------------------------------------------------------------------------------------------------

    def succeeds(self, workers: int) -> None:
        if self._change is not None:
            self._say(f"all workers were started again ({self._change.why})")
            self._change = None
        if self._away:
            self._all_back(self._clock())
        failed = {0: "no worker failed", 1: "1 worker failed"}.get(self._failures, f"{self._failures} workers failed")
        took, many = self._clock() - self._begun, count(workers, "worker")
        self._say(f"done after {took:.1f} s with start-up, on {many}; {failed}{self._report_command()}")

    def fails(self, reason: str) -> None:
        for away in self._away.values():
            if not reason.endswith(AS_ANY):  # then the error is printed, and it was no accident of one worker
                self._say(f"rank {away.rank} {away.what} ({away.who})")
        self._away.clear()
        if self._change is not None:
            self._say(f"all workers were started again ({self._change.why})")
        more = "" if reason.endswith(AS_ANY) else self._report_command()
        self._say(f"the job failed after {self._clock() - self._begun:.1f} s: {reason}{more}")

    def _report_command(self) -> str:
        """How to see more; nothing where no events are written."""
        return f"; report: swiftctl report {shlex.quote(_short(self._events))}" if self._events is not None else ""


def _named(pids: Mapping[int, int]) -> str:
    """``pids`` are by rank."""
    named = [str(pids[rank]) for rank in sorted(pids)]
    if len(named) > _MOST:
        named = [*named[: _MOST - 1], f"... {named[-1]}"]
    return f"{'pid' if len(pids) == 1 else 'pids'} {', '.join(named)}"


def ranks(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    if len(numbers) > 2 and list(numbers) == list(range(numbers[0], numbers[-1] + 1)):
        return f"ranks {numbers[0]} to {numbers[-1]}"
    return f"ranks {listed([str(number) for number in numbers])}"


def listed(words: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def host_of(machine: str) -> str:
    """``node2 (10.0.0.2)`` for the name of a machine; see :class:`Rendezvous`."""
    place, _, mark = machine.partition("#")
    host, address = mark.rpartition(".")[0], place.rpartition(":")[0]
    return f"{host} ({address})" if host and host != address else address


def _answer(config: SwiftConfig, workers: int) -> str:
    """What is done about a failed worker."""
    if workers == 1:
        if config.checkpoint.dir:
            return "no replica: a crash restarts from the newest checkpoint"
        return "no replica: a crash restarts from scratch; set --checkpoint-dir"
    if config.restarts:
        return "if one fails, all start again" + (" from the newest checkpoint" if config.checkpoint.dir else "")
    if config.shrinks:
        return "if one fails, the others continue without it"
    if config.reroutes:
        return "if one fails, the others compute its share until it is replaced"
    return "a failed one is replaced where what it trains is attached"


def _short(path: str | None) -> str:
    if path is None:
        return "none"
    here = os.path.join(os.getcwd(), "")
    return path.removeprefix(here) if path != here else path

"""Who holds each rank of a job, and who failed, as its events tell it: folds over events, one after the other."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from shared_core.events import Event


class RankPhase(StrEnum):
    """What a worker does. ``waiting``: it has been in one collective for long; ``stalled``: it waits for a replacement;
    ``drained``: it left as planned; ``joining``: it is the replacement; ``gone``: it ended, and its launcher has not
    said so; ``elsewhere``: it runs on another machine, and what it does is not seen here.
    """

    STARTING = "starting"
    TRAINING = "training"
    WAITING = "waiting"
    STALLED = "stalled"
    FAILED = "failed"
    DRAINED = "drained"
    JOINING = "joining"
    STOPPED = "stopped"
    GONE = "gone"
    ELSEWHERE = "elsewhere"
    DONE = "done"


_AWAY = (RankPhase.FAILED, RankPhase.DRAINED)


@dataclass
class HeldRank:
    """A rank.

    Attributes:
        pid: of its worker; None where nobody holds the rank.
        agent: pid of that machine's launcher; 0 if it was not said.
        slow: in words, what was said of a slow worker; empty of others.
    """

    phase: RankPhase
    pid: int | None
    host: str = ""
    agent: int = 0
    failures: int = 0
    slow: str = ""


class Ranks:
    """Who holds each rank now."""

    def __init__(self) -> None:
        self.held: dict[int, HeldRank] = {}
        self.seen: set[int] = set()
        self.world_size = self.generation = 0
        self._failures: dict[int, int] = {}

    def take(self, event: Event) -> None:
        said, one = event.fields, self.held.get(event.rank)
        self.generation = max(self.generation, event.generation)
        if event.kind == "start":
            self._start(said)
        elif event.kind in ("restart", "resize"):
            self._failures = {rank: held.failures for rank, held in self.held.items()}
            self.held.clear()
            self.generation = 0
            self.world_size = _pid(said.get("workers")) or self.world_size
        elif event.kind == "generation" and (said.get("failed") or said.get("stay")):
            for rank, held in self.held.items():
                if rank not in said.get("failed", []) and held.phase in (RankPhase.TRAINING, RankPhase.STARTING):
                    held.phase = RankPhase.STALLED
        elif one is None:
            return
        elif event.kind == "failed":
            one.phase, one.pid, one.failures = RankPhase.FAILED, None, one.failures + 1
        elif event.kind == "drained":
            one.phase, one.pid = RankPhase.DRAINED, None
        elif event.kind == "straggler":
            one.slow = f"{_times(said.get('factor'))} in {_word(said.get('part'))}"
        elif event.kind == "replacement_start":
            one.slow = ""
            one.phase, one.pid = RankPhase.JOINING, _pid(said.get("pid"))
            one.host, one.agent = _word(said.get("host")), _pid(said.get("agent")) or one.agent
        elif event.kind in ("replacement_ready", "recovered", "resumed") and one.phase not in _AWAY:
            one.phase = RankPhase.TRAINING

    def _start(self, said: dict[str, Any]) -> None:
        """One machine's workers run, in the first generation of an attempt."""
        self.world_size = _pid(said.get("world_size")) or self.world_size
        for rank, pid in _pids(said).items():
            failures = self.held[rank].failures if rank in self.held else self._failures.get(rank, 0)
            agent = _pid(said.get("agent")) or 0
            self.held[rank] = HeldRank(RankPhase.STARTING, pid, _word(said.get("host")), agent, failures)
            self.seen.add(rank)


@dataclass
class SeenFailure:
    """A failure; times in seconds since the epoch.

    Attributes:
        cause: in words.
        last_words: the end of its traceback or log; empty if nobody has them.
        closed: when it was over otherwise: the replacement failed too, or the number of workers changed.
    """

    rank: int
    detected: float
    cause: str
    pid: int | None
    last_words: str = ""
    replacement: int | None = None
    started: float | None = None
    joined: float | None = None
    closed: float | None = None


class SeenFailures:
    """All failures of a job. ``all``: in order of time."""

    def __init__(self) -> None:
        self.all: list[SeenFailure] = []
        self._open: dict[int, SeenFailure] = {}

    def take(self, event: Event) -> None:
        said, rank = event.fields, event.rank
        if event.kind in ("failed", "drained"):
            self._close(rank, event.time)
            cause = str(said.get("cause", ""))
            detected, words = float(said.get("detected", event.time)), _word(said.get("last_words"))
            one = SeenFailure(rank, detected, cause, _pid(said.get("pid")), words)
            self.all.append(one)
            self._open[rank] = one
        elif event.kind == "start":
            for each, pid in _pids(said).items():
                self._started(each, pid, event.time)
                self._joined(each, event.time)
        elif event.kind == "replacement_start":
            self._started(rank, said.get("pid"), event.time)
        elif event.kind == "replacement_ready":
            self._joined(rank, event.time)
        elif event.kind == "resize":  # ranks are others now
            for other in list(self._open):
                self._close(other, event.time)

    def _started(self, rank: int, pid: Any, when: float) -> None:
        if rank in self._open:
            self._open[rank].replacement, self._open[rank].started = _pid(pid), when

    def _joined(self, rank: int, when: float) -> None:
        if rank in self._open:
            self._open.pop(rank).joined = when

    def _close(self, rank: int, when: float) -> None:
        if rank in self._open:
            self._open.pop(rank).closed = when


def _pids(said: dict[str, Any]) -> dict[int, int | None]:
    """Pids by rank, of a ``start``."""
    pids = said.get("pids")
    named = pids.items() if isinstance(pids, dict) else ()
    return {int(rank): _pid(pid) for rank, pid in named if re.fullmatch(r"[0-9]{1,9}", rank)}


def _pid(value: Any) -> int | None:
    return value if type(value) is int and value > 0 else None


def _times(value: Any) -> str:
    return f"{value:.1f} times" if type(value) is float else "slow"


def _word(value: Any) -> str:
    return value if isinstance(value, str) else ""

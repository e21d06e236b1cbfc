"""What each rank does at each time, from events: a pure function of plain data."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from shared_core.events import Event
from shared_core.plain_json import is_count
from shared_core.report.timeline import Recovery

#: More workers than any job has; what a line with a larger number says of it is left out.
_MOST_WORKERS = 4096


class Doing(Enum):
    """What a rank does; the value is for a reader."""

    STARTING = "starting"
    TRAINING = "training"
    WAITING = "waiting"
    FAILED = "failed"
    CATCHING_UP = "catching up"


@dataclass(frozen=True)
class LifeSpan:
    """What a rank does for some time.

    Attributes:
        begin: in seconds since the run began.
        end: in seconds since the run began.
    """

    rank: int
    doing: Doing
    begin: float
    end: float
    note: str = ""


@dataclass(frozen=True)
class _Change:
    """From a time on, a rank does something else; with ``instead_of`` only if it did one of those. A change to nothing
    ends its life."""

    time: float
    rank: int
    doing: Doing | None
    note: str = ""
    instead_of: Collection[Doing] | None = None


#: Kinds of events that come when training has begun.
_AFTER_IT = frozenset({"preparing", "checkpoint", "survivor_ready"})
_HELD_UP = (Doing.STARTING, Doing.WAITING, Doing.CATCHING_UP)


def spans(events: Sequence[Event], found: Iterable[Recovery]) -> list[LifeSpan]:
    """What each rank does, in order of ranks and times. ``events``: of one run; not empty."""
    began, last = min(event.time for event in events), max(event.time for event in events)
    changes = [*_of_events(events), *_ends_of(found)]
    lives: dict[int, list[_Change]] = {}
    for change in sorted(changes, key=lambda change: change.time):
        life = lives.get(change.rank)
        now = life[-1].doing if life else None
        if change.doing is not now and (change.instead_of is None or now in change.instead_of):
            lives.setdefault(change.rank, []).append(change)
    return [
        LifeSpan(rank, one.doing, one.time - began, end - began, one.note)
        for rank, life in sorted(lives.items())
        for one, end in zip(life, [*(other.time for other in life[1:]), last], strict=True)
        if one.doing is not None and end > one.time
    ]


def _of_events(events: Sequence[Event]) -> Iterator[_Change]:
    """Changes that single events tell, in the order of their file."""
    ranks: Sequence[int] = range(0)
    attempt = -1
    if not any(event.kind == "start" for event in events):  # the beginning of the file is lost
        ranks = sorted({event.rank for event in events if event.rank >= 0})
        yield from (_Change(events[0].time, rank, Doing.TRAINING) for rank in ranks)
    # Nobody says when training begins where the first worker of rank 0 fails before.
    unsaid = not any(event.kind == "began" for event in events) and any(event.kind in _AFTER_IT for event in events)
    for event in events:
        at, rank, said = event.time, event.rank, event.fields
        if event.kind == "start" and is_count(said.get("world_size")) and said["world_size"] <= _MOST_WORKERS:
            now = said["restart"] if is_count(said.get("restart")) else 0
            if now == attempt:
                continue  # another machine of the same attempt
            attempt = now
            gone = set(ranks) - set(range(said["world_size"]))
            ranks = range(said["world_size"])
            yield from (_Change(at, each, None) for each in gone)
            doing = Doing.TRAINING if unsaid and attempt == 0 else Doing.STARTING
            yield from (_Change(at, each, doing) for each in ranks)
        elif event.kind == "began":  # the first batch of a restart belongs to its recovery
            doing = Doing.CATCHING_UP if attempt > 0 else Doing.TRAINING
            yield from (_Change(at, each, doing, "", (Doing.STARTING,)) for each in ranks)
        elif event.kind in ("restart", "resize"):
            note = "all workers start again" if event.kind == "restart" else "the number of workers changes"
            stay = said["workers"] if is_count(said.get("workers")) else len(ranks)
            yield from (_Change(at, each, Doing.STARTING if each < stay else None, note) for each in ranks)
        elif event.kind in ("failed", "drained"):
            yield _Change(float(said.get("detected", at)), rank, Doing.FAILED, str(said.get("cause", "")))
        elif event.kind == "replacement_start":
            yield _Change(at, rank, Doing.STARTING, "replacement")
        elif event.kind == "replacement_ready":
            yield _Change(at, rank, Doing.CATCHING_UP, "replacement", (Doing.STARTING, Doing.FAILED))
        elif event.kind == "survivor_ready":
            training = (Doing.TRAINING, Doing.CATCHING_UP)
            yield _Change(float(said.get("detected", at)), rank, Doing.WAITING, "", training)
        elif event.kind == "recovered":
            yield _Change(at, rank, Doing.CATCHING_UP, "", (Doing.WAITING,))
        elif event.kind == "resumed" and "boundary" in said:  # the agent's: after a restart, and for all
            yield from (_Change(at, each, Doing.TRAINING, "", _HELD_UP) for each in ranks)
        elif event.kind == "resumed":
            yield _Change(at, rank, Doing.TRAINING, "", _HELD_UP)
        elif event.kind == "admitted":
            since = at - float(said.get("stall_s", 0.0))
            yield from (
                _Change(since, each, Doing.WAITING, "a replacement is admitted", (Doing.TRAINING,)) for each in ranks
            )
            yield from (_Change(at, each, Doing.TRAINING, "", (Doing.WAITING,)) for each in ranks)
            yield _Change(at, rank, Doing.TRAINING)


def _ends_of(found: Iterable[Recovery]) -> Iterator[_Change]:
    """Replacements say when they have joined; when they train is when the others do."""
    for one in found:
        stall_s = one.longest_stall_s
        for rank, ready_s in one.replacement_ready_s.items():
            if one.answer == "reroute":
                yield _Change(one.detected + ready_s, rank, Doing.TRAINING, "", _HELD_UP)
            elif stall_s is not None:
                yield _Change(one.detected + max(stall_s, ready_s), rank, Doing.TRAINING, "", _HELD_UP)

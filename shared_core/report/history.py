"""The history of one run of a job: what each rank did when, what failed and how it was answered."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from shared_core.events import Event
from shared_core.plain_json import is_count
from shared_core.report.timeline import Recovery, recoveries

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


class PartKind(Enum):
    """What a recovery waits for in one of its parts; the value is for a reader."""

    DETECTION = "detection"
    END = "workers end"
    PROCESS = "new process"
    SCRIPT = "start of the script"
    AGREEMENT = "agreement"
    STATE = "state and logs"
    BATCH = "batch again"
    ADMITTING = "replacement admitted"


@dataclass(frozen=True)
class RecoveryPart:
    """One part. ``begin``: in seconds from the detection of the failure; negative before it."""

    kind: PartKind
    begin: float
    seconds: float

    @property
    def end(self) -> float:
        """In seconds from the detection of the failure."""
        return self.begin + self.seconds


def parts(one: Recovery, limit_s: float | None = None) -> list[RecoveryPart]:
    """The parts of a recovery in order, as far as events say where they end. Each begins where the one before ends, but
    for the admitting of replacements, for which those that continued stand still once more. ``limit_s``: no part
    continues for longer, in seconds from the detection; for one that another failure has ended.
    """
    found: list[RecoveryPart] = []
    struck = [failure.struck for failure in one.failures if failure.struck is not None]
    at = min(0.0, min(struck) - one.detected) if struck else 0.0
    most = float("inf") if limit_s is None else limit_s
    for kind, end in _ends(one):
        if end is not None and min(end, most) > at:
            found.append(RecoveryPart(kind, at, min(end, most) - at))
            at = min(end, most)
    for rank, admitted in sorted(one.admitted_s.items(), key=lambda entry: entry[1]):
        begin = max(at, admitted - one.admitted_stall_s.get(rank, 0.0))
        if min(admitted, most) > begin:
            found.append(RecoveryPart(PartKind.ADMITTING, begin, min(admitted, most) - begin))
            at = min(admitted, most)
    return found


def _ends(one: Recovery) -> list[tuple[PartKind, float | None]]:
    """Where parts end, in seconds from the detection; None where nobody said so."""
    last = one.longest_stall_s
    struck = any(failure.struck is not None for failure in one.failures)
    detected = 0.0 if struck else None
    if one.ended_s is not None:
        return [
            (PartKind.DETECTION, detected),
            (PartKind.END, one.ended_s),
            (PartKind.PROCESS, one.started_s),
            (PartKind.SCRIPT, one.began_s),
            (PartKind.BATCH, last),
        ]
    if one.answer == "reroute":  # nobody waits for the replacement
        return [
            (PartKind.DETECTION, detected),
            (PartKind.AGREEMENT, one.slowest_survivor_ready_s),
            (PartKind.BATCH, last),
        ]
    joins = [
        start + one.user_start_s[rank] for rank, start in one.replacement_start_s.items() if rank in one.user_start_s
    ]
    formed = max(one.formed_s.values(), default=None)
    moved = [one.formed_s[rank] - took for rank, took in one.exchange_s.items() if rank in one.formed_s]
    return [
        (PartKind.DETECTION, detected),
        (PartKind.PROCESS, max(one.replacement_start_s.values(), default=None)),
        (PartKind.SCRIPT, max(joins, default=None)),
        (PartKind.AGREEMENT, max(moved, default=None)),
        (PartKind.STATE, max([*one.replacement_ready_s.values(), *([] if formed is None else [formed])], default=None)),
        (PartKind.BATCH, last),
    ]


#: Fields of the ``start`` event that say in what a job runs, in the order of reports.
FACTS = ("script", "on_failure", "host", "cpus", "python", "torch", "swift-recovery", "standbys", "job_dir", "run_id")


@dataclass(frozen=True)
class EventMark:
    """Something that happened at one time.

    Attributes:
        at: in seconds since the run began.
        rank: whom it concerns, -1 for all.
        boundary: step boundary; None where it is unknown or says nothing.
    """

    at: float
    what: str
    rank: int = -1
    boundary: int | None = None


@dataclass(frozen=True)
class Answer:
    """A recovery, restart or change of the number of workers, with its place in the run.

    Attributes:
        at: when its first failure was noticed, in seconds since the run began.
        parts: of it, in seconds from then.
    """

    recovery: Recovery
    at: float
    parts: tuple[RecoveryPart, ...]


@dataclass(frozen=True)
class History:
    """What happened in one run of a job; times are in seconds since it began.

    Attributes:
        began: in seconds since the epoch.
        result: how it ended, in words; empty where no event says that it has.
        workers: their number, from each time on at which it changed.
        machines: names of the machines that say so, in order.
        spans: what each rank did, in order of ranks and times.
        answers: to failures, and changes of the number of workers, in the order in which they began.
        turns: restarts of all workers and changes of their number.
        checkpoints: that were completed; ``at`` is when.
        begins: when rank 0 came to its first batch, of each start of all workers; ``boundary`` is the step boundary
            that they began from, ``what`` the checkpoint, if it is one.
        facts: what the job ran on: pairs of a name and a text.
        startup_s: how long the first workers took, from when all of them ran to the first batch; None where it was not
            said.
        step_s: mean time of a step while nothing is lost; None where it cannot be told from the events.
    """

    run: str
    began: float
    duration_s: float
    result: str
    workers: tuple[tuple[float, int], ...]
    machines: tuple[str, ...]
    spans: tuple[LifeSpan, ...]
    answers: tuple[Answer, ...]
    failures: tuple[EventMark, ...]
    turns: tuple[EventMark, ...]
    checkpoints: tuple[EventMark, ...]
    begins: tuple[EventMark, ...]
    warnings: tuple[EventMark, ...]
    facts: tuple[tuple[str, str], ...]
    startup_s: float | None
    step_s: float | None
    measured_steps: int

    @property
    def ranks(self) -> list[int]:
        return sorted({span.rank for span in self.spans})


def history_of(events: Sequence[Event]) -> History:
    """The history of a run, from its events in the order of their file; see :func:`shared_core.events.by_run`.

    Whatever was not said, because its writer was killed, is left out. Raises ValueError if there are no events.
    """
    if not events:
        raise ValueError("there are no events")
    began = min(event.time for event in events)
    last = max(event.time for event in events)
    found = recoveries(events)
    failed = [each for each in events if each.kind == "failed"]
    starts = [event for event in events if event.kind == "start"]
    ends = [str(event.fields.get("result", "ended")) for event in events if event.kind == "end"]
    begun = next((event for event in events if event.kind == "began"), None)
    startup_s = begun.time - starts[0].time if starts and begun is not None and begun.time >= starts[0].time else None
    seconds, steps = pace(events, found)

    def marks(kind: str, what: str) -> tuple[EventMark, ...]:
        chosen = [each for each in events if each.kind == kind]
        return tuple(
            EventMark(e.time - began, str(e.fields.get(what, "")), e.rank, whole(e.fields, "boundary")) for e in chosen
        )

    return History(
        run=events[0].run,
        began=began,
        duration_s=last - began,
        result=next((result for result in ends if result != "succeeded"), ends[0] if ends else ""),
        workers=_workers(starts, began),
        machines=tuple(dict.fromkeys(str(each.fields["host"]) for each in starts if "host" in each.fields)),
        spans=tuple(spans(events, found)),
        answers=tuple(_answers(found, began)),
        failures=tuple(
            EventMark(
                float(each.fields.get("detected", each.time)) - began,
                str(each.fields.get("cause") or "failed"),
                each.rank,
                whole(each.fields, "boundaries"),
            )
            for each in failed
        ),
        turns=tuple(
            EventMark(each.time - began, _turn(each), boundary=whole(each.fields, "boundary"))
            for each in events
            if each.kind in ("restart", "resize")
        ),
        checkpoints=marks("checkpoint", "whence"),
        begins=marks("began", "whence"),
        warnings=marks("warning", "message"),
        facts=tuple(
            (name, str(starts[0].fields[name])) for name in FACTS if starts and starts[0].fields.get(name) is not None
        ),
        startup_s=startup_s,
        step_s=seconds / steps if steps else None,
        measured_steps=steps,
    )


def outages(answers: Sequence[Answer]) -> list[list[Answer]]:
    """Completed answers, each after those that it superseded: what a person would call one outage."""
    found: list[list[Answer]] = []
    under_way: list[Answer] = []
    for one in answers:
        under_way.append(one)
        if one.recovery.superseded_by is None:
            if one.recovery.complete:
                found.append(under_way)
            under_way = []
    return found


def stall_s(outage: Sequence[Answer]) -> float:
    """For how long workers stood still, in seconds: until all continued and, where they continued without a
    replacement, for its entry later.
    """
    last = outage[-1].recovery
    until = outage[-1].at - outage[0].at + (last.longest_stall_s or 0.0)
    return until + max(last.admitted_stall_s.values(), default=0.0)


def goodput(found: History) -> float | None:
    """Share of the time since the first batch in which the job got further: not where workers waited for a recovery,
    and not where steps were made again. None where no event says when the first batch was.
    """
    first = min((mark.at for mark in found.begins), default=None)
    if first is None or found.duration_s <= first:
        return None
    lost = sum(map(stall_s, outages(found.answers)))
    lost += sum(one.recovery.recomputed_steps for one in found.answers) * (found.step_s or 0.0)
    return max(0.0, 1.0 - lost / (found.duration_s - first))


def whole(said: Mapping[str, Any], name: str) -> int | None:
    """A field that is a whole number of at least 0; None if it is not there or anything else."""
    value = said.get(name)
    return value if is_count(value) else None


def pace(events: Sequence[Event], found: Sequence[Recovery]) -> tuple[float, int]:
    """Seconds and number of the steps that were made while nothing was lost and whose times events tell.

    Such a stretch begins where a recovery ends, and the first one where training begins; it ends with the next failure.
    That after the last failure does not count: nobody says when its last step was made.
    """
    begins = [
        (one.detected + stall, one.boundary + 1)
        for one in found
        if (stall := one.longest_stall_s) is not None and one.boundary is not None and one.resolution != "replay"
        if one.answer != "reroute"
    ]
    first = next((event for event in events if event.kind == "began"), None)
    if first is not None and (boundary := whole(first.fields, "boundary")) is not None:
        # A checkpoint's batch is under way then; from the beginning, the first one is.
        begins.append((first.time, boundary if first.fields.get("whence") else boundary + 1))
    ends = [
        (float(each.fields.get("detected", each.time)), whole(each.fields, "boundaries"))
        for each in events
        if each.kind in ("failed", "drained")
    ] + [(each.time, None) for each in events if each.kind in ("restart", "resize")]
    ends.sort(key=lambda end: end[0])
    seconds, steps = 0.0, 0
    for at, boundary in begins:
        end = next((end for end in ends if end[0] >= at), None)
        if end is not None and end[1] is not None and end[1] > boundary:
            seconds, steps = seconds + end[0] - at, steps + end[1] - boundary
    return seconds, steps


def _answers(found: Sequence[Recovery], began: float) -> list[Answer]:
    """Each recovery with its parts; what another failure has ended has none after that."""
    placed = []
    for place, one in enumerate(found):
        limit_s = None
        if one.superseded_by is not None and place + 1 < len(found):
            limit_s = max(0.0, found[place + 1].detected - one.detected)
        placed.append(Answer(one, one.detected - began, tuple(parts(one, limit_s))))
    return placed


def _workers(starts: Sequence[Event], began: float) -> tuple[tuple[float, int], ...]:
    found: list[tuple[float, int]] = []
    for event in starts:
        count = whole(event.fields, "world_size")
        if count and (not found or found[-1][1] != count):
            found.append((event.time - began, count))
    return tuple(found)


def _turn(event: Event) -> str:
    if event.kind == "restart":
        return f"all workers start again: {event.fields.get('reason', '')}".rstrip(": ")
    return f"{event.fields.get('before', '?')} to {event.fields.get('workers', '?')} workers"

"""What there is to see of a job: a pure function of its events and of what one look at this machine has found."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from shared_core.events import Event
from shared_core.protocol.progress_file import Pace
from shared_core.report.timeline import Recovery, recoveries
from shared_core.system.jobdir import Card


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


#: A worker that has been in one collective for longer is shown as waiting, in seconds.
WAITS_S = 2.0
#: Most failures, bars of the timeline and warnings that a view holds: the newest.
MOST_FAILURES, MOST_SPANS, MOST_WARNINGS = 200, 600, 5
#: Most checkpoints among the bars.
MOST_MARKS = 100
#: Kind of the cause of a worker that has left as planned, and so has not failed.
DRAINED = "drained"
_CAUSES = (
    (r"^drained|^machine .* leaves", DRAINED),
    (r"\(at .*\)$", "exception"),
    (r"^killed by (SIG\w+)", r"\1"),
    (r"^exited with code", "exit"),
    (r"^stopped", "stopped"),
    (r"^no progress", "no progress"),
    (r"^corruption", "corruption"),
    (r"machine", "machine"),
)


@dataclass(frozen=True)
class Live:
    """What one look at this machine has found.

    Attributes:
        now: seconds since the epoch.
        card: of the job; None for one that does not run here.
        states: of processes of this machine, by pid, as in ``/proc/PID/stat``; None for one that is gone.
        usage: of processes of this machine, by pid: cores in use, None before there are two looks; bytes of memory.
        series: time, steps a second and training loss, as they were seen since somebody watches; None where unknown.
    """

    now: float
    alive: bool = False
    card: Card | None = None
    paces: Mapping[int, Pace] = field(default_factory=dict)
    states: Mapping[int, str | None] = field(default_factory=dict)
    disk_bytes: int = 0
    usage: Mapping[int, tuple[float | None, int]] = field(default_factory=dict)
    series: Sequence[tuple[float, float | None, float | None]] = ()


@dataclass(frozen=True)
class WorkerView:
    """One rank.

    Attributes:
        phase: a value of :class:`~shared_core.watch.view.RankPhase`.
        pid: of its worker; None where nobody holds the rank.
        host: machine of the worker; empty if it was not said.
        here: it is a worker of this machine, so step, pace and log are known.
        step: batches begun.
        cores: of the processor in use; None if unknown.
        memory_bytes: that its process holds; None if unknown.
        slow: how many times as long as the others it computes, and in which part of a step; empty where it is not slow.
    """

    rank: int
    phase: str
    pid: int | None = None
    host: str = ""
    here: bool = False
    step: int | None = None
    steps_per_s: float | None = None
    log_bytes: int | None = None
    failures: int = 0
    cores: float | None = None
    memory_bytes: int | None = None
    slow: str = ""


@dataclass(frozen=True)
class FailureView:
    """A worker that failed, or left as planned.

    Attributes:
        time: when that was noticed, in seconds since the epoch.
        cause: in words.
        kind: of the cause, one of few words: ``drained`` where the worker left as planned, a signal's name, ``exit``,
            ``exception``, ``machine``, ``stopped``, ``no progress``, ``corruption``, ``other``.
        pid: of the failed worker; None if it was not said.
        replacement: pid of the worker that took its place; None if there is none yet.
        back_s: seconds until the replacement had joined; None if it has not.
        stall_s: longest stall of another worker for it, in seconds; None while it lasts.
        last_words: the end of its traceback, or of its log; empty if nobody has them.
    """

    rank: int
    time: float
    cause: str
    kind: str
    pid: int | None = None
    replacement: int | None = None
    back_s: float | None = None
    stall_s: float | None = None
    last_words: str = ""


@dataclass(frozen=True)
class ViewSpan:
    """A bar in the lane of a rank.

    Attributes:
        rank: whose; -1 for all.
        what: ``failed``, ``joining``, ``stalled``, ``restart`` or ``checkpoint``.
        begin: seconds since the epoch.
        end: the same; None while it lasts.
    """

    rank: int
    what: str
    begin: float
    end: float | None
    text: str


@dataclass(frozen=True)
class CheckpointView:
    """The newest checkpoint.

    Attributes:
        time: when it was committed, in seconds since the epoch.
        age_s: seconds since then.
        seconds: that it took to be written.
    """

    step: int
    time: float
    age_s: float
    seconds: float
    nbytes: int


@dataclass(frozen=True)
class JobView:
    """A job.

    Attributes:
        host: this machine; empty where the job does not run here.
        state: ``starting``, ``running``, ``recovering``, ``succeeded``, ``failed``, ``gone`` (its launcher has ended
            and did not say so) or ``unknown`` (it does not run here, and its events do not tell its end).
        reason: why it failed, in words; empty otherwise.
        now: seconds since the epoch at which this is what there is to see.
        begun: its first event.
        ended: its end; None while it runs.
        step: batches begun by the worker of this machine that is furthest; None if unknown.
        steps_per_s: median of the workers of this machine; None if unknown.
        steps: that there will be in all, as far as the loops say; None if unknown.
        left_s: until then, in seconds; None if unknown.
        loss: the newest training loss; None if nobody told one.
        goodput: share of the time since the first batch in which no worker waited for a recovery; None before it.
        series: see :class:`Live`.
        stall_s: all stalls that are over, the longest worker of each, together, in seconds.
        stalled_s: how long the stall under way has lasted, 0 without one, in seconds.
        restarts: how often all workers have started again.
        failures_by_kind: how many there were of each kind of cause.
        recoveries: recoveries that are over, by answer: ``replace``, ``reroute``, ``restart``, ``resize``.
        checkpoint: the newest; None if there is none.
        failures: the newest first, of which there may have been more.
        spans: of the timeline, in order of time; those before the oldest of these are left out.
        warnings: the newest first: time, and what it says.
    """

    run: str
    name: str
    script: str
    host: str
    state: str
    reason: str
    now: float
    begun: float
    ended: float | None
    generation: int
    world_size: int
    step: int | None
    steps_per_s: float | None
    steps: int | None
    left_s: float | None
    loss: float | None
    goodput: float | None
    series: tuple[tuple[float, float | None, float | None], ...]
    stall_s: float
    stalled_s: float
    restarts: int
    resizes: int
    failures_by_kind: dict[str, int]
    recoveries: dict[str, int]
    checkpoint: CheckpointView | None
    checkpoints: int
    log_bytes: int
    disk_bytes: int
    workers: tuple[WorkerView, ...]
    failures: tuple[FailureView, ...]
    spans: tuple[ViewSpan, ...]
    warnings: tuple[tuple[float, str], ...]

    @property
    def over(self) -> bool:
        return self.state in ("succeeded", "failed", "gone")

    @property
    def present(self) -> int:
        """Ranks that a worker holds."""
        return sum(one.pid is not None and one.phase not in (RankPhase.GONE, RankPhase.DONE) for one in self.workers)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"present": self.present, "over": self.over}


def view_of(events: Sequence[Event], live: Live) -> JobView:
    """The job, from the events of one run in the order of their file, and one look at this machine."""
    ranks, failures, found = Ranks(), SeenFailures(), recoveries(events)
    for event in events:
        ranks.take(event)
        failures.take(event)
    card = live.card or Card()
    end = next((event for event in reversed(events) if event.kind == "end" and _ends(event, live.card)), None)
    workers = tuple(_worker(rank, held, live, end is not None) for rank, held in sorted(ranks.held.items()))
    state = _state(workers, end, live, bool(found) and not found[-1].complete)
    failed = _failures(failures, found)
    made = [event for event in events if event.kind == "checkpoint"]
    mine = [one for one in workers if one.here]
    paces = [one.steps_per_s for one in mine if one.steps_per_s is not None]
    over = [one for one in found if one.complete]
    kinds = [one.kind for one in failed if one.kind != DRAINED]
    answers = ["resize" if " to " in one.answer else one.answer for one in over]
    warnings = [(event.time, str(event.fields.get("message", ""))) for event in events if event.kind == "warning"]
    ended = end.time if end is not None else events[-1].time if state == "gone" and events else None
    step = max((one.step for one in mine if one.step is not None), default=None)
    speed = statistics.median(paces) if paces else None
    steps = max((pace.expected for pace in live.paces.values()), default=0) or None
    stall_s, stalled_s = sum(one.longest_stall_s or 0.0 for one in over), _stalled(found, state, live.now)
    first = next((event.time for event in events if event.kind == "began"), None)
    trained_s = (live.now if ended is None else ended) - first if first is not None else 0.0
    return JobView(
        run=events[0].run if events else card.run,
        name=card.name or _first(events, "start", "run_id", ""),
        script=card.script or _first(events, "start", "script", ""),
        host=card.host,
        state=state,
        reason=str(end.fields.get("reason") or end.fields.get("result", "")) if end and state == "failed" else "",
        now=live.now,
        begun=events[0].time if events else card.begun or live.now,
        ended=ended,
        generation=ranks.generation,
        world_size=ranks.world_size,
        step=step,
        steps_per_s=speed,
        steps=steps,
        left_s=max(0, steps - step) / speed if steps and step is not None and speed and ended is None else None,
        loss=next((pace.loss for _, pace in sorted(live.paces.items()) if pace.loss is not None), None),
        goodput=max(0.0, 1 - (stall_s + stalled_s) / trained_s) if trained_s > 0 else None,
        series=tuple(live.series),
        stall_s=stall_s,
        stalled_s=stalled_s,
        restarts=sum(event.kind == "restart" for event in events),
        resizes=sum(event.kind == "resize" for event in events),
        failures_by_kind={kind: kinds.count(kind) for kind in sorted(set(kinds))},
        recoveries={answer: answers.count(answer) for answer in sorted(set(answers))},
        checkpoint=_checkpoint(made[-1], live.now) if made else None,
        checkpoints=len(made),
        log_bytes=sum(one.log_bytes or 0 for one in mine),
        disk_bytes=live.disk_bytes,
        workers=workers,
        failures=tuple(reversed(failed[-MOST_FAILURES:])),
        spans=_spans(failures, found, made[-MOST_MARKS:], ranks.seen, end),
        warnings=tuple(reversed(warnings[-MOST_WARNINGS:])),
    )


def kind_of(cause: str) -> str:
    """One of few words for how a worker failed; see :class:`FailureView`."""
    for pattern, kind in _CAUSES:
        if match := re.search(pattern, cause):
            return match.expand(kind)
    return "other"


def _worker(rank: int, held: HeldRank, live: Live, ended: bool) -> WorkerView:
    card = live.card
    here = card is not None and held.agent == card.agent and held.host == card.host
    pace = live.paces.get(rank) if here else None
    phase = _phase(held, here, pace, live, ended)
    trains = phase in (RankPhase.TRAINING, RankPhase.WAITING)
    used = live.usage.get(held.pid, (None, None)) if here and held.pid is not None and not ended else (None, None)
    return WorkerView(
        rank=rank,
        phase=phase,
        pid=held.pid,
        host=held.host,
        here=here,
        step=pace.boundaries if pace is not None and pace.boundaries else None,
        steps_per_s=pace.steps_per_s(live.now) if pace is not None and trains else None,
        log_bytes=pace.log_bytes if pace is not None else None,
        failures=held.failures,
        cores=used[0],
        memory_bytes=used[1],
        slow=held.slow,
    )


def _phase(held: HeldRank, here: bool, pace: Pace | None, live: Live, ended: bool) -> RankPhase:
    """The phase that events tell, and what can be seen of the process."""
    if ended:
        return RankPhase.DONE
    if not here:
        if live.card is not None and not live.alive:
            return RankPhase.GONE
        return RankPhase.ELSEWHERE if held.phase is RankPhase.STARTING else held.phase
    process = live.states.get(held.pid) if held.pid is not None else None
    if held.pid is None:
        away = RankPhase.DRAINED if held.phase is RankPhase.DRAINED else RankPhase.FAILED
        return away if live.alive else RankPhase.GONE
    if process is None or process == "Z":
        return RankPhase.GONE
    if process == "T":
        return RankPhase.STOPPED
    if held.phase not in (RankPhase.STARTING, RankPhase.TRAINING) or pace is None or not pace.boundaries:
        return held.phase
    return RankPhase.WAITING if pace.inside and live.now - pace.changed > WAITS_S else RankPhase.TRAINING


def _state(workers: Sequence[WorkerView], end: Event | None, live: Live, answering: bool) -> str:
    if end is not None:
        return "succeeded" if end.fields.get("result") == "succeeded" else "failed"
    if live.card is None:
        return "unknown"
    if not live.alive:
        return "gone"
    phases = {one.phase for one in workers}
    if not phases or phases == {RankPhase.STARTING}:
        return "recovering" if answering else "starting"
    continuing = phases & {RankPhase.TRAINING, RankPhase.WAITING, RankPhase.STOPPED, RankPhase.ELSEWHERE}
    return "running" if continuing and RankPhase.STALLED not in phases else "recovering"


def _ends(event: Event, card: Card | None) -> bool:
    """Whether an ``end`` is that of the launcher that is looked at: of several, one may go before the others."""
    return card is None or (event.fields.get("agent", card.agent), event.fields.get("host", card.host)) == (
        card.agent,
        card.host,
    )


def _failures(failures: SeenFailures, found: Sequence[Recovery]) -> list[FailureView]:
    stalls: dict[tuple[int, float], float | None] = {}
    for at, one in enumerate(found):
        # One that was abandoned because of another failure is over when its successor is.
        answered = next((each for each in found[at:] if each.superseded_by is None), one)
        stalls |= {(failure.rank, failure.detected or 0.0): answered.longest_stall_s for failure in one.failures}
    return [
        FailureView(
            rank=one.rank,
            time=one.detected,
            cause=one.cause,
            kind=kind_of(one.cause),
            pid=one.pid,
            replacement=one.replacement,
            back_s=None if one.joined is None else one.joined - one.detected,
            stall_s=stalls.get((one.rank, one.detected)),
            last_words=one.last_words,
        )
        for one in failures.all
    ]


def _stalled(found: Sequence[Recovery], state: str, now: float) -> float:
    begun = None
    for one in reversed(found):
        if one.complete:
            break
        begun = one.detected
    return max(0.0, now - begun) if begun is not None and state == "recovering" else 0.0


def _spans(
    failures: SeenFailures, found: Sequence[Recovery], made: Sequence[Event], ranks: set[int], end: Event | None
) -> tuple[ViewSpan, ...]:
    ended = None if end is None else end.time
    marks = ((event.time, f"checkpoint at step {_whole(event.fields.get('boundary'))}") for event in made)
    spans = [ViewSpan(-1, "checkpoint", when, when, text) for when, text in marks]
    for one in failures.all[-MOST_FAILURES:]:
        over = next((when for when in (one.joined, one.closed, ended) if when is not None), None)
        started = over if one.started is None else one.started
        what = one.cause if kind_of(one.cause) == DRAINED else f"failed: {one.cause}"
        spans.append(ViewSpan(one.rank, "failed", one.detected, started, what))
        if one.started is not None:
            spans.append(ViewSpan(one.rank, "joining", one.started, over, f"pid {one.replacement} takes the place"))
    for each in reversed(found):
        if len(spans) > MOST_SPANS:
            break
        what = "stalled" if each.answer in ("replace", "drain", "reroute") else "restart"
        stalls = each.stall_s if what == "stalled" else dict.fromkeys(ranks, each.longest_stall_s or 0.0)
        if each.complete:
            spans += [
                ViewSpan(rank, what, each.detected, each.detected + stall, f"{what} for {stall:.2f} s")
                for rank, stall in stalls.items()
                if rank not in each.failed
            ]
    return tuple(sorted(spans, key=lambda span: (span.begin, span.rank))[-MOST_SPANS:])


def _checkpoint(event: Event, now: float) -> CheckpointView:
    said = event.fields
    return CheckpointView(
        step=_whole(said.get("boundary")),
        time=event.time,
        age_s=max(0.0, now - event.time),
        seconds=_number(said.get("seconds")),
        nbytes=_whole(said.get("bytes")),
    )


def _first(events: Sequence[Event], kind: str, name: str, default: str) -> str:
    return next((str(event.fields.get(name, default)) for event in events if event.kind == kind), default)


def _number(value: Any) -> float:
    return float(value) if type(value) in (int, float) and math.isfinite(value) else 0.0


def _whole(value: Any) -> int:
    return value if type(value) is int else 0

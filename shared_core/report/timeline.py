"""Recoveries of a job, grouped from its events: pure functions of plain data."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from shared_core.events import Event, visible
from shared_core.faults.spec import KINDS as FAULTS
from shared_core.plain_json import is_count
from shared_core.report.text import columns, in_bytes, in_seconds, in_time

#: What stands for the id of a run in a file of an older version.
NO_ID = "none"
#: So many other runs of a file are named.
_NAMED = 10
#: Kinds that say something about one generation's recovery.
_OF_A_RECOVERY = frozenset(
    {"survivor_ready", "replacement_start", "replacement_ready", "recovered", "resumed", "admitted"}
)


@dataclass(frozen=True)
class Failure:
    """A worker that failed.

    Attributes:
        cause: how it ended, in words; empty if it was not said.
        detected: when the agent noticed, in seconds since the epoch; ``None`` if it was not said.
        struck: when an injected fault struck it, in seconds since the epoch; ``None`` for other failures.
        boundaries: step boundaries that it had passed; ``None`` if it was not said.
    """

    rank: int
    cause: str = ""
    detected: float | None = None
    struck: float | None = None
    boundaries: int | None = None


@dataclass
class Recovery:
    """One answer to a failure, or one change of the number of workers; durations are in seconds, from ``detected`` if
    not said otherwise.

    Attributes:
        generation: number of the generation that was formed; for a restart, of the one that ended.
        attempt: how often all workers had been started again before, also because their number changed.
        detected: when the first of them was noticed, in seconds since the epoch.
        survivor_ready_s: by rank, until a survivor was out of its blocked call and ready to take part.
        replacement_start_s: by rank, until the replacement's process was started.
        replacement_ready_s: by rank, until the replacement had joined.
        user_start_s: by rank, how much of that was the replacement's start and the user's code before the training
            loop.
        exchange_s: by rank, how long a survivor took to connect and to exchange state and logs.
        formed_s: by rank, until a survivor had exchanged them.
        ended_s: until all workers were told to end, where they are started again; ``None`` elsewhere.
        started_s: until the processes of the next workers ran, where all are started again; ``None`` elsewhere.
        began_s: until the next workers came to their first batch, where all are started again; ``None`` elsewhere.
        admitted_s: by rank, until a replacement was admitted by those that continued without it.
        admitted_stall_s: by rank, how long the others stood still for it then.
        stall_s: by rank, until it continued with its batch.
        served_operations: finished operations handed from logs to whoever lacked them.
        recomputed_steps: optimizer steps that a survivor computed again.
        boundary: step boundary the replacement started from; ``None`` if it was not said.
        resolution: how differing survivors were brought to the same state, in words.
        superseded_by: number of the generation that took over because another worker failed meanwhile.
        answer: ``replace``, ``drain`` where workers left as planned, ``reroute``, ``restart``, or ``4 to 3`` where the
            number of workers changed.
    """

    generation: int
    attempt: int = 0
    failures: list[Failure] = field(default_factory=list)
    detected: float = 0.0
    survivor_ready_s: dict[int, float] = field(default_factory=dict)
    replacement_start_s: dict[int, float] = field(default_factory=dict)
    replacement_ready_s: dict[int, float] = field(default_factory=dict)
    user_start_s: dict[int, float] = field(default_factory=dict)
    exchange_s: dict[int, float] = field(default_factory=dict)
    formed_s: dict[int, float] = field(default_factory=dict)
    ended_s: float | None = None
    started_s: float | None = None
    began_s: float | None = None
    admitted_s: dict[int, float] = field(default_factory=dict)
    admitted_stall_s: dict[int, float] = field(default_factory=dict)
    stall_s: dict[int, float] = field(default_factory=dict)
    bytes_moved: int = 0
    served_operations: int = 0
    recomputed_steps: int = 0
    boundary: int | None = None
    resolution: str = ""
    superseded_by: int | None = None
    answer: str = "replace"

    @property
    def failed(self) -> list[int]:
        """Ranks whose failure it answers, in order."""
        return sorted({failure.rank for failure in self.failures})

    @property
    def complete(self) -> bool:
        """Whether a worker continued in this generation; not so where it was abandoned or the job ended first."""
        return bool(self.stall_s)

    @property
    def longest_stall_s(self) -> float | None:
        """Stall of the worker that waited longest; ``None`` while nobody has continued."""
        return max(self.stall_s.values(), default=None)

    @property
    def slowest_survivor_ready_s(self) -> float | None:
        """Time until the last survivor was ready; ``None`` if none has said so."""
        return max(self.survivor_ready_s.values(), default=None)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for a JSON file; ranks become text as JSON's keys do."""
        plain = asdict(self)
        for name, value in plain.items():
            if isinstance(value, dict):
                plain[name] = {str(rank): seconds for rank, seconds in sorted(value.items())}
        return plain


def recoveries(events: Iterable[Event]) -> list[Recovery]:
    """Group events into recoveries in the order in which they began: one for each generation formed after a failure,
    each restart of all workers, and each change of their number.

    Events of one run (see :func:`shared_core.events.by_run`) in the order of their file. Whatever a killed writer could
    not say is left at its default.
    """
    found: dict[tuple[int, int, str], Recovery] = {}
    unplaced = _Unplaced()
    attempt = 0
    all_end: Recovery | None = None
    answering: dict[int, int] = {}  # by rank, the newest generation that it has said to be ready for
    for event in events:
        key = (attempt, event.generation, "")
        if event.kind == "survivor_ready":
            answering[event.rank] = event.generation
        if event.kind in ("restart", "resize"):  # generations count from 0 again
            if key in found and found[key].complete:
                key = (attempt, event.generation, event.kind)
            all_end = found.setdefault(key, Recovery(event.generation, attempt, detected=event.time))
            _end_all(all_end, event, unplaced)
            attempt += 1
            answering.clear()
        elif event.kind == "start" and all_end is not None and all_end.started_s is None:
            all_end.started_s = event.time - all_end.detected
        elif event.kind == "began" and all_end is not None and all_end.began_s is None:
            all_end.began_s = event.time - all_end.detected
        elif event.kind == "resumed" and answering.get(event.rank, 0) > max(event.generation, 0):
            # `reroute`: it continues without the absent ranks, in the generation before.
            key = (attempt, answering[event.rank], "")
            _add(found.setdefault(key, Recovery(key[1], attempt, detected=event.time)), event)
        elif event.kind == "resumed" and event.generation == 0 and all_end is not None:
            _add(all_end, event)
            # What it says counts from the decision to start again.
            stall_s = all_end.stall_s.get(event.rank, 0.0)
            all_end.stall_s[event.rank] = max(stall_s, event.time - all_end.detected)
        elif event.kind in ("failed", "drained", "fault"):
            unplaced.add(attempt, event)
        elif event.kind == "generation" and (event.fields.get("failed") or not event.fields.get("stay")):
            recovery = found.setdefault(key, Recovery(event.generation, attempt, detected=event.time))
            for rank in event.fields.get("failed", []):
                recovery.failures.append(unplaced.take(attempt, int(rank)))
            if event.fields.get("planned") is True:
                recovery.answer = "drain"
            if "absent" in event.fields:
                recovery.answer = "reroute"
            _date(recovery)
        elif event.kind in _OF_A_RECOVERY and event.generation > 0:
            _add(found.setdefault(key, Recovery(event.generation, attempt, detected=event.time)), event)
    ordered = list(found.values())
    for earlier, later in zip(ordered, ordered[1:], strict=False):
        if not earlier.complete and earlier.attempt == later.attempt and earlier.generation < later.generation:
            earlier.superseded_by = later.generation
    return ordered


class _Unplaced:
    """Failures that nothing has answered yet, and injected faults that have led to none yet."""

    def __init__(self) -> None:
        self._failures: list[tuple[int, Event]] = []
        self._struck: dict[int, float] = {}

    def add(self, attempt: int, event: Event) -> None:
        if event.kind == "fault":
            said = event.fields.get("fault")
            if isinstance(said, dict) and said.get("kind") in FAULTS:
                self._struck[event.rank] = event.time
        else:
            self._failures.append((attempt, event))

    def ranks(self, attempt: int) -> list[int]:
        return sorted({event.rank for of_attempt, event in self._failures if of_attempt == attempt})

    def take(self, attempt: int, rank: int) -> Failure:
        """The oldest failure of ``rank``; a bare one if it was never reported."""
        for at, (of_attempt, event) in enumerate(self._failures):
            if of_attempt == attempt and event.rank == rank:
                del self._failures[at]
                said, struck = event.fields, self._struck.pop(rank, None)
                detected, boundaries = float(said.get("detected", event.time)), said.get("boundaries")
                cause = str(said.get("cause", ""))
                return Failure(rank, cause, detected, struck, boundaries if is_count(boundaries) else None)
        return Failure(rank)


def _end_all(recovery: Recovery, event: Event, unplaced: _Unplaced) -> None:
    """All workers end, and others begin: the failures that nothing has answered yet are the reason."""
    if event.kind == "restart":
        recovery.answer = "restart"
    else:
        recovery.answer = f"{event.fields.get('before', '?')} to {event.fields.get('workers', '?')}"
    for rank in unplaced.ranks(recovery.attempt):
        recovery.failures.append(unplaced.take(recovery.attempt, rank))
    _date(recovery)
    recovery.ended_s = event.time - recovery.detected


def _date(recovery: Recovery) -> None:
    times = [failure.detected for failure in recovery.failures if failure.detected is not None]
    recovery.detected = min([recovery.detected, *times])


def _add(recovery: Recovery, event: Event) -> None:
    said = event.fields
    if event.kind == "survivor_ready":
        recovery.survivor_ready_s[event.rank] = float(said.get("ready_s", event.time - recovery.detected))
    elif event.kind == "replacement_start":
        recovery.replacement_start_s[event.rank] = event.time - recovery.detected
    elif event.kind == "replacement_ready":
        ready = event.time - recovery.detected
        recovery.replacement_ready_s[event.rank] = ready
        started = recovery.replacement_start_s.get(event.rank, 0.0)
        recovery.user_start_s[event.rank] = float(said.get("start_s", ready - started - said.get("joined_s", 0.0)))
    elif event.kind in ("recovered", "resumed") and "stall_s" in said:
        # A survivor may report both: ready to continue, and past its next optimizer step.
        recovery.stall_s[event.rank] = max(float(said["stall_s"]), recovery.stall_s.get(event.rank, 0.0))
    elif event.kind == "admitted":
        recovery.admitted_s[event.rank] = event.time - recovery.detected
        recovery.admitted_stall_s[event.rank] = float(said.get("stall_s", 0.0))
    if event.kind == "recovered":
        recovery.formed_s[event.rank] = event.time - recovery.detected
        if "exchange_s" in said:
            recovery.exchange_s[event.rank] = float(said["exchange_s"])
    recovery.bytes_moved += int(said.get("bytes_moved", 0))
    recovery.served_operations += int(said.get("served_operations", 0))
    recovery.recomputed_steps = max(recovery.recomputed_steps, int(said.get("recomputed_steps", 0)))
    if said.get("boundary") is not None:
        recovery.boundary = int(said["boundary"])
    recovery.resolution = str(said.get("resolution") or recovery.resolution)


def format_recoveries(found: Sequence[Recovery], start: float) -> str:
    """A table of recoveries, one row each; times relative to ``start`` (seconds since the epoch)."""
    if not found:
        return "no worker failed"
    header = (
        "generation",
        "failed",
        "cause",
        "answer",
        "detected",
        "survivors ready",
        "replacement ready",
        "stall",
        "moved",
        "redone",
    )
    rows = [header]
    for one in found:
        stall = in_seconds(one.longest_stall_s)
        if one.superseded_by is not None:
            stall = f"see {one.superseded_by}"
        rows.append(
            (
                str(one.generation),
                ", ".join(map(str, one.failed)) or "-",
                _short(
                    visible("; ".join(dict.fromkeys(failure.cause or "unknown" for failure in one.failures))) or "-"
                ),
                one.answer,
                f"+{one.detected - start:.2f} s",
                in_seconds(one.slowest_survivor_ready_s),
                in_seconds(max(one.replacement_ready_s.values(), default=None)),
                stall,
                in_bytes(one.bytes_moved),
                f"{one.recomputed_steps} steps",
            )
        )
    return columns(rows)


def format_timeline(events: Sequence[Event]) -> str:
    """All events, one line each, relative to the first."""
    if not events:
        return "no events"
    start = events[0].time
    return "\n".join(_line(event, start) for event in events)


def _line(event: Event, start: float) -> str:
    who = f"rank {event.rank}" if event.rank >= 0 else "job"
    said = visible(_WORDS.get(event.kind, _any_fields)(event.fields))
    return f"{event.time - start:+10.3f} s  gen {event.generation:<3} {who:<8} {event.kind:<17} {said}".rstrip()


def ended(events: Sequence[Event]) -> str:
    end = next((event for event in reversed(events) if event.kind == "end"), None)
    if end is None:
        return "the job runs, or its launcher was killed"
    words = f"the job {visible(str(end.fields.get('result', 'ended')))} after {in_time(end.time - events[0].time)}"
    reason = end.fields.get("reason")
    return f"{words}: {visible(str(reason))}" if reason else words


def format_runs(shown: str, begun: Sequence[tuple[str, float]]) -> str:
    """One line about the other runs of a file, the newest first; empty if there are none. ``begun``: id and beginning,
    in seconds since the epoch, of each run of the file, in order.
    """
    others = [
        f"{run or NO_ID} ({time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(when))})"
        for run, when in reversed(begun)
        if run != shown
    ]
    if not others:
        return ""
    how_many = "1 other run" if len(others) == 1 else f"{len(others)} other runs"
    more = f", and {len(others) - _NAMED} older" if len(others) > _NAMED else ""
    return f"run {shown or NO_ID}; the file holds {how_many}: {', '.join(others[:_NAMED])}{more} (--run ID)"


def _any_fields(said: dict[str, Any]) -> str:
    return ", ".join(f"{name} {_value(name, value)}" for name, value in said.items())


def _failed(said: dict[str, Any]) -> str:
    return str(said.get("cause", ""))


def _generation(said: dict[str, Any]) -> str:
    if said.get("stay"):
        return f"ranks {', '.join(map(str, said['stay']))} hand on to another number of workers"
    if said.get("absent"):
        return f"the others continue without rank {', '.join(map(str, said['absent']))}"
    if not said.get("failed"):
        return "the number of workers stays as it is"
    return f"replaces rank {', '.join(map(str, said.get('failed', [])))}"


def _ready(said: dict[str, Any]) -> str:
    return f"after {in_seconds(said.get('ready_s'))}"


def _recovered(said: dict[str, Any]) -> str:
    parts = [str(said["resolution"])] if said.get("resolution") else []
    if said.get("boundary") is not None:
        parts.append(f"from step boundary {said['boundary']}")
    if "stall_s" in said:
        parts.append(f"stalled {in_seconds(said['stall_s'])}")
    if said.get("bytes_moved"):
        parts.append(f"{in_bytes(said['bytes_moved'])} moved")
    if said.get("served_operations"):
        parts.append(f"{said['served_operations']} operations served")
    if "recomputed_steps" in said:
        parts.append(f"{said['recomputed_steps']} steps recomputed")
    return ", ".join(parts)


def _joined(said: dict[str, Any]) -> str:
    return _recovered({name: value for name, value in said.items() if name != "recomputed_steps"})


_WORDS: dict[str, Callable[[dict[str, Any]], str]] = {
    "failed": _failed,
    "drained": _failed,
    "generation": _generation,
    "survivor_ready": _ready,
    "replacement_ready": _joined,
    "recovered": _recovered,
    "resumed": _recovered,
}


def _value(name: str, value: Any) -> str:
    if isinstance(value, float):
        return in_seconds(value) if name.endswith("_s") else f"{value:g}"
    if isinstance(value, int) and "bytes" in name:
        return in_bytes(value)
    return str(value)


def _short(text: str, width: int = 48) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."

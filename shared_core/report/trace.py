"""A run's history in the Trace Event Format, which Perfetto (https://ui.perfetto.dev) and ``chrome://tracing`` read."""

from __future__ import annotations

from typing import Any

from shared_core.events import visible
from shared_core.report.history import History

#: Processes of the trace: the ranks, and the answers to failures. Threads count from 1, as 0 is the idle thread's
#: number.
_RANKS, _ANSWERS = 1, 2


def to_trace(found: History) -> dict[str, Any]:
    """The JSON object form of the format: ``traceEvents``, ``displayTimeUnit``, ``otherData``.

    Each rank has a track of its own, with what it did as complete events (``X``) and its failures as instants (``i``);
    the parts of recoveries lie on a second group of tracks. Times are in microseconds since the run began.
    """
    events: list[dict[str, Any]] = [
        *_named(_RANKS, "ranks", {rank + 1: f"rank {rank}" for rank in found.ranks}),
    ]
    for span in found.spans:
        args: dict[str, Any] = {"note": visible(span.note)} if span.note else {}
        events.append(_slice(span.doing.value, "rank", span.begin, span.end, _RANKS, span.rank + 1, args))
    for mark in found.failures:
        args = {"cause": visible(mark.what)} | ({} if mark.boundary is None else {"step boundary": mark.boundary})
        events.append(_instant(f"rank {mark.rank} fails", "failure", mark.at, "t", _RANKS, mark.rank + 1, args))
    for mark in found.turns:
        events.append(_instant(visible(mark.what), "restart", mark.at, "g", _RANKS, 1, {}))
    for mark in found.checkpoints:
        args = {} if mark.boundary is None else {"step boundary": mark.boundary}
        events.append(_instant("checkpoint", "checkpoint", mark.at, "p", _RANKS, 1, args))
    free: list[float] = []  # by track, when its last part ends
    for one in found.answers:
        if not one.parts:
            continue
        begin, end = one.at + one.parts[0].begin, one.at + one.parts[-1].end
        track = next((number for number, until in enumerate(free) if until <= begin), len(free))
        free[track : track + 1] = [end]
        title = {"answer": one.recovery.answer, "failed": one.recovery.failed, "generation": one.recovery.generation}
        for part in one.parts:
            where = (_ANSWERS, track + 1)
            events.append(_slice(part.kind.value, "recovery", one.at + part.begin, one.at + part.end, *where, title))
    if free:
        events += _named(_ANSWERS, "recoveries", {number + 1: f"parts {number + 1}" for number in range(len(free))})
    other = {"run": found.run, "began": found.began, "result": visible(found.result)}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}


def _named(pid: int, name: str, threads: dict[int, str]) -> list[dict[str, Any]]:
    """Metadata events (``M``) that name a process and its threads, and sort them."""
    events = [{"name": "process_name", "ph": "M", "pid": pid, "tid": 0, "args": {"name": name}}]
    for tid, title in threads.items():
        events.append({"name": "thread_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": title}})
        events.append({"name": "thread_sort_index", "ph": "M", "pid": pid, "tid": tid, "args": {"sort_index": tid}})
    return events


def _slice(name: str, cat: str, begin: float, end: float, pid: int, tid: int, args: dict[str, Any]) -> dict[str, Any]:
    """Rounded at both ends alike, so that neighbours neither overlap nor come apart."""
    since, until = round(begin * 1e6), round(end * 1e6)
    where = {"pid": pid, "tid": tid, "args": args}
    return {"name": name, "cat": cat, "ph": "X", "ts": since, "dur": until - since} | where


def _instant(name: str, cat: str, at: float, scope: str, pid: int, tid: int, args: dict[str, Any]) -> dict[str, Any]:
    """``scope``: ``t`` for the thread, ``p`` for the process, ``g`` for all."""
    where = {"pid": pid, "tid": tid, "s": scope, "args": args}
    return {"name": name, "cat": cat, "ph": "i", "ts": round(at * 1e6)} | where

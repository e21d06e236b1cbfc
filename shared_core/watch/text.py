"""A view of a job as plain text."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from shared_core.events import visible
from shared_core.report.text import columns, in_bytes, in_seconds
from shared_core.watch.view import FailureView, JobView, WorkerView

#: Most failures that are shown.
SHOWN = 8
WORKER_COLUMNS = ("rank", "phase", "step", "steps/s", "cores", "memory", "pid", "machine", "log", "failed")
FAILURE_COLUMNS = ("when", "rank", "cause", "pid", "replacement", "joined after", "stall")


def format_view(view: JobView) -> str:
    parts = [headline(view), "\n".join(f"{name + ':':<14} {value}" for name, value in facts(view))]
    if view.workers:
        parts.append(columns([WORKER_COLUMNS, *map(worker_cells, view.workers)]))
    if view.failures:
        parts.append(columns([FAILURE_COLUMNS, *(failure_cells(one, view.begun) for one in view.failures[:SHOWN])]))
        if (more := sum(view.failures_by_kind.values()) - SHOWN) > 0:
            parts.append(f"and {more} before")
    parts += [f"{_clock(when)} {visible(text)}" for when, text in view.warnings]
    return "\n\n".join(parts)


def headline(view: JobView) -> str:
    what = visible(Path(view.script).name) or "job"
    where = f" on {visible(view.host)}" if view.host else ""
    state = f"{view.state} ({visible(view.reason)})" if view.reason else view.state
    return f"{what}, run {visible(view.run) or 'none'}{where}: {state}, {_since(view)}"


def facts(view: JobView) -> list[tuple[str, str]]:
    """What concerns the whole job: name and value."""
    failed = sum(view.failures_by_kind.values())
    causes = ", ".join(f"{count} {visible(kind)}" for kind, count in view.failures_by_kind.items())
    stall = in_seconds(view.stall_s) if view.stall_s else "none"
    found = [
        ("workers", f"{view.world_size}" if view.over else f"{view.present} of {view.world_size}"),
        (
            "generation",
            f"{view.generation}" + (f", all workers started again {count(view.restarts)}" if view.restarts else ""),
        ),
        ("step", "-" if view.step is None else f"{view.step}{_progress(view)}, {pace(view.steps_per_s)} steps/s"),
        *([("training loss", f"{view.loss:.6g}")] if view.loss is not None else []),
        *([("goodput", f"{view.goodput:.1%}")] if view.goodput is not None else []),
        ("failures", f"{failed} ({causes})" if failed else "0"),
        ("stalls", stall + (f"; now for {in_seconds(view.stalled_s)}" if view.stalled_s else "")),
        *([("slow", slow)] if (slow := _slow(view)) else []),
        ("checkpoint", checkpoint(view)),
        ("message logs", f"{in_bytes(view.log_bytes)} in memory, {in_bytes(view.disk_bytes)} on disk"),
    ]
    return found if view.host else [pair for pair in found if pair[0] not in ("step", "message logs")]


def _slow(view: JobView) -> str:
    return "; ".join(f"rank {one.rank}, {visible(one.slow)}" for one in view.workers if one.slow)


def _progress(view: JobView) -> str:
    if not view.steps or view.step is None:
        return ""
    left = f", {span(view.left_s)} left" if view.left_s is not None else ""
    return f" of {view.steps} ({min(1.0, view.step / view.steps):.0%}{left})"


def checkpoint(view: JobView) -> str:
    newest = view.checkpoint
    if newest is None:
        return "none"
    return f"step {newest.step}, {span(newest.age_s)} ago ({in_bytes(newest.nbytes)} in {in_seconds(newest.seconds)})"


def worker_cells(one: WorkerView) -> tuple[str, ...]:
    """A row for :data:`WORKER_COLUMNS`."""
    return (
        str(one.rank),
        one.phase,
        "-" if one.step is None else str(one.step),
        pace(one.steps_per_s),
        "-" if one.cores is None else f"{one.cores:.1f}",
        "-" if one.memory_bytes is None else in_bytes(one.memory_bytes),
        "-" if one.pid is None else str(one.pid),
        visible(one.host) or "-",
        "-" if one.log_bytes is None else in_bytes(one.log_bytes),
        str(one.failures),
    )


def failure_cells(one: FailureView, begun: float) -> tuple[str, ...]:
    """A row for :data:`FAILURE_COLUMNS`; times count from the start of the job."""
    cause = visible(one.cause) or "unknown"
    return (
        f"+{span(one.time - begun)}",
        str(one.rank),
        cause if len(cause) <= 48 else f"{cause[:45]}...",
        "-" if one.pid is None else str(one.pid),
        "-" if one.replacement is None else str(one.replacement),
        in_seconds(one.back_s),
        in_seconds(one.stall_s),
    )


def pace(steps_per_s: float | None) -> str:
    return "-" if steps_per_s is None else f"{steps_per_s:.3g}" if steps_per_s < 100 else f"{steps_per_s:.0f}"


def span(seconds: float) -> str:
    """A duration in the two largest units: ``42 s``, ``3 min 5 s``, ``2 h 10 min``, ``3 d 4 h``."""
    left = max(0, int(seconds))
    if left < 60:
        return f"{left} s"
    if left < 3600:
        return f"{left // 60} min {left % 60} s"
    if left < 86400:
        return f"{left // 3600} h {left % 3600 // 60} min"
    return f"{left // 86400} d {left % 86400 // 3600} h"


def format_jobs(jobs: Sequence[tuple[str, str, int, float]], now: float) -> str:
    """A table of jobs: run, script, pid of the launcher and beginning, in seconds since the epoch."""
    rows = [(run, visible(script), str(pid), f"{span(now - begun)} ago") for run, script, pid, begun in jobs]
    return columns([("run", "script", "launcher", "started"), *rows])


def count(times: int) -> str:
    return "once" if times == 1 else f"{times} times"


def _since(view: JobView) -> str:
    took = span((view.ended if view.ended is not None else view.now) - view.begun)
    return f"after {took} without start-up" if view.over else f"for {took}"


def _clock(when: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(when))

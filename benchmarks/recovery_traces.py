"""What the ranks of a job have noted, what follows from it, and waiting for it."""

from __future__ import annotations

import json
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import WORKERS, Workers
from benchmarks.recovery_worker import BATCH
from shared_core.events import Event, read_events

#: Seconds that a job gets to do what is waited for; none of those measured comes near.
MAX_WAIT_S = 300.0


class Traces:
    """What the ranks have noted so far."""

    def __init__(self, folder: Path, workers: int = WORKERS) -> None:
        self.ranks = range(workers)
        self.paths = [folder / f"trace{rank}.jsonl" for rank in self.ranks]
        self.read_to = [0] * workers
        self.lines: list[list[dict[str, Any]]] = [[] for _ in self.ranks]

    def refresh(self) -> None:
        """Read what is new; a line that is being written is read next time."""
        for rank, path in enumerate(self.paths):
            if not path.exists():
                continue
            with path.open("rb") as file:
                file.seek(self.read_to[rank])
                whole = file.read().rpartition(b"\n")[0]
            if whole:
                self.read_to[rank] += len(whole) + 1
                self.lines[rank] += [json.loads(line) for line in whole.split(b"\n")]

    def pids(self) -> set[int]:
        """Processes that have noted anything."""
        return {line["pid"] for lines in self.lines for line in lines}

    def steps(self, rank: int, after: float = 0.0) -> list[dict[str, Any]]:
        """Steps that a rank has made after a time, in order."""
        return [line for line in self.lines[rank] if line["kind"] == "step" and line["time"] > after]

    def furthest(self, before: float = float("inf")) -> int:
        """The highest step that any rank had made before a time."""
        steps = (x["step"] for rank in self.ranks for x in self.steps(rank) if x["time"] <= before)
        return int(max(steps, default=0))


def user_time(traces: Traces, at: float) -> float:
    """The longest start of the user's code, up to the loop, in workers that were started after a time."""
    loops = (line for lines in traces.lines for line in lines if line["kind"] == "loop" and line["time"] > at)
    return float(max((line["user_s"] for line in loops), default=0.0))


def stalled_until(traces: Traces, rank: int, at: float, step_s: float) -> float:
    """When a rank's next step after the kill had returned.

    A step that was past its last collective when the worker was killed still returns at once; the stall is then what
    follows it. So the longest gap between two returns that begins near the kill counts.
    """
    times = [line["time"] for line in traces.steps(rank) if line["time"] <= at][-1:]
    times += [line["time"] for line in traces.steps(rank, at)]
    early = [i for i, t in enumerate(times[:-1]) if t - at <= 2 * step_s]
    longest = max(early, key=lambda i: times[i + 1] - times[i])
    return float(times[longest + 1])


def repeated(traces: Traces, rank: int, at: float) -> int:
    """How many steps a rank made again after a kill."""
    before = {line["step"] for line in traces.steps(rank) if line["time"] <= at}
    return sum(line["step"] in before for line in traces.steps(rank, at))


def lost_samples(traces: Traces) -> int:
    """Samples of steps that a rank took no part in, and of steps whose gradients were thrown away."""
    made = [{line["step"] for line in traces.steps(rank)} for rank in range(WORKERS)]
    first, last = max(min(one) for one in made), min(max(one) for one in made)
    missing = sum(step not in one for one in made for step in range(first, last + 1))
    discarded = sum(line["kind"] == "discarded" for lines in traces.lines for line in lines)
    return (missing + discarded) * BATCH


def settled(traces: Traces, count: int) -> bool:
    """Whether every rank has made ``count`` steps."""
    return all(len(traces.steps(rank)) >= count for rank in traces.ranks)


def step_time(traces: Traces) -> float:
    """Median seconds between two steps of rank 0 so far."""
    times = [line["time"] for line in traces.steps(0)][5:]
    return statistics.median(b - a for a, b in zip(times, times[1:], strict=False))


def wait(traces: Traces, workers: Workers, done: Callable[[], bool], pause_s: float = 0.005) -> None:
    """Read the traces until ``done()``, which is asked after each pause.

    Raises:
        RuntimeError: the job has ended, or nothing happened for too long.
    """
    deadline = time.monotonic() + MAX_WAIT_S
    while not done():
        workers.check()
        if time.monotonic() > deadline:
            raise RuntimeError(f"{workers.system} did not continue within {MAX_WAIT_S:.0f} s\n{workers.tail()}")
        time.sleep(pause_s)
        traces.refresh()


def end(workers: Workers, step: int) -> None:
    """Let a job end after a step.

    Raises:
        RuntimeError: it does not, or with another status than 0, where one launcher has all workers.
    """
    (workers.log.parent / "stop").write_text(str(step))
    try:
        status = workers.wait(MAX_WAIT_S)
    except subprocess.TimeoutExpired:
        status = -1
    if status and -1 in workers.processes:
        raise RuntimeError(f"the {workers.system} job ended with status {status}\n{workers.tail()}")


class Job:
    """A job of this product under way, with what its ranks note and its events.

    Args:
        workers: its processes.
        pause_s: while it is waited for; a short one takes processor time from it.
    """

    def __init__(self, workers: Workers, pause_s: float = 0.005) -> None:
        self.workers, self.out, self._pause_s = workers, workers.log.parent, pause_s
        self.traces = Traces(self.out, workers.nproc)

    def events(self, kind: str, after: float = 0.0) -> list[Event]:
        """Those of a kind, since a moment."""
        path = self.out / "events.jsonl"
        return [e for e in read_events(path) if e.kind == kind and e.time >= after] if path.exists() else []

    def when(self, done: Callable[[], bool]) -> None:
        """Read the traces until ``done()``."""
        wait(self.traces, self.workers, done, self._pause_s)

    def ends(self, rank: int = 0) -> dict[int, float]:
        """When a rank had finished each step."""
        return {line["step"]: line["time"] for line in self.traces.steps(rank)}

    def until(self, step: int, ranks: Sequence[int] = (0,)) -> None:
        """Wait until ranks have finished a step."""
        self.when(lambda: all(max(self.ends(rank), default=0) >= step for rank in ranks))

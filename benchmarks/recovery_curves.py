"""How the stall after a failed worker grows: with the place in the epoch, the script's start-up, the model, the
workers.

Each point is a job of its own under this system, torchrun with a checkpoint every 20 steps, and torchft where it is
installed. The job is plain DDP over a ``DataLoader``; the last rank is killed (SIGKILL) when it has come to the place.

- stall: from the kill until the next step has returned on all ranks, those made again not counted;
- delay: by how much later than without the kill the job is 20 steps further. What follows the stall, such as a
  comparison of the replicas or a cold cache, is part of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.common import (
    FULL,
    QUICK,
    WORKERS,
    Row,
    Workers,
    arguments,
    at_most,
    begin,
    finish,
    has_torchft,
    lighthouse,
    say,
    scratch,
)
from shared_core.events import read_events

SCRIPT = Path(__file__).with_name("recovery_curves_worker.py")
#: Seconds that a job may take to its next step; the slowest start-up and the most workers stay far below.
MAX_WAIT_S = 300.0
#: Steps before a kill where the place does not matter: until then standbys have imported what they need.
USUAL = 200
#: Steps after which a job is compared with one that has lost nobody.
AFTER = 20
#: The stall in the hardest place over that in the easiest.
WORST_TARGET = 1.5
#: The stall with a large model over the least that it can be: a replacement's start, its state copied, and one step.
LARGE_TARGET = 1.2
#: Bytes of a parameter and its two moments, which a replacement gets.
STATE_BYTES = 12
SYSTEMS = {
    "swift": "this",
    "unprepared": "this, --prepared 0",
    "torchrun": "torchrun, checkpoint every 20 steps",
    "torchft": "torchft",
}


@dataclass(frozen=True)
class Point:
    """One job.

    Attributes:
        curve: which quantity grows.
        x: its value.
        place: batches of the epoch before the kill.
        read_ms: time to read one of the 8 samples of a batch.
        loader_workers: of each rank's ``DataLoader``.
        startup_s: time that the script takes before its loop.
        batches: of each rank in the epoch; 0: some more than are trained.
        parameters: of the model.
        workers: in the job.
        size: of the runs that measure it, others too in larger ones.
        only_this: other systems are left out.
    """

    curve: str
    x: float
    place: int = USUAL
    read_ms: float = 0.0
    loader_workers: int = 0
    startup_s: float = 0.0
    batches: int = 0
    parameters: int = 0
    workers: int = WORKERS
    size: int = FULL
    only_this: bool = False

    @property
    def name(self) -> str:
        """What the table calls it."""
        return f"{self.curve}: {self.x:g}"


#: What grows.
PLACE, PLACE_LOADER = "batches before the failure, 8 samples of 1 ms each", "the same with a loader worker"
STARTUP, SIZE, WORKERS_GROW = "seconds of start-up", "million parameters", "workers"
POINTS = [
    Point(PLACE, 20, 20, read_ms=1, size=QUICK),
    Point(PLACE, 400, 400, read_ms=1, size=USUAL),
    Point(PLACE, 1000, 1000, read_ms=1),
    Point(PLACE, 10_000, 10_000, read_ms=1),
    Point(PLACE_LOADER, 20, 20, read_ms=1, loader_workers=1, only_this=True),
    Point(PLACE_LOADER, 1000, 1000, read_ms=1, loader_workers=1, only_this=True),
    Point(PLACE_LOADER, 10_000, 10_000, read_ms=1, loader_workers=1, only_this=True),
    Point(STARTUP, 0, read_ms=1),
    Point(STARTUP, 10, read_ms=1, startup_s=10, size=USUAL),
    Point(SIZE, 1, parameters=1_000_000, size=QUICK),
    Point(SIZE, 10, 30, parameters=10_000_000, size=USUAL),
    Point(SIZE, 50, 10, parameters=50_000_000),
    Point(WORKERS_GROW, 2, workers=2, only_this=True),
    Point(WORKERS_GROW, 4, workers=4, size=QUICK),
    Point(WORKERS_GROW, 8, workers=8, size=USUAL, only_this=True),
    Point(WORKERS_GROW, 16, workers=16),
    Point(WORKERS_GROW, 32, workers=32, only_this=True),
    Point(WORKERS_GROW, 64, 60, workers=64, only_this=True),
    Point(WORKERS_GROW, 128, 25, workers=128, only_this=True),
    Point("batch 200 of 10,400, samples that cost nothing, seconds of start-up", 0, batches=10_400, only_this=True),
    Point(
        "batch 10,000 of 10,400, samples of 1 ms, seconds of start-up",
        8,
        10_000,
        read_ms=1,
        startup_s=8,
        batches=10_400,
        only_this=True,
    ),
]
#: Two places in one data set, which are compared.
EASIEST, HARDEST = POINTS[-2:]
#: With which large models are compared.
SMALL_MODEL = next(point for point in POINTS if (point.curve, point.x) == (WORKERS_GROW, 4))


@dataclass
class Trace:
    """The last steps of one rank, as it has noted them."""

    path: Path
    read_to: int = 0
    steps: deque[tuple[int, float, int]] = field(default_factory=lambda: deque(maxlen=600))  # step, time, pid

    def refresh(self) -> None:
        """Read what is new; a line that is being written is read next time."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self.read_to)
            whole = file.read().rpartition(b"\n")[0]
        if whole:
            self.read_to += len(whole) + 1
            for line in whole.split(b"\n"):
                noted = json.loads(line)
                self.steps.append((noted["step"], noted["time"], noted["pid"]))

    @property
    def last(self) -> int:
        """The step made last; 0 before the first."""
        return self.steps[-1][0] if self.steps else 0

    def first_beyond(self, step: int, after: float) -> float | None:
        """When it first made a step with a higher number, after a time."""
        return next((at for number, at, _ in self.steps if number > step and at > after), None)


@dataclass(frozen=True)
class Failure:
    """What a failure cost at one point, in seconds."""

    stall_s: float
    delay_s: float
    step_s: float


@contextlib.contextmanager
def job(system: str, point: Point, out: Path) -> Iterator[Workers]:
    """The job of a point under a system."""
    ours = system in ("swift", "unprepared")
    # Standbys are prepared while the job trains.
    steps = point.batches or point.place + (12_000 if point.startup_s else 400)
    args = ["--system", "swift" if ours else system, "--out", str(out), "--steps", str(steps)]
    args += ["--read-ms", str(point.read_ms), "--loader-workers", str(point.loader_workers)]
    args += ["--startup-s", str(point.startup_s), "--parameters", str(point.parameters)]
    env = {"BENCH_TORCHFT_TIMEOUT_S": "5"}
    with contextlib.ExitStack() as stack:
        if system == "torchft":
            env["TORCHFT_LIGHTHOUSE"] = stack.enter_context(lighthouse(1, 1000))
        options = ["--prepared=0"] if system == "unprepared" else []
        system = "swift" if ours else system
        workers = Workers(system, SCRIPT, args, out, restarts=3, env=env, nproc=point.workers, options=options)
        yield stack.enter_context(workers)


def is_prepared(rank: int, events: Path) -> bool:
    """Whether a standby has run the script for a rank."""
    return any(event.kind == "prepared" and event.rank == rank for event in read_events(events))


def measure(system: str, point: Point, out: Path) -> Failure:
    """Run the job, kill its last rank at the place, and wait until it is 20 steps further."""
    out.mkdir()
    traces = [Trace(out / f"trace{rank}.jsonl") for rank in range(point.workers)]
    with job(system, point, out) as workers:

        def wait(done: Callable[[], bool], pause_s: float) -> None:
            deadline, furthest = time.monotonic() + MAX_WAIT_S, 0
            while not done():
                workers.check()
                if (now := max(trace.last for trace in traces)) > furthest:
                    deadline, furthest = time.monotonic() + MAX_WAIT_S, now
                if time.monotonic() > deadline:
                    raise RuntimeError(f"{system} made no step for {MAX_WAIT_S:.0f} s\n{workers.tail()}")
                time.sleep(pause_s)
                for trace in traces:
                    trace.refresh()

        wait(lambda: min(trace.last for trace in traces) >= max(point.place - 20, 1), 0.2)
        if system == "swift" and point.startup_s:
            wait(lambda: is_prepared(point.workers - 1, out / "events.jsonl"), 0.2)
        wait(lambda: min(trace.last for trace in traces) >= point.place, 0.005)
        times = [at for _, at, _ in traces[0].steps][-200:]
        step_s = statistics.median(b - a for a, b in zip(times, times[1:], strict=False))
        failed = traces[-1]
        at, pid, rank = time.time(), failed.steps[-1][2], point.workers - 1
        os.kill(pid, signal.SIGKILL)
        if rank in workers.processes:
            workers.processes[rank].wait()
            workers.start_replica(rank)
        for trace in traces:
            trace.refresh()
        furthest = max(trace.last for trace in traces)
        wait(lambda: all(trace.first_beyond(furthest + AFTER, at) is not None for trace in traces), 0.005)
        stall = max(trace.first_beyond(furthest, at) or at for trace in traces) - at
        later = max(trace.first_beyond(furthest + AFTER, at) or at for trace in traces) - at
    return Failure(stall, later - (AFTER + 1) * step_s, step_s)


def loopback_bytes_per_s(total: int = 1 << 30) -> float:
    """What one connection between two threads of this machine moves."""
    chunk = bytearray(1 << 24)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with socket.create_connection(listener.getsockname()) as sending, listener.accept()[0] as receiving:
            sender = threading.Thread(target=lambda: [sending.sendall(chunk) for _ in range(total // len(chunk))])
            into, left, begun = memoryview(bytearray(len(chunk))), total, time.perf_counter()
            sender.start()
            while left:
                left -= receiving.recv_into(into)
            sender.join()
            return total / (time.perf_counter() - begun)


def rows_of(measured: dict[tuple[str, Point], Failure]) -> list[Row]:
    """The table."""
    rows = []
    for (system, point), failure in measured.items():
        case = f"{point.name}, {SYSTEMS[system]}"
        rows.append(Row(case, "stall", failure.stall_s, "s"))
        rows.append(Row(case, "delay after 20 steps", failure.delay_s, "s"))
        rows.append(Row(case, "step time without failures, median", 1e3 * failure.step_s, "ms"))
    small = measured.get(("swift", SMALL_MODEL))
    if small is not None and any(point.parameters for _, point in measured):
        speed = loopback_bytes_per_s()
        rows.append(Row("one connection between two threads", "loopback", speed / 1e9, "GB/s"))
        for (system, point), failure in measured.items():
            if system == "swift" and point.parameters:
                least = small.stall_s + STATE_BYTES * point.parameters / speed + failure.step_s
                rows.append(at_most(f"{point.name}, this", "stall / (a small model's stall + copy of the state + a "
                                    "step)", failure.stall_s / least, "ratio", LARGE_TARGET))  # fmt: skip
    easiest, hardest = measured.get(("swift", EASIEST)), measured.get(("swift", HARDEST))
    if easiest is not None and hardest is not None:
        ratio = hardest.stall_s / easiest.stall_s
        rows.append(at_most("batch 10,000 with 1 ms samples and 8 s of start-up, this", "stall / that at batch 200 of "
                            "the same data without either", ratio, "ratio", WORST_TARGET))  # fmt: skip
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns 1 if a target is missed."""
    parser = arguments("recovery_curves", "How the stall grows with place, start-up, model and workers.")
    parser.add_argument("--only", metavar="TEXT", default="", help="only points whose name contains this")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS), help="default: all")
    parser.add_argument(
        "--kills", type=int, default=3, help="jobs for each point under this system in a full run; the median counts"
    )
    options = begin(parser, argv)
    systems = [system for system in options.systems if system != "torchft" or has_torchft()]
    measured: dict[tuple[str, Point], Failure] = {}
    with scratch() as folder:
        for point in POINTS:
            if options.only not in point.name or (point.size > options.size and not options.only):
                continue
            for system in systems:
                if system == "unprepared" and not point.startup_s:
                    continue
                others = system in ("torchrun", "torchft")
                if others and (point.only_this or options.size < min(FULL, point.size + 1)):
                    continue
                again = options.kills if options.size == FULL and system == "swift" and point.place < 1000 else 1
                failures = []
                for number in range(again):
                    try:
                        failures.append(measure(system, point, folder / f"{len(measured)}-{number}"))
                    except (RuntimeError, subprocess.SubprocessError) as error:
                        if system in ("swift", "unprepared"):
                            raise
                        say(f"{point.name}, {SYSTEMS[system]}: no result. {str(error).splitlines()[0]}")
                if not failures:
                    continue
                one = sorted(failures, key=lambda failure: failure.stall_s)[len(failures) // 2]
                measured[system, point] = one
                said = f"stalled {one.stall_s:.2f} s, {one.delay_s:.2f} s late in the end"
                say(f"{point.name}, {SYSTEMS[system]}: {said}")
    return finish(rows_of(measured), options.json)


if __name__ == "__main__":
    sys.exit(main())

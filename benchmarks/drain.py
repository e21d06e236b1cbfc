"""A planned leave: how long do the others stand still, beside the failure of the same worker at the same size?

Two workers train; the second one leaves (``swiftctl drain``) or is killed. The stop is the longest gap between two
steps of the first, less a usual step.
"""

from __future__ import annotations

import os
import signal
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common import FULL, QUICK, Row, Workers, arguments, at_most, begin, finish, say, scratch
from benchmarks.recovery_traces import Job, settled
from shared_core.cli.watch import ask

SCRIPT = Path(__file__).with_name("recovery_worker.py")
#: Millions of parameters, by layers and width of the model.
SIZES: dict[int, tuple[int, int]] = {1: (4, 512), 10: (10, 1024), 50: (12, 2048)}
TARGET_S = 0.05
#: Steps before and after what happens.
STEPS = 8


@dataclass(frozen=True)
class Way:
    """``leaves``: as planned; ``prepared``: hot standbys."""

    name: str
    leaves: bool
    prepared: int | str


WAYS = (Way("killed, warm standby", False, 0), Way("killed, hot standby", False, 1)) + (
    Way("drained, warm standby", True, 0),
    Way("drained, hot standby", True, 1),
)


def stop_s(job: Job, way: Way) -> float:
    """Have the second worker go; returns the stop of the first."""
    job.when(lambda: settled(job.traces, STEPS))
    if way.prepared:
        job.when(lambda: len(job.events("prepared")) > 0)
    [start] = job.events("start")
    before, at = len(job.traces.steps(0)), time.time()
    if way.leaves:
        ask(Path(start.fields["job_dir"]), "1")
    else:
        os.kill(start.fields["pids"]["1"], signal.SIGKILL)
    job.when(lambda: "is back after" in job.workers.log.read_text())
    job.when(lambda: len(job.traces.steps(0)) >= before + STEPS)
    times = list(job.ends().values())
    pairs = list(zip(times, times[1:], strict=False))
    usual = statistics.median(end - begin for begin, end in pairs)
    return max(end - begin for begin, end in pairs if end > at) - usual


def measure(folder: Path, sizes: tuple[int, ...], rounds: int) -> list[Row]:
    rows = []
    for million in sizes:
        for way in WAYS:
            stops = []
            for number in range(rounds):
                out = folder / f"{million}-{way.name}-{number}".replace(" ", "-")
                out.mkdir()
                layers, width = SIZES[million]
                args = ["--system=swift", f"--out={out}", f"--layers={layers}", f"--width={width}"]
                with Workers("swift", SCRIPT, args, out, nproc=2, options=[f"--prepared={way.prepared}"]) as workers:
                    stops.append(stop_s(Job(workers, pause_s=0.02), way))
                say(f"{million} M, {way.name}: {stops[-1]:.3f} s")
            case, stop = f"{million} M parameters, {way.name}", statistics.median(stops)
            aimed = way.leaves and bool(way.prepared) and million == 50
            rows.append(at_most(case, "stop", stop, "s", TARGET_S if aimed else None))
    return rows


def main() -> int:
    options = begin(arguments("drain", str(__doc__)))
    with scratch() as folder:
        rows = measure(folder, (1,) if options.size == QUICK else tuple(SIZES), 3 if options.size == FULL else 1)
    return finish(rows, options)


if __name__ == "__main__":
    sys.exit(main())

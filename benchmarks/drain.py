"""A planned leave: how long do the others stand still, beside the failure of the same worker at the same size?

Two workers train; the second one leaves (``swiftctl drain``) or is killed. The stop is the longest gap between two
steps of the first, less a usual step.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common import FULL, QUICK, Row, arguments, at_most, begin, finish, say, scratch
from benchmarks.recovery_traces import Traces
from shared_core.cli.watch import ask
from shared_core.events import read_events

SCRIPT = Path(__file__).with_name("recovery_worker.py")
#: Millions of parameters, by layers and width of the model.
SIZES: dict[int, tuple[int, int]] = {1: (4, 512), 10: (10, 1024), 50: (12, 2048)}
TARGET_S, MAX_WAIT_S = 0.05, 300.0
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


class _Job:
    def __init__(self, out: Path, size: tuple[int, int], way: Way) -> None:
        out.mkdir()
        self.out = out
        command = [sys.executable, "-m", "shared_core.cli.swiftrun", "--nproc-per-node=2"]
        command += [f"--prepared={way.prepared}", f"--events={out / 'events.jsonl'}", str(SCRIPT), "--system=swift"]
        command += [f"--out={out}", f"--layers={size[0]}", f"--width={size[1]}"]
        with (out / "log.txt").open("w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1"})
        self.traces = Traces(out, 2)

    def wait(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + MAX_WAIT_S
        while not done():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError((self.out / "log.txt").read_text())
            time.sleep(0.02)
            self.traces.refresh()

    def steps(self, rank: int = 0) -> int:
        return len(self.traces.steps(rank))

    def stop_s(self, way: Way) -> float:
        """Have the second worker go; returns the stop of the first."""
        self.wait(lambda: self.steps() >= STEPS and self.steps(1) >= STEPS)
        [start] = [event for event in read_events(self.out / "events.jsonl") if event.kind == "start"]
        if way.prepared:
            self.wait(lambda: any(event.kind == "prepared" for event in read_events(self.out / "events.jsonl")))
        before, at = self.steps(), time.time()
        if way.leaves:
            ask(Path(start.fields["job_dir"]), "1")
        else:
            os.kill(start.fields["pids"]["1"], signal.SIGKILL)
        self.wait(lambda: "is back after" in (self.out / "log.txt").read_text())
        self.wait(lambda: self.steps() >= before + STEPS)
        times = [float(line["time"]) for line in self.traces.steps(0)]
        pairs = list(zip(times, times[1:], strict=False))
        usual = statistics.median(end - begin for begin, end in pairs)
        return max(end - begin for begin, end in pairs if end > at) - usual

    def end(self) -> None:
        (self.out / "stop").write_text("1")
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.terminate()
            self.process.wait()


def measure(folder: Path, sizes: tuple[int, ...], rounds: int) -> list[Row]:
    rows = []
    for million in sizes:
        for way in WAYS:
            stops = []
            for number in range(rounds):
                job = _Job(folder / f"{million}-{way.name}-{number}".replace(" ", "-"), SIZES[million], way)
                try:
                    stops.append(job.stop_s(way))
                finally:
                    job.end()
                say(f"{million} M, {way.name}: {stops[-1]:.3f} s")
            case, stop = f"{million} M parameters, {way.name}", statistics.median(stops)
            aimed = way.leaves and bool(way.prepared) and million == 50
            rows.append(at_most(case, "stop", stop, "s", TARGET_S) if aimed else Row(case, "stop", stop, "s"))
    return rows


def main() -> int:
    options = begin(arguments("drain", str(__doc__)))
    with scratch() as folder:
        rows = measure(folder, (1,) if options.size == QUICK else tuple(SIZES), 3 if options.size == FULL else 1)
    return finish(rows, options)


if __name__ == "__main__":
    sys.exit(main())

"""What a script's start-up adds to a failure, with and without a hot standby, and what one costs while it waits.

Plain DDP on a 6-layer MLP of width 512 with four workers. Before its loop the script takes 8 s, half of them computing.
The last rank is killed (SIGKILL), when its standby is prepared where it has one; the cases take turns. Where workers
fork their standbys, rank 0 is killed as soon as it has one.

- stall: from the failure until a survivor's next ``optimizer.step`` has returned, the longest of all survivors;
- step, a standby waits / stopped: median step while the standby waits as it does, and while it is stopped (SIGSTOP),
  in turns of a second;
- step, a standby is prepared / waits: median step while one runs the start-up;
- processor time of a standby that waits, as a share of one core.
"""

from __future__ import annotations

import os
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common import QUICK, WORKERS, Row, Workers, arguments, at_most, begin, finish, say, scratch
from benchmarks.recovery_traces import Job, settled

SCRIPT = Path(__file__).with_name("startup_worker.py")
STARTUP_S = 8.0
#: Of the stall of a script that starts at once.
FACTOR_TARGET = 1.5
SLOWER_TARGET = 1.02
#: By size of the run: jobs of each case; turns in which a standby waits and is stopped.
ROUNDS = ((1, 3), (2, 8), (5, 15))


class Run(Job):
    """One job.

    Args:
        out: its folder.
        startup_s: seconds that its script takes before its loop.
        prepared: standbys that are prepared, or ``auto``: the workers fork them.
    """

    def __init__(self, out: Path, startup_s: float, prepared: int | str) -> None:
        out.mkdir()
        self._prepared = prepared
        self._rank = 0 if prepared == "auto" else WORKERS - 1
        args = ["--startup", str(startup_s), "--out", str(out)]
        super().__init__(Workers("swift", SCRIPT, args, out, options=[f"--prepared={prepared}"]), pause_s=0.05)

    def stall(self) -> float:
        """Kill the rank, and return the stall."""
        self.when(lambda: settled(self.traces, 1))
        if self._prepared:
            self.when(lambda: any(each.rank == self._rank for each in self.events("prepared")))
        time.sleep(0.5)
        [start] = self.events("start")
        os.kill(start.fields["pids"][str(self._rank)], signal.SIGKILL)
        self.when(lambda: len(self.events("resumed")) >= WORKERS - 1)
        [replacement] = self.events("replacement_start")
        if replacement.fields["how"] != {0: "standby", "auto": "forked"}.get(self._prepared, "prepared"):
            raise RuntimeError(f"the replacement was a {replacement.fields['how']} one")
        return max(float(event.fields["stall_s"]) for event in self.events("resumed"))

    def step_s(self, spans: Sequence[tuple[float, float]]) -> float:
        """Median time of a step of rank 0 that began and ended within one of these spans."""
        self.traces.refresh()
        times = list(self.ends().values())
        pairs = zip(times, times[1:], strict=False)
        return statistics.median(
            end - start for start, end in pairs if any(low <= start and end <= high for low, high in spans)
        )


def measure(folder: Path, size: int) -> list[Row]:
    """All rows."""
    rounds, turns = ROUNDS[size]
    slow = f"{STARTUP_S:g} s"
    cases: list[tuple[str, float, int | str]] = [("no start-up", 0.0, 0), (f"{slow}, prepared", STARTUP_S, 1)]
    if size > QUICK:
        cases += [(slow, STARTUP_S, 0), (f"{slow}, forked, rank 0", STARTUP_S, "auto")]
    stalls: dict[str, list[float]] = {case: [] for case, _, _ in cases}
    rows: list[Row] = []
    for number in range(rounds):
        for case, startup_s, prepared in cases:
            run = Run(folder / f"{number}-{startup_s:g}-{prepared}", startup_s, prepared)
            with run.workers:
                stalls[case].append(run.stall())
                say(f"{case}: stall {stalls[case][-1]:.3f} s")
                if prepared == 1 and number == rounds - 1:
                    rows += _meanwhile(run, turns)
    medians = {case: statistics.median(found) for case, found in stalls.items()}
    rows = [Row(case, "stall, median", stall, "s") for case, stall in medians.items()] + rows
    for case, startup_s, prepared in cases:
        if startup_s and prepared:
            rows.append(at_most(case, "stall / no start-up", medians[case] / medians["no start-up"], "", FACTOR_TARGET))
    return rows


def _meanwhile(run: Run, turns: int) -> list[Row]:
    """What a standby costs while it waits, and while it is prepared."""
    run.when(lambda: len(run.events("prepared")) > 1)
    pid = run.events("prepared")[-1].fields["pid"]
    spans: dict[signal.Signals, list[tuple[float, float]]] = {signal.SIGCONT: [], signal.SIGSTOP: []}
    begun, used = time.time(), _processor_s(pid)
    for turn in range(2 * turns):
        which = signal.SIGSTOP if turn % 2 else signal.SIGCONT
        os.kill(pid, which)
        begin = time.time()
        time.sleep(1.0)
        spans[which].append((begin, time.time()))
    os.kill(pid, signal.SIGCONT)
    share = 100 * (_processor_s(pid) - used) / (time.time() - begun)
    preparing = [(event.time - event.fields["took_s"], event.time) for event in run.events("prepared")]
    waits, stopped = run.step_s(spans[signal.SIGCONT]), run.step_s(spans[signal.SIGSTOP])
    case = "a standby waits"
    return [
        at_most(case, "step, against a stopped one", waits / stopped, "", SLOWER_TARGET),
        at_most(case, "processor time of the standby", share, "% of a core", 100 * (SLOWER_TARGET - 1)),
        Row(case, "its memory", run.events("prepared")[-1].fields["bytes"] / (1 << 20), "MiB"),
        Row("a standby is prepared", "step, against one that waits", run.step_s(preparing) / waits, ""),
    ]


def _processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> int:
    parser = arguments("startup", "Stall of a failure in a script that starts slowly, with and without a hot standby.")
    options = begin(parser)
    with scratch() as folder:
        rows = measure(folder, options.size)
    return finish(rows, options)


if __name__ == "__main__":
    sys.exit(main())

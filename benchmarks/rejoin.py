"""How long the others stop when a replacement is admitted, by size of the model; a part of ``benchmarks.reroute_ddp``.

Two workers run ``shared_steps``; one is killed (SIGKILL) several times, and its replacement is admitted. Measured is
for how long the other stands still (``stall_s`` of the event ``admitted``), and how much longer the step takes in which
that happens than the median of those that follow. The state is copied while the other trains, or when it stands still:
as with any optimizer that is not torch's own.
"""

from __future__ import annotations

import os
import signal
import statistics
from pathlib import Path

from benchmarks.common import QUICK, Row, Workers, at_most, say, scratch
from benchmarks.recovery_traces import Job, end

SCRIPT = Path(__file__).with_name("rejoin_worker.py")
#: Millions of parameters.
SIZES = (1, 10, 50)
#: Steps before the first kill, and after each admitting.
STEPS = 5
KILLS = (1, 1, 3)
WORKERS = 2
#: The stop with the largest model, in stops with the smallest.
TARGET = 2.0
_ENV = {"SWIFT_RECOVERY_ON_FAILURE": "reroute", "SWIFT_RECOVERY_REROUTE_REDUCTION": "ordered"}
_FAILED = 1


class Run(Job):
    """A job under way.

    Args:
        millions: of parameters.
        copied: the state is copied while the others train.
        folder: for its files.
    """

    def __init__(self, millions: int, copied: bool, folder: Path) -> None:
        self.name = f"{millions} M parameters, {'copied' if copied else 'standing still'}"
        out = folder / self.name.replace(" ", "_").replace(",", "")
        out.mkdir()
        args = ["--out", str(out), "--layers", str(millions), *(["--own"] if not copied else [])]
        super().__init__(Workers("swift", SCRIPT, args, out, env=_ENV, nproc=WORKERS))

    def measure(self, kills: int) -> tuple[list[float], list[float], float]:
        """Seconds of each stop, by how much each step was longer, and a step."""
        stops, longer, steps = [], [], []
        for number in range(kills):
            self.until(max(self.ends(), default=0) + STEPS)
            os.kill(self.traces.lines[_FAILED][-1]["pid"], signal.SIGKILL)
            self.when(lambda seen=number: len(self.events("admitted")) > seen)
            at = self.events("admitted")[-1].time
            before = max(step for step, end in self.ends().items() if end <= at)
            self.until(before + 1 + STEPS)
            ends = self.ends()
            steps.append(statistics.median(ends[each + 1] - ends[each] for each in range(before + 1, before + STEPS)))
            longer.append(ends[before + 1] - ends[before] - steps[-1])
            stops.append(self.events("admitted")[-1].fields["stall_s"])
        end(self.workers, max(self.ends()) + 5)
        return stops, longer, statistics.median(steps)


def rows(size: int) -> list[Row]:
    """Rows of a run of this size."""
    found, stops = [], dict[tuple[int, bool], float]()
    sizes = SIZES[: 1 if size == QUICK else None]
    for millions in sizes:
        for copied in (False, True):
            with scratch() as folder:
                run = Run(millions, copied, folder)
                with run.workers:
                    seconds, longer, step = run.measure(KILLS[size])
            stops[millions, copied] = stop = statistics.median(seconds)
            found.append(Row(run.name, "stop at re-join", 1e3 * stop, "ms"))
            found.append(Row(run.name, "stop at re-join / step", stop / step, "steps"))
            found.append(Row(run.name, "step longer by", statistics.median(longer) / step, "steps"))
            texts = [", ".join(f"{each:.3f}" for each in some) for some in (seconds, longer)]
            say(f"{run.name}: stops {texts[0]} s, steps longer by {texts[1]} s, step {step:.3f} s")
    for copied in (False, True) if len(sizes) > 1 else ():
        ratio = stops[sizes[-1], copied] / stops[sizes[0], copied]
        name, metric = "copied" if copied else "standing still", f"stop at re-join, {sizes[-1]} M / {sizes[0]} M"
        found.append(at_most(name, metric, ratio, "ratio", TARGET if copied else None))
    return found

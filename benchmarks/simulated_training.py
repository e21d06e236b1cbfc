"""Total time of a training of days, over that without failures, by system and mean time between failures.

All systems see the same failures. The place of a failed worker is filled after the start-up of the user's program,
which who waits for the replacement waits for too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from benchmarks.simulate.choices import SystemTimes, systems
from benchmarks.simulate.engine import merge, simulate
from benchmarks.simulate.generators import exponential
from benchmarks.simulate.layout import Layout
from benchmarks.simulate.rerouting import MeasuredStalls
from benchmarks.simulate.trace import HOUR_S

#: Systems compared, by their names in ``choices``.
COMPARED = ("replace", "reroute", "checkfreq", "horovod", "torchrun", "torchft")


@dataclass(frozen=True)
class Training:
    """A data-parallel training.

    The defaults are a job whose step takes 2 s and whose state is written in 10 s, with the stalls measured here. Its
    ``overhead`` is that of the demo GPT-2 on CPU.

    Attributes:
        layout: workers, and micro-batches of each in a step.
        times: of the systems compared; ``restart_s`` is torchrun's measured restart and reading the checkpoint.
        measured: of this system.
        startup_s: the user's program from its start to its loop.
    """

    layout: Layout = Layout(16, 1, 4, step_s=2.0)
    times: SystemTimes = SystemTimes(write_s=10.0, restart_s=5.76 + 10.0, snapshot_s=1.0)
    measured: MeasuredStalls = field(default_factory=lambda: MeasuredStalls(overhead=1.003))
    startup_s: float = 30.0


@dataclass(frozen=True)
class TotalTime:
    """Total time over that of the same training without failures and without any system."""

    system: str
    mtbf_h: float
    ratio: float


def total_time(
    training: Training, mtbfs_h: Sequence[float], days: float = 30.0, seeds: int = 8, compared: Sequence[str] = COMPARED
) -> list[TotalTime]:
    """Simulate ``seeds`` traces of so many days for each mean time between failures of the job, in hours."""
    found = []
    for mtbf_h in mtbfs_h:
        known = systems(training.layout, training.times, training.measured, mtbf_h * HOUR_S)
        repair_h = training.startup_s / HOUR_S
        traces = [exponential(training.layout.workers, days * 24, mtbf_h, repair_h, seed) for seed in range(seeds)]
        for name in compared:
            system = known[name]()
            result = merge([simulate(trace, system) for trace in traces])
            found.append(TotalTime(system.name, mtbf_h, 1 / result.useful))
    return found


def worst_case(training: Training) -> Training:
    """The same with this system's largest measured overhead of data parallelism: an MLP with little to compute."""
    return replace(training, measured=replace(training.measured, overhead=1.10))

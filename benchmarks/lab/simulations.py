"""Simulated jobs as a table and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.figures import new_figure
from benchmarks.simulate.engine import SimulationResult
from shared_core.report.text import columns


def format_results(results: Sequence[SimulationResult], fault_free: float | None = None) -> str:
    """A row for each system, as shares of the time; ``fault_free``, in samples/s, adds the average throughput."""
    header = ["system", "useful", "stalled", "waiting", "work lost", "average live workers"]
    rows = [[*header, "samples/s"] if fault_free is not None else header]
    for one in results:
        row = [one.system, f"{one.useful:.4f}", f"{one.stalled_s / one.seconds:.4f}"]
        row += [f"{one.waiting_s / one.seconds:.4f}", f"{one.lost / one.seconds:.4f}", f"{_live(one):.1f}"]
        rows.append([*row, f"{one.useful * fault_free:.2f}"] if fault_free is not None else row)
    return columns(rows)


def result_to_dict(one: SimulationResult) -> dict[str, Any]:
    """A result as plain data, without its segments."""
    return {
        "system": one.system,
        "workers": one.workers,
        "seconds": one.seconds,
        "useful": one.useful,
        "stalled_s": one.stalled_s,
        "waiting_s": one.waiting_s,
        "lost_work_s": one.lost,
        "failures": one.failures,
        "average_live": _live(one),
    }


def draw_results(results: Sequence[SimulationResult], path: Path) -> None:
    """Draw live workers and the throughput of each system over time; the suffix of ``path`` tells the format.

    Raises:
        MissingExtra: if matplotlib is not installed.
        OSError: if the file cannot be written.
        ValueError: if the format is unknown.
    """
    figure = new_figure((10, 6))
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(1, 3))
    for index, one in enumerate(results):
        hours = [time / 3600 for segment in one.segments for time in (segment.start_s, segment.end_s)]
        if not index:
            above.plot(hours, [segment.live for segment in one.segments for _ in range(2)], color="black")
        rates = [segment.rate for segment in one.segments for _ in range(2)]
        below.plot(hours, rates, label=f"{one.system}: {one.useful:.3f}", linewidth=1)
    above.set_ylabel("live workers")
    below.set_ylabel("throughput / without failures")
    below.set_xlabel("hours")
    below.set_ylim(bottom=0)
    below.legend(loc="lower left", fontsize="small")
    figure.savefig(path)


def _live(one: SimulationResult) -> float:
    return sum(live * seconds for live, (seconds, _) in one.by_live.items()) / one.seconds

"""Traces and systems by name, as ``swiftctl lab simulate`` takes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.simulate import generators
from benchmarks.simulate.bamboo import Bamboo
from benchmarks.simulate.checkpoints import CHECKFREQ_OVERHEAD, CheckpointRestart, TorchFT, young
from benchmarks.simulate.engine import System
from benchmarks.simulate.layout import Layout
from benchmarks.simulate.oobleck import Oobleck
from benchmarks.simulate.rerouting import CheckpointInterval, FaultScaled, MeasuredStalls, ReCycle, ThisSystem
from benchmarks.simulate.trace import HOUR_S, Trace, gcp_trace, read_trace
from shared_core.errors import ConfigError


@dataclass(frozen=True)
class SystemTimes:
    """Seconds that systems need, besides what was measured of this one.

    The defaults of ``restart_s``, ``commit_restart_s`` and ``quorum_s`` were measured on 2 cores with a small model,
    for torchrun, an in-memory commit as in Elastic Horovod, and torchft. The others are given.

    Attributes:
        write_s: stall of a checkpoint.
        restart_s: from a failure until all train again from a checkpoint.
        interval_s: work between checkpoints; None for Young's.
        snapshot_s: stall of a copy of the state in memory.
        commit_s: work between such copies, where they are what a job goes back to.
        commit_restart_s: from a failure until all train again from one.
        quorum_s: torchft's stall.
        layers: of the model, for Oobleck.
        reconfigure_s: Oobleck's stall.
        copy_s: moving a worker's state to another.
    """

    write_s: float = 5.0
    restart_s: float = 5.76
    interval_s: float | None = None
    snapshot_s: float = 0.5
    commit_s: float = 60.0
    commit_restart_s: float = 3.23
    quorum_s: float = 10.3
    layers: int = 32
    reconfigure_s: float = 10.0
    copy_s: float = 0.0


def systems(
    layout: Layout, times: SystemTimes, measured: MeasuredStalls, mtbf_s: float
) -> dict[str, Callable[[], System]]:
    """Every system by the name it is chosen by; ``mtbf_s`` is for the best time between checkpoints."""
    every_s = times.interval_s or young(times.write_s, mtbf_s)
    saved = CheckpointInterval(every_s, times.restart_s)
    background_s = times.snapshot_s / CHECKFREQ_OVERHEAD
    return {
        "reroute": lambda: ThisSystem(layout, "reroute", measured, saved),
        "replace": lambda: ThisSystem(layout, "replace", measured, saved),
        "replay": lambda: ThisSystem(layout, "replay", measured, saved),
        "recycle": lambda: ReCycle(layout, checkpoints=saved),
        "fault-scaled": lambda: FaultScaled(layout),
        "oobleck": lambda: Oobleck(
            layout, times.layers, reconfigure_s=times.reconfigure_s, copy_s=times.copy_s, checkpoints=saved
        ),
        "bamboo": lambda: Bamboo(layout, checkpoints=saved),
        "torchrun": lambda: CheckpointRestart(
            layout, every_s, times.write_s, times.restart_s, name="torchrun, checkpoints"
        ),
        "torchrun-elastic": lambda: CheckpointRestart(
            layout, every_s, times.write_s, times.restart_s, elastic=True, name="torchrun MIN:MAX, checkpoints"
        ),
        # Written beside training: a failure before it is complete costs that much work more, on average.
        "checkfreq": lambda: CheckpointRestart(
            layout, background_s, times.snapshot_s, times.restart_s + times.write_s, name="CheckFreq"
        ),
        "horovod": lambda: CheckpointRestart(
            layout,
            times.commit_s,
            times.snapshot_s,
            times.commit_restart_s,
            elastic=True,
            joins_between=True,
            name="Elastic Horovod",
        ),
        "torchft": lambda: TorchFT(layout, times.quorum_s),
    }


#: What ``swiftctl lab simulate`` compares if nothing is chosen.
DEFAULT = ("reroute", "replace", "recycle", "fault-scaled", "oobleck", "bamboo", "torchrun")


def choose(names: list[str], known: dict[str, Callable[[], System]]) -> list[System]:
    """The systems of these names.

    Raises:
        ConfigError: for a name that is not known.
    """
    for name in names:
        if name not in known:
            raise ConfigError(f"unknown system {name!r}: choose from {', '.join(known)}")
    return [known[name]() for name in names]


def trace_of(spec: str, workers: int | None, hours: float | None, seed: int) -> Trace:
    """The trace ``gcp``, of a generator (``exponential:2``, 24 h if not said otherwise), or of a file.

    Args:
        spec: which.
        workers: needed for a generator, and a file that does not say it.
        hours: the length of a generated trace; a longer one is cut.
        seed: for what is drawn.

    Raises:
        ConfigError: if there is no such trace, its file cannot be read, or workers and hours are missing.
    """
    if spec.partition(":")[0] in generators.FORMS:
        if workers is None:
            raise ConfigError(f"trace {spec!r} needs --workers")
        return generators.parse(spec, workers, hours if hours is not None else 24.0, seed)
    found = gcp_trace(seed) if spec == "gcp" else read_trace(Path(spec), workers, seed)
    return replace(found, duration_s=min(found.duration_s, hours * HOUR_S)) if hours is not None else found


def mtbf_of(trace: Trace) -> float:
    """Mean seconds between failures of a trace; its whole length if there is none."""
    return trace.duration_s / max(1, sum(1 for event in trace.events if event.lost))


def layout_of(workers: int, stages: int, micro_batches: int, step_s: float) -> Layout:
    """Equal pipelines of all workers.

    Raises:
        ConfigError: if the stages do not divide the workers.
    """
    if stages < 1 or workers % stages:
        raise ConfigError(f"{workers} workers do not make whole pipelines of {stages} stages; change --stages")
    return Layout(workers // stages, stages, micro_batches, step_s)

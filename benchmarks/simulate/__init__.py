"""Discrete events on failure traces: what a system makes of a job that loses workers. See ``docs/design/simulator.md``.

All is plain data and pure functions; nothing but the standard library is imported. What concerns checkpoint policies
(``placing``, ``checkpointed_runs``) needs NumPy and is imported by itself.
"""

from benchmarks.simulate.bamboo import Bamboo
from benchmarks.simulate.checkpoints import CheckpointRestart, TorchFT, young
from benchmarks.simulate.engine import FailureCost, ProgressSegment, SimulationResult, System, merge, simulate
from benchmarks.simulate.layout import Layout, Pattern, period, rerouted, spread
from benchmarks.simulate.oobleck import Oobleck
from benchmarks.simulate.rerouting import CheckpointInterval, FaultScaled, MeasuredStalls, ReCycle, ThisSystem
from benchmarks.simulate.trace import Trace, TraceEvent, from_counts, gcp_trace, read_trace

__all__ = [
    "Bamboo",
    "CheckpointRestart",
    "CheckpointInterval",
    "FailureCost",
    "TraceEvent",
    "FaultScaled",
    "Layout",
    "MeasuredStalls",
    "Oobleck",
    "Pattern",
    "ReCycle",
    "SimulationResult",
    "ProgressSegment",
    "System",
    "ThisSystem",
    "TorchFT",
    "Trace",
    "from_counts",
    "gcp_trace",
    "merge",
    "period",
    "read_trace",
    "rerouted",
    "simulate",
    "spread",
    "young",
]

"""Discrete events on failure traces: what a system makes of a job that loses workers. See ``docs/design/simulator.md``.

All is plain data and pure functions; nothing but the standard library is imported. What concerns checkpoint policies
(``placing``, ``checkpointed_runs``) needs NumPy and is imported by itself.
"""

from shared_core.simulate.bamboo import Bamboo
from shared_core.simulate.checkpoints import CheckpointRestart, TorchFT, young
from shared_core.simulate.engine import FailureCost, ProgressSegment, SimulationResult, System, merge, simulate
from shared_core.simulate.layout import Layout, Pattern, period, rerouted, spread
from shared_core.simulate.oobleck import Oobleck
from shared_core.simulate.rerouting import CheckpointInterval, FaultScaled, MeasuredStalls, ReCycle, ThisSystem
from shared_core.simulate.trace import Trace, TraceEvent, from_counts, gcp_trace, read_trace

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

"""Discrete events on failure traces: what a system makes of a job that loses workers. See ``docs/simulator.md``.

All is plain data and pure functions; nothing but the standard library is imported. What concerns checkpoint policies
(``placing``, ``lives``) needs NumPy and is imported by itself.
"""

from shared_core.simulate.bamboo import Bamboo
from shared_core.simulate.checkpoints import CheckpointRestart, TorchFT, daly, young
from shared_core.simulate.engine import Cost, Result, Segment, System, merge, simulate
from shared_core.simulate.layout import Layout, Pattern, period, rerouted, spread
from shared_core.simulate.oobleck import Oobleck
from shared_core.simulate.rerouting import Checkpoints, FaultScaled, Measured, ReCycle, ThisSystem
from shared_core.simulate.trace import Event, Trace, from_counts, gcp_trace, read_trace

__all__ = [
    "Bamboo",
    "CheckpointRestart",
    "Checkpoints",
    "Cost",
    "Event",
    "FaultScaled",
    "Layout",
    "Measured",
    "Oobleck",
    "Pattern",
    "ReCycle",
    "Result",
    "Segment",
    "System",
    "ThisSystem",
    "TorchFT",
    "Trace",
    "daly",
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

"""What is published of ReCycle, Oobleck and Bamboo on the trace of GCP spot instances (SOSP 2024, arXiv 2405.14009).

Digitised from the author's talk and poster (github.com/Swapnil-Gandhi/Swapnil-Gandhi.github.io). The paper's own tables
may differ. Micro-batches and batch size of the runs are not known.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

PIPELINES, STAGES = 6, 4

#: Share of the trace's time by number of live workers.
SHARES = {24: 0.181, 23: 0.250, 22: 0.194, 21: 0.219, 20: 0.037, 19: 0.019, 18: 0.037, 17: 0.025, 16: 0.019, 15: 0.019}


@dataclass(frozen=True)
class Model:
    """A model and what was measured of it, in samples/s.

    Attributes:
        name: as published; the larger one is called 3.5B in the talk, and 6.7B on the poster with the same curves.
        parameters: number of parameters; the poster's, where the two differ.
        layers: of the GPT-3 of this size.
        batch: samples of a step, from Oobleck's evaluation of the same model (artifact of SOSP 2023): ReCycle's is not
            known.
        oobleck_s: reconfiguration, from the simulator of Oobleck's artifact.
        fault_free: throughput without failures, by system.
        average: over the whole trace.
        average_20: over times with at least 20 live workers.
    """

    name: str
    parameters: float
    layers: int
    batch: int
    oobleck_s: float
    fault_free: Mapping[str, float]
    average: Mapping[str, float]
    average_20: Mapping[str, float]


def _from_table(values: Mapping[int, float]) -> float:
    """Average for N >= 20 of a system that has one throughput for each N."""
    return sum(SHARES[n] * values[n] for n in values) / sum(SHARES[n] for n in values)


LARGE = Model(
    "GPT-3 3.5B (6.7B on the poster)",
    6.7e9,
    32,
    1024,
    10.0,
    {"ReCycle": 11.34, "Oobleck": 11.34},
    {"ReCycle": 10.80, "Oobleck": 9.01},
    {"ReCycle": 11.023, "Oobleck": 9.243},  # means of the digitised samples with N >= 20
)
MEDIUM = Model(
    "GPT-3 350M",
    0.35e9,
    24,
    819,
    3.0,
    {"ReCycle": 20.55, "Oobleck": 20.55, "Bamboo": 13.41},
    {"ReCycle": 19.49, "Oobleck": 18.10, "Bamboo": 11.86},
    # Not digitised sample by sample: ReCycle takes one value for each N, the others' averages are not known.
    {"ReCycle": _from_table({24: 20.55, 23: 20.46, 22: 19.47, 21: 19.24, 20: 18.47})},
)

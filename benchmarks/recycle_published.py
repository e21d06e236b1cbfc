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
        sustained: best sustained throughput with 24, 23, 22, 21 and 20 live workers.
        oobleck_change_min: minutes of steady throughput that a change cost Oobleck, on average.
        average_20: over times with at least 20 live workers, where it is known.
    """

    name: str
    parameters: float
    layers: int
    batch: int
    oobleck_s: float
    fault_free: Mapping[str, float]
    average: Mapping[str, float]
    sustained: Mapping[str, tuple[float, ...]]
    oobleck_change_min: float
    average_20: Mapping[str, float]


def _average(sustained: tuple[float, ...]) -> float:
    """Average for N >= 20 of a system that has one throughput for each N."""
    shares = [SHARES[24 - missing] for missing in range(len(sustained))]
    return sum(share * value for share, value in zip(shares, sustained, strict=True)) / sum(shares)


RECYCLE_MEDIUM = (20.55, 20.46, 19.47, 19.24, 18.47)
LARGE = Model(
    "GPT-3 3.5B (6.7B on the poster)",
    6.7e9,
    32,
    1024,
    10.0,
    {"ReCycle": 11.34, "Oobleck": 11.34},
    {"ReCycle": 10.80, "Oobleck": 9.01},
    {"ReCycle": (11.34, 11.29, 10.89, 10.68, 10.47), "Oobleck": (11.34, 11.22, 10.52, 9.82, 9.47)},
    1.39,
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
    {
        "ReCycle": RECYCLE_MEDIUM,
        "Oobleck": (20.55, 20.47, 19.19, 17.90, 17.27),
        "Bamboo": (13.41, 12.78, 12.20, 11.84, 11.32),
    },
    0.48,
    # Not digitised sample by sample: ReCycle takes one value for each N; the averages of the others are not known.
    {"ReCycle": _average(RECYCLE_MEDIUM)},
)

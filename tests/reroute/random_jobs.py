"""Failures and durations by chance."""

from __future__ import annotations

import random

from shared_core.schedule.schedule import PlannedWorker, Topology
from shared_core.schedule.timing import StageTimes, Times


def some_failed(topology: Topology, rng: random.Random, number: int) -> list[PlannedWorker]:
    """At most so many failures that can be survived."""
    failed: list[PlannedWorker] = []
    for worker in rng.sample(topology.workers(), min(number, len(topology.workers()))):
        if sum(one.stage == worker.stage for one in failed) < topology.pipelines - 1:
            failed.append(worker)
    return failed


def some_times(topology: Topology, rng: random.Random) -> Times:
    """Other durations for each stage, and for some workers."""
    stages = tuple(_some(rng) for _ in range(topology.stages))
    differ = rng.sample(topology.workers(), min(rng.choice([0, 0, 1, 2]), len(topology.workers())))
    own = tuple((worker, _some(rng)) for worker in sorted(differ))
    return Times(stages, rng.choice([0.0, 0.3]), data_apart=rng.random() < 0.5, own=own)


def _some(rng: random.Random) -> StageTimes:
    return StageTimes(
        rng.uniform(0.5, 2), rng.uniform(0.5, 2), rng.uniform(0, 2), rng.uniform(0, 4), rng.choice([None, 2.5])
    )

"""What a checkpoint costs, from step times."""

from __future__ import annotations

import random

import pytest

from shared_core.checkpoint.cost import Cost, CostMeter


def trained(meter: CostMeter, steps: int, seconds: float, draw: random.Random) -> None:
    for _ in range(steps):
        meter.step(seconds * draw.uniform(0.95, 1.05))


def test_stall_and_slowdown_are_found_again() -> None:
    """20 of 100 steps take 0.13 s instead of 0.1 s: 0.6 s beside a stall of 0.25 s."""
    meter, draw = CostMeter(), random.Random(3)
    for save in range(6):
        trained(meter, 80, 0.1, draw)
        meter.begun(save, 0.25)
        trained(meter, 20, 0.13, draw)
        meter.durable(save, 2.6)
    assert meter.step_s == pytest.approx(0.1, rel=0.02)
    assert meter.cost is not None
    assert (meter.cost.stall_s, meter.cost.persist_s) == (0.25, 2.6)
    assert meter.cost.slowdown_s == pytest.approx(0.6, abs=0.1)
    assert meter.cost.seconds == meter.cost.stall_s + meter.cost.slowdown_s


def test_what_is_not_known_yet() -> None:
    meter = CostMeter()
    assert meter.cost is None and meter.step_s == 0.0
    meter.begun(10, 0.5)
    meter.step(0.1)
    meter.durable(10, 0.2)
    assert meter.cost == Cost(0.5, 0.0, 0.2), "no normal step to compare with"
    meter.durable(11, 0.3)
    meter.begun(20, 9.0)
    meter.failed(20)
    meter.durable(20, 0.3)
    assert meter.cost == Cost(0.5, 0.0, 0.2), "only those that were written"

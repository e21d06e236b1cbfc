"""Every group that a framework makes is a fault-tolerant one, and is called gloo."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from harness import Jobs

SCRIPT = str(Path(__file__).parent / "scripts" / "groups.py")


def test_every_group_is_swift_and_recorded_as_gloo(jobs: Jobs) -> None:
    for needed in ("accelerate", "deepspeed"):
        if importlib.util.find_spec(needed) is None:
            pytest.skip(f"{needed} is not installed")
    result = jobs.run(SCRIPT, timeout_s=110)
    assert result.status == 0, result.tail()
    for report in result.reports.values():
        kinds = report["extra"]["kinds"]
        assert len(kinds) >= 12 and any(name.startswith("deepspeed") for name in kinds), kinds
        assert {name: (swift, backend) for name, (swift, backend, _) in kinds.items()} == dict.fromkeys(
            kinds, (True, "gloo")
        )

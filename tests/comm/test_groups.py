"""Every group that a framework makes is a fault-tolerant one, and is called gloo."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import Jobs

SCRIPT = str(Path(__file__).parent / "scripts" / "groups.py")


@pytest.mark.parametrize("args", [[], pytest.param(["deepspeed"], id="deepspeed")])
def test_every_group_is_swift_and_recorded_as_gloo(args: list[str], jobs: Jobs) -> None:
    if args:
        pytest.importorskip("importlib.util").find_spec("deepspeed") or pytest.skip("deepspeed is not installed")
    result = jobs.run(SCRIPT, args=args, timeout_s=110)
    assert result.status == 0, result.tail()
    for report in result.reports.values():
        kinds = report["extra"]["kinds"]
        assert len(kinds) >= 10 and bool(args) == any(name.startswith("deepspeed") for name in kinds)
        assert {name: (swift, backend) for name, (swift, backend, _) in kinds.items()} == dict.fromkeys(
            kinds, (True, "gloo")
        )

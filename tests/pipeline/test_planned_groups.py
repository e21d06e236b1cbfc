"""Log groups that are planned while the job runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import Jobs

from shared_core.pipeline.grouping import Machine
from shared_core.pipeline.planned_groups import profile_of
from shared_core.testing import Fault
from shared_core.testing.runner import compare, unconfirmed


def test_the_profile_of_measured_stages() -> None:
    rows = [[1.0, 10.0, 5.0], [3.0, 20.0, 5.5], [2.0, 30.0, 5.0], [1.0, 0.0, 5.0]]
    each = profile_of(rows, 1, 100, 8)
    assert [machine.compute_s for machine in each.machines] == [1.0, 3.0, 2.0, 1.0]
    assert each.boundary_bytes == (10, 20, 30) and each.step_s == 5.5 and each.micro_batches == 8
    pairs = profile_of(rows, 2, 100, 8)
    assert pairs.machines == (Machine(3.0, stages=2), Machine(2.0, stages=2)) and pairs.boundary_bytes == (20,)


@pytest.mark.nightly
def test_without_room_for_logs_all_start_again_together(jobs: Jobs, tmp_path: Path) -> None:
    """A boundary's messages take 3 steps x 4 micro-batches x 2 x 4 rows x 32 numbers x 4 bytes = 12 288 bytes."""
    args = ["--stages", "3", "--steps", "12"]
    env = {"CHECKPOINT_DIR": str(tmp_path), "CHECKPOINT_EVERY_STEPS": "3", "LOG_GROUPS": "plan"}
    env |= {"LOG_BUDGET_BYTES": "13000"}
    reference = jobs.reference("pipe.py", nproc=3, args=args)
    options = {f"SWIFT_RECOVERY_{name}": value for name, value in env.items()}
    result = jobs.run("pipe.py", nproc=3, args=args, env=options, faults=[Fault(1, 11, "pipe.forward", "SIGKILL", 2)])
    assert not unconfirmed(result), result.tail()
    compare(result, reference)
    planned = [event.fields["groups"] for event in result.events if event.kind == "groups"]
    assert planned and all(len(groups) == 2 for groups in planned), planned  # room for one boundary of two
    group = next(group for group in planned[-1] if 1 in group)
    left = {event.rank for event in result.events if event.kind == "together"}
    assert left == set(group) - {1}, (planned, left)

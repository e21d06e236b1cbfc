"""Log groups that are planned while the job runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import Jobs
from pipelines import logging, run, starts

from shared_core.faults import Fault
from shared_core.pipeline.grouping import ChainMachine
from shared_core.pipeline.planned_groups import profile_of
from tests.support.runner import JobResult


def test_the_profile_of_measured_stages() -> None:
    rows = [[1.0, 10.0], [3.0, 20.0], [2.0, 30.0], [1.0, 0.0]]
    each = profile_of(rows, 1, 100, 8)
    assert [machine.compute_s for machine in each.machines] == [1.0, 3.0, 2.0, 1.0]
    assert each.boundary_bytes == (10, 20, 30) and each.micro_batches == 8
    pairs = profile_of(rows, 2, 100, 8)
    assert pairs.machines == (ChainMachine(3.0, stages=2), ChainMachine(2.0, stages=2)) and pairs.boundary_bytes == (
        20,
    )


#: A boundary's messages take 4 steps x 4 micro-batches x 2 x 4 rows x 32 numbers x 4 bytes = 16 384 bytes, and a
#: third of the budget is for them, so one of the two is logged: by turns the other, as the slow stage moves with each
#: checkpoint.
BASE = ("--stages", "3", "--steps", "16", "--uneven", "0.02")
OPTIONS = {"log.groups": "plan", "log.budget_bytes": 97000}
PLANS = [[[0], [1, 2]], [[0, 1], [2]], [[0], [1, 2]], [[0, 1], [2]]]


def planned(result: JobResult) -> list[list[list[int]]]:
    return [event.fields["groups"] for event in result.kinds("groups")]


@pytest.mark.nightly
def test_groups_that_change(jobs: Jobs, tmp_path: Path) -> None:
    """Between ranks 1 and 2 there are logs of the steps before the checkpoint, and none since; rank 2 has dropped the
    first messages since from its memory."""
    failed = [Fault(1, 15, "pipe.forward", "SIGKILL", 2)]
    result = run(jobs, failed, BASE, nproc=3, env=logging(tmp_path, 4, **OPTIONS), together=[2])
    assert planned(result) == PLANS and sorted(starts(result)) == [(1, 12), (2, 12)]


@pytest.mark.nightly
def test_a_replacement_that_has_measured_nothing(jobs: Jobs, tmp_path: Path) -> None:
    """Rank 0, which has committed the checkpoint, fails as the ranks tell each other what they have measured. The
    replacement has nothing to tell, and the plan stays."""
    failed = [Fault(0, 12, "collective.before", "SIGKILL", 2)]
    result = run(jobs, failed, BASE, nproc=3, env=logging(tmp_path, 4, **OPTIONS))
    assert starts(result) == [(0, 12)]
    assert planned(result) in (PLANS[:2], [*PLANS[:2], PLANS[3]]), planned(result)  # none at 12; at 16 as at 8


@pytest.mark.nightly
def test_after_a_restart_the_plan_stays(jobs: Jobs, tmp_path: Path) -> None:
    """At the step boundary of the checkpoint from which all start again nobody has measured anything. Rank 1 needs what
    neither neighbour has: rank 0's log is gone, and rank 2 is in its group."""
    failed, damage = [Fault(1, 15, "pipe.forward", "SIGKILL", 2)], ("--damage", "0", "13", "remove log")
    env = logging(tmp_path, 4, log_segment_bytes=4096, **OPTIONS)
    result = run(jobs, failed, BASE, nproc=3, env=env, extra=damage, restarts=1, together=[0, 2])
    assert planned(result) in (
        PLANS[:3],
        PLANS,
    )  # at 16 as before the restart; perhaps planned again, on a busy machine

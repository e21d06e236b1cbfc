"""Groups that the batches make: a replacement names them as the others do, and has those that are still there."""

from __future__ import annotations

import pytest
from harness import Jobs

from shared_core.faults import Fault

#: Before a group's first operation, between two of them, and at the step boundary.
FAULTS = {
    "before": Fault(1, 8, "collective.before", "SIGKILL"),
    "between": Fault(2, 9, "collective.after", "SIGKILL", nth=2),
    "boundary": Fault(0, 10, "step_boundary", "SIGKILL"),
}


@pytest.mark.parametrize(
    ("where", "how"),
    [
        ("between", "kept"),
        pytest.param("before", "destroyed", marks=pytest.mark.nightly),
        pytest.param("boundary", "left", marks=pytest.mark.nightly),
    ],
)
def test_a_worker_is_replaced(how: str, where: str, jobs: Jobs) -> None:
    jobs.check("groups_in_a_loop.py", nproc=3, args=[how], faults=[FAULTS[where]])


@pytest.mark.nightly
@pytest.mark.timeout(5400)
def test_a_profiler_sees_200_loops_of_groups(jobs: Jobs) -> None:
    """A profiler once read what a work had let go of: now and then a worker died by SIGSEGV, with no failure."""
    for _ in range(200):
        result = jobs.run("profiled_groups.py", nproc=4, timeout_s=600.0)
        assert result.status == 0 and not result.kinds("failed"), result.tail()

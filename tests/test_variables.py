"""What a script holds in plain variables is put back in a replacement, or refused by name."""

from __future__ import annotations

import pytest
from harness import Jobs

from shared_core.faults import Fault
from shared_core.testing.runner import Mismatch
from shared_core.worker.variables.variables import OFF

#: Parts of the script, and where workers fail in them: an epoch has ten batches and eleven step boundaries.
CASES: dict[str, list[Fault]] = {
    "breaks": [Fault(1, 25, "bucket", "SIGKILL")],
    "mean": [Fault(0, 17, "bucket", "SIGKILL")],
    "kinds": [Fault(1, 8, "forward", "SIGKILL"), Fault(0, 27, "update.before", "SIGKILL")],
    "order": [Fault(1, 16, "bucket", "SIGKILL")],
    "left": [Fault(0, 19, "forward", "SIGKILL")],
}


@pytest.mark.parametrize("part", CASES)
def test_what_a_script_counts_is_put_back(part: str, jobs: Jobs) -> None:
    jobs.check("variables.py", args=[part], faults=CASES[part])


@pytest.mark.parametrize("part", ["mean", "kinds", "order"])
def test_without_the_capture_it_is_not(part: str, jobs: Jobs) -> None:
    """The control of the tests above."""
    with pytest.raises(Mismatch):
        jobs.check("variables.py", args=[part], faults=CASES[part], env={OFF: "1"})

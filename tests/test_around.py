"""Loops that go through ``enumerate``, ``zip`` and others: at the same place in a replacement, or refused by name."""

from __future__ import annotations

import pytest
from harness import Jobs, few

from shared_core.faults import Fault
from tests.support.runner import compare

#: Passes have twenty batches, and one step boundary more; with Accelerate ten.
FAILED = [Fault(1, 8, "bucket", "SIGKILL"), Fault(0, 27, "forward", "SIGKILL")]
_WITH_ACCELERATE = [Fault(1, 4, "bucket", "SIGKILL"), Fault(0, 16, "forward", "SIGKILL")]


@pytest.mark.parametrize("way", few(["generator", "zip", "both", "map"], "both"))
def test_what_counts_for_itself_continues_at_its_place(way: str, jobs: Jobs) -> None:
    jobs.check("around.py", args=[way], faults=FAILED)


@pytest.mark.nightly
def test_the_same_with_accelerate(jobs: Jobs) -> None:
    jobs.check("around.py", args=["zip", "--accelerate"], faults=_WITH_ACCELERATE)


CANNOT = {"first": "zip", "islice": "islice", "own": "enumerate"}


@pytest.mark.parametrize("way", few(CANNOT, "first-zip"))
def test_what_cannot_continue_is_refused_by_name(way: str, jobs: Jobs) -> None:
    result = jobs.run("around.py", args=[way], faults=[Fault(1, 5, "bucket", "SIGKILL")])
    compare(result, jobs.reference("around.py", args=[way]))
    [restart] = result.kinds("restart")
    expected = f"goes through {CANNOT[way]}(), whose place cannot be given to another process"
    assert "the loop at around.py:" in restart.fields["reason"] and expected in restart.fields["reason"]
    assert f"{expected}: a failed worker is not replaced" in result.stderr

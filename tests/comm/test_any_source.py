"""Receives from any source, and sums of sparse tensors: a replacement gets the same, in the same order."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import Jobs

from shared_core.faults import Fault

SCRIPT = str(Path(__file__).parent / "scripts" / "any_source.py")


@pytest.mark.nightly
@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_is_replaced(rank: int, jobs: Jobs) -> None:
    """The order in which messages come is of this run alone; what all ranks have of it is the same."""
    result = jobs.run(SCRIPT, nproc=3, faults=[Fault(rank, 4, "collective.before", "SIGKILL")])
    assert result.status == 0 and len(result.kinds("failed")) == 1 and not result.kinds("restart"), result.tail()
    assert len({tuple(report["digests"].items()) for report in result.reports.values()}) == 1, result.tail()

"""Rows of the support table that nothing else tests, each with a failure in it."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import Jobs

from shared_core.faults import Fault

SCRIPT = str(Path(__file__).parent / "rows.py")
#: Row, faults. An epoch has six batches on two ranks.
CASES: dict[str, tuple[str, list[Fault]]] = {
    "max_time": ("max_time", [Fault(0, 4, "bucket", "SIGKILL")]),
    "torch.compile": ("compile", [Fault(1, 8, "update.after", "SIGKILL")]),
    "torch.compile of the module": ("compile_whole", [Fault(1, 8, "update.after", "SIGKILL")]),
    "stateful loader": ("stateful", [Fault(1, 9, "forward", "SIGKILL")]),
    "average in buffers": ("average", [Fault(0, 8, "update.after", "SIGKILL")]),
    "during test": ("test", [Fault(0, 12, "validation", "SIGKILL", nth=2)]),
    "after test": ("test", [Fault(1, 15, "bucket", "SIGKILL")]),
    "after predict": ("predict", [Fault(0, 15, "bucket", "SIGKILL")]),
}


@pytest.mark.nightly
@pytest.mark.parametrize(
    "name",
    CASES,
)
def test_row_with_a_failure(name: str, jobs: Jobs) -> None:
    row, faults = CASES[name]
    jobs.check(SCRIPT, faults=faults, args=[row])

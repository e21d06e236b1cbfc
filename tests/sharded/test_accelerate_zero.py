"""Accelerate with DeepSpeed's ZeRO loses workers and ends, on every rank, with the bits of the run in which nobody
failed.
"""

from __future__ import annotations

import pytest
from harness import Jobs

from shared_core.faults import Fault

pytest.importorskip("deepspeed")

TWICE = [Fault(1, 3, "collective.before", "SIGKILL"), Fault(0, 9, "forward", "SIGKILL")]


#: Arguments of the script, workers, faults. Two epochs have six batches and seven boundaries each.
CASES: dict[str, tuple[list[str], int, list[Fault]]] = {
    "whole_0": (["--stage", "0"], 2, TWICE),
    "bf16_1": (["--bf16", "--stage", "1"], 2, TWICE),
    # The end of a step of three micro-batches, and its middle.
    "accumulate_2": (
        ["--accumulate", "3", "--stage", "2"],
        2,
        [Fault(1, 6, "collective.before", "SIGKILL"), Fault(0, 9, "forward", "SIGKILL")],
    ),
    "a_reduction_2": (["--stage", "2"], 4, [Fault(2, 4, "collective.before", "SIGKILL", nth=2)]),
    "save_3": (["--save", "--stage", "3"], 2, TWICE),
    "in_the_update_3": (["--stage", "3"], 4, [Fault(1, 5, "update.during", "SIGKILL", nth=3)]),
}


@pytest.mark.nightly
@pytest.mark.parametrize("case", CASES)
def test_a_failure_changes_no_bit(case: str, jobs: Jobs) -> None:
    args, nproc, faults = CASES[case]
    result = jobs.check("acc_zero.py", nproc=nproc, args=args, faults=faults)
    assert {report["extra"]["engine"] for report in result.reports.values()} == {"SwiftZeroEngine"}

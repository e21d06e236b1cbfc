"""Accelerate with DeepSpeed's ZeRO loses workers and ends, on every rank, with the bits of the run in which nobody
failed.
"""

from __future__ import annotations

import pytest
from harness import Jobs, few
from shard_failures import EVERYWHERE

from shared_core.faults import Fault

pytest.importorskip("deepspeed")

STAGES = ["1", "2", "3"]
#: Two epochs have six batches and seven boundaries each. An update has an operation for each part that a rank keeps.
LOSSES: dict[str, tuple[int, list[Fault]]] = {
    **EVERYWHERE,
    "in_the_update": (4, [Fault(1, 5, "update.during", "SIGKILL", nth=3)]),
    "stopped": (2, [Fault(1, 3, "collective.before", "SIGSTOP")]),
    "a_reduction": (4, [Fault(2, 4, "collective.before", "SIGKILL", nth=2)]),
    "two_at_once": (4, [Fault(0, 4, "collective.before", "SIGKILL"), Fault(3, 4, "forward", "SIGKILL")]),
}
CASES = {f"{stage}-{name}": (stage, name) for stage in STAGES for name in LOSSES}
#: What the script is told, and whether two micro-batches of three take no step.
WAYS: dict[str, tuple[list[str], bool]] = {
    **{f"bf16_{stage}": (["--bf16", "--stage", stage], False) for stage in STAGES},
    **{f"accumulate_{stage}": (["--accumulate", "3", "--stage", stage], True) for stage in STAGES},
    **{f"save_{stage}": (["--save", "--stage", stage], False) for stage in STAGES},
}


@pytest.mark.parametrize("case", few(CASES, "2-a_reduction", "3-in_the_update"))
def test_a_failure_changes_no_bit(case: str, jobs: Jobs) -> None:
    stage, name = CASES[case]
    nproc, faults = LOSSES[name]
    result = jobs.check("acc_zero.py", nproc=nproc, args=["--stage", stage], faults=faults)
    assert {report["extra"]["engine"] for report in result.reports.values()} == {"SwiftZeroEngine"}


@pytest.mark.parametrize("way", few(WAYS, "save_3"))
def test_ways_of_training(way: str, jobs: Jobs) -> None:
    args, accumulates = WAYS[way]
    faults = [Fault(1, 3, "collective.before", "SIGKILL"), Fault(0, 9, "forward", "SIGKILL")]
    if accumulates:  # the end of a step, and its middle
        faults[0] = Fault(1, 6, "collective.before", "SIGKILL")
    jobs.check("acc_zero.py", args=args, faults=faults)


def test_stage_0_divides_nothing(jobs: Jobs) -> None:
    faults = [Fault(1, 3, "collective.before", "SIGKILL"), Fault(0, 9, "forward", "SIGKILL")]
    jobs.check("acc_zero.py", args=["--stage", "0"], faults=faults)

"""DeepSpeed's ZeRO without a pipeline loses workers and ends, on every rank, with the bits of stock DeepSpeed without a
loss: parameters, masters and moments of all shards, counters, generators."""

from __future__ import annotations

import pytest
from harness import Jobs, few
from shard_failures import EVERYWHERE

from shared_core.faults import Fault

pytest.importorskip("deepspeed")

STAGES = ["0", "1", "2", "3"]
#: Two epochs have six batches and seven boundaries each, the last one for the end. With stages 1 and 2 a step reduces
#: six times, sums the norm, and gathers; with stage 3 it gathers more than ten times before its first reduction.
LOSSES: dict[str, tuple[int, list[Fault]]] = {
    **EVERYWHERE,
    "a_reduction": (4, [Fault(2, 4, "collective.before", "SIGKILL", nth=4)]),
    "after_a_reduction": (2, [Fault(0, 9, "collective.after", "SIGKILL", nth=3)]),
    "late_in_the_step": (4, [Fault(3, 5, "collective.before", "SIGKILL", nth=8)]),
    "in_the_first_batch": (2, [Fault(1, 1, "collective.after", "SIGKILL", nth=6)]),
    "the_replacement_in_the_same_batch": (
        2,
        [
            Fault(1, 5, "update.during", "SIGKILL", nth=9),
            Fault(1, 5, "collective.after", "SIGKILL", nth=5, incarnation=1),
        ],
    ),
}
#: What each makes of DeepSpeed: how it is started, and the optimizer that it has then.
WAYS: dict[str, tuple[list[str], str]] = {
    "whole_0": (["--stage", "0"], "AdamW"),
    "bf16_1": (["--stage", "1", "--bf16"], "DeepSpeedZeroOptimizer"),
    "bf16_3": (["--stage", "3", "--bf16"], "DeepSpeedZeroOptimizer_Stage3"),
    "bf16_accumulated_in_fp32_1": (["--stage", "1", "--bf16", "--accumulate-fp32"], "BF16_Optimizer"),
    "accumulate_2": (["--stage", "2", "--accumulate", "3"], "DeepSpeedZeroOptimizer"),
    "accumulate_3": (["--stage", "3", "--accumulate", "3"], "DeepSpeedZeroOptimizer_Stage3"),
    "grow_2": (["--stage", "2", "--grow"], "DeepSpeedZeroOptimizer"),
    "reduce_2": (["--stage", "2", "--reduce"], "DeepSpeedZeroOptimizer"),
    "scattered_3": (["--stage", "3", "--scattered"], "DeepSpeedZeroOptimizer_Stage3"),
    "evaluate_3": (["--stage", "3", "--evaluate"], "DeepSpeedZeroOptimizer_Stage3"),
    "judge_3": (["--stage", "3", "--evaluate", "--judge"], "DeepSpeedZeroOptimizer_Stage3"),
    "borrow_3": (["--stage", "3", "--borrow"], "DeepSpeedZeroOptimizer_Stage3"),
    "freeze_3": (["--stage", "3", "--freeze"], "DeepSpeedZeroOptimizer_Stage3"),
    "skip_1": (["--stage", "1", "--skip"], "DeepSpeedZeroOptimizer"),
    "skip_3": (["--stage", "3", "--skip"], "DeepSpeedZeroOptimizer_Stage3"),
}
#: With stage 0, which is DDP, a step has too few collectives for some.
CASES = {
    f"{stage}-{name}": (stage, name)
    for stage in STAGES
    for name, (_, faults) in LOSSES.items()
    if stage != "0" or all(each.nth == 1 for each in faults)
}


@pytest.mark.parametrize("case", few(CASES, "3-in_the_update"))
def test_a_failure_changes_no_bit(case: str, jobs: Jobs) -> None:
    stage, name = CASES[case]
    nproc, faults = LOSSES[name]
    result = jobs.check("zero.py", nproc=nproc, args=["--stage", stage], faults=faults)
    assert {report["extra"]["engine"] for report in result.reports.values()} == {"SwiftZeroEngine"}


@pytest.mark.nightly
@pytest.mark.parametrize("way", WAYS)
def test_ways_of_training(way: str, jobs: Jobs) -> None:
    args, optimizer = WAYS[way]
    faults = [Fault(1, 5, "collective.before", "SIGKILL", nth=2), Fault(0, 9, "update.during", "SIGKILL", nth=7)]
    if "--accumulate" in args:  # the end of a step, and its middle
        faults = [Fault(1, 6, "collective.before", "SIGKILL", nth=2), Fault(0, 9, "forward", "SIGKILL")]
    if "--grow" in args:  # in the second step of twice the batch
        faults = [Fault(1, 5, "collective.before", "SIGKILL", nth=2), Fault(0, 11, "update.during", "SIGKILL", nth=7)]
    if "--judge" in args:  # the third forward of an evaluation, and the batch after it
        faults = [Fault(1, 7, "collective.before", "SIGKILL", nth=9), Fault(0, 8, "update.during", "SIGKILL")]
    result = jobs.check("zero.py", args=args, faults=faults)
    assert {report["extra"]["optimizer"] for report in result.reports.values()} == {optimizer}

"""Loops under Lightning's Fabric lose workers and end with the bits of stock Fabric under plain gloo."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from harness import Jobs, few
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from shared_core.faults import Fault
from tests.support.digest import digest
from tests.support.runner import compare

#: Arguments of the script, faults. On two ranks an epoch has six batches and seven boundaries, the last one for its
#: end.
CASES: dict[str, tuple[list[str], list[Fault]]] = {
    "middle_of_an_epoch": ([], [Fault(1, 10, "bucket", "SIGKILL"), Fault(0, 18, "update.during", "SIGKILL", nth=9)]),
    "evaluated_before": (["--evaluate-first"], [Fault(1, 10, "bucket", "SIGKILL"), Fault(0, 14, "forward", "SIGKILL")]),
    "accumulate": (["--accumulate", "2"], [Fault(1, 11, "forward", "SIGKILL"), Fault(0, 18, "bucket", "SIGKILL")]),
    "again": (["--again"], [Fault(1, 10, "bucket", "SIGKILL"), Fault(0, 18, "forward", "SIGKILL")]),
    "bar": (["--bar"], [Fault(1, 10, "bucket", "SIGKILL")]),
    "sharded": (
        ["--sharded"],
        [Fault(1, 10, "collective.before", "SIGKILL", nth=3), Fault(0, 18, "update.during", "SIGKILL", nth=5)],
    ),
}


@pytest.mark.parametrize("name", few(CASES, "middle_of_an_epoch"))
def test_a_failure_changes_no_bit(name: str, jobs: Jobs) -> None:
    args, faults = CASES[name]
    jobs.check("fabric.py", faults=faults, args=args)


def test_loader_workers_that_persist_in_evaluations_are_not_put_back(jobs: Jobs) -> None:
    result = jobs.run("fabric.py", faults=[Fault(1, 10, "bucket", "SIGKILL")], args=["--lasting"])
    compare(result, jobs.reference("fabric.py", args=["--lasting"]))
    assert len(result.kinds("restart")) == 1 and "Make it with persistent_workers=False" in result.stderr, result.tail()


@pytest.mark.nightly
def test_a_sharded_checkpoint_of_fabric_has_the_same_bits(jobs: Jobs, tmp_path: Path) -> None:
    """A worker fails after the first of them, and another one while one is written."""
    faults = [Fault(1, 10, "forward", "SIGKILL"), Fault(0, 14, "collective.before", "SIGKILL", nth=3)]
    found = []
    for name in ("with", "without"):
        (tmp_path / name).mkdir()
        args = ["--sharded", "--save", str(tmp_path / name)]
        if name == "with":
            result = jobs.run("fabric.py", faults=faults, args=args)
        else:
            compare(result, jobs.reference("fabric.py", args=args))
        found.append({step: restored(tmp_path / name / f"{step}.ckpt") for step in (6, 12, 18)})
    assert found[0] == found[1]


def restored(folder: Path) -> str:
    """Digest of what a checkpoint of shards holds."""
    whole = folder.with_suffix(".pt")
    dcp_to_torch_save(folder, whole)
    return digest(torch.load(whole, weights_only=False))


@pytest.mark.nightly
def test_when_all_fail_they_continue_from_a_checkpoint(jobs: Jobs, tmp_path: Path) -> None:
    env = {"SWIFT_RECOVERY_CHECKPOINT_DIR": str(tmp_path), "SWIFT_RECOVERY_CHECKPOINT_EVERY_STEPS": "4"}
    both = [Fault(rank, 10, "bucket", "SIGKILL") for rank in (0, 1)]
    result = jobs.run("fabric.py", faults=both, env=env)
    compare(result, jobs.reference("fabric.py"))
    assert len(result.kinds("restart")) == 1, result.tail()


@pytest.mark.nightly
def test_a_part_of_a_loader_is_refused(jobs: Jobs) -> None:
    result = jobs.run("fabric.py", args=["--cut"])
    assert result.status == 1 and "this islice reads from a loader that Fabric has set up" in result.stderr


@pytest.mark.nightly
def test_fewer_workers_are_refused(jobs: Jobs) -> None:
    result = jobs.run("fabric.py", env={"SWIFT_RECOVERY_ON_FAILURE": "shrink"})
    assert result.status == 1 and "under Fabric a failed worker is replaced" in result.stderr, result.tail()

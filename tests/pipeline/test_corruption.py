"""Logs and checkpoints that are damaged before a stage fails: the result is right all the same, or it is said why all
workers go back to a checkpoint, and then the result is right too.

A rank damages its own files at the step boundary of a batch. The rank that fails later in the batch has had a message
of it by then, so the damage is always there first.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import Jobs
from pipelines import logging, resolutions, run, starts

from shared_core.faults import Fault

BASE = ("--stages", "4", "--steps", "10", "--tied", "--clip", "0.5")
#: Checkpoints at step boundaries 3 and 6; rank 1 damages its log as the script's step 6 (step boundary 7) begins.
DAMAGE = ("--damage", "1", "6")
FAILED = Fault(2, 8, "pipe.forward", "SIGKILL", nth=2)


def env(folder: Path, **more: object) -> dict[str, str]:
    """Small segments, so that there are several."""
    return logging(folder, log_segment_bytes=4096, **more)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["flip log", "remove segments"])
def test_the_log_that_a_replacement_needs_is_damaged(jobs: Jobs, tmp_path: Path, kind: str) -> None:
    result = run(jobs, [FAILED], BASE, env=env(tmp_path), extra=[*DAMAGE, kind], restarts=1)
    (restart,) = result.kinds("restart")
    reason = restart.fields["reason"]
    assert "the log on disk cannot be read" in reason or "no longer keeps it" in reason, result.tail()
    assert "continues from the checkpoint at step boundary 6" in result.stderr, result.tail()


@pytest.mark.nightly
def test_the_log_is_whole_without_its_index(jobs: Jobs, tmp_path: Path) -> None:
    result = run(jobs, [FAILED], BASE, env=env(tmp_path), extra=[*DAMAGE, "remove index"])
    assert starts(result) == [(2, 6)] and resolutions(result) == {"replay"}


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["truncate log", "remove index", "remove log"])
def test_the_log_of_a_failed_stage_is_damaged(jobs: Jobs, tmp_path: Path, kind: str) -> None:
    """Its replacement reads the log again and fills the gaps in its replay, so it serves another replacement
    afterwards.
    """
    faults = [
        Fault(1, 7, "pipe.backward", "SIGKILL", nth=2),
        Fault(2, 8, "pipe.backward", "SIGKILL", nth=2),
    ]
    result = run(jobs, faults, BASE, env=env(tmp_path), extra=[*DAMAGE, kind])
    assert starts(result) == [(1, 6), (2, 6)] and resolutions(result) == {"replay"}


@pytest.mark.nightly
def test_neighbours_fail_and_the_log_of_one_is_damaged(jobs: Jobs, tmp_path: Path) -> None:
    faults = [Fault(rank, 7, "step_boundary", "SIGKILL") for rank in (1, 2)]
    result = run(jobs, faults, BASE, env=env(tmp_path), extra=[*DAMAGE, "flip log"])
    assert sorted(starts(result)) == [(1, 6), (2, 6)]


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["flip checkpoint 6", "remove part 6"])
def test_the_newest_checkpoint_is_damaged(jobs: Jobs, tmp_path: Path, kind: str) -> None:
    result = run(jobs, [FAILED], BASE, env=env(tmp_path), extra=[*DAMAGE, kind])
    assert starts(result) == [(2, 3)] and resolutions(result) == {"replay"}


@pytest.mark.nightly
def test_both_checkpoints_are_damaged(jobs: Jobs, tmp_path: Path) -> None:
    damage = [*DAMAGE, "flip checkpoint 6", *DAMAGE, "flip checkpoint 3"]
    result = run(jobs, [FAILED], BASE, env=env(tmp_path), extra=damage, restarts=1)
    assert "continues from the checkpoint" not in result.stderr, result.tail()


@pytest.mark.nightly
def test_the_newest_checkpoint_and_a_log_are_damaged(jobs: Jobs, tmp_path: Path) -> None:
    damage = [*DAMAGE, "flip checkpoint 6", *DAMAGE, "flip log"]
    result = run(jobs, [FAILED], BASE, env=env(tmp_path), extra=damage, restarts=1)
    assert "continues from the checkpoint at step boundary 3" in result.stderr, result.tail()


@pytest.mark.nightly
def test_no_room_for_the_log(jobs: Jobs, tmp_path: Path) -> None:
    """Training continues, the user is told once, and a later loss costs what has been done since the checkpoint."""
    args = (*BASE, "--rows", "256")
    options = logging(tmp_path)
    run(jobs, [], args, env=options, extra=[*DAMAGE, "no room"])
    again = logging(tmp_path / "again")
    result = run(jobs, [FAILED], args, env=again, extra=[*DAMAGE, "no room"], restarts=1)
    told = [line for line in result.stderr.splitlines() if "messages are no longer logged" in line]
    assert len(told) == 1 and "rank 1" in told[0] and "make room" in told[0], result.tail()
    assert "continues from the checkpoint at step boundary 6" in result.stderr, result.tail()

"""Checkpoints under Accelerate and ``transformers.Trainer``: the whole job is killed, and the same
command continues.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from checkpointed import committed, continued_from, finished, running
from harness import Jobs

from tests.support.runner import compare


def carry_on(jobs: Jobs, folder: Path, script: str, args: Sequence[str], stop: int, newest: int) -> None:
    """Kill the job as it stands at a batch with a committed checkpoint, and start the same command again."""
    with running(jobs, script, args, env={"STOP_AT": str(stop)}) as job:
        job.until(lambda: job.boundaries() > stop and newest in committed(folder))
        job.kill()
        job.end()
    with running(jobs, script, args) as job:
        result = finished(job)
    assert continued_from(result) == {newest}, result.tail()
    rest = [each for each in args if not each.startswith(("--checkpoints", "--every", "--files"))]
    compare(result, jobs.reference(script, args=rest))


def test_a_loop_of_accelerate(jobs: Jobs, tmp_path: Path) -> None:
    """The checkpoint is at the end of an epoch of ten batches: the boundary after them has the next number."""
    carry_on(jobs, tmp_path, "acc.py", [f"--checkpoints={tmp_path}", "--every=11"], 15, 11)


@pytest.mark.nightly
def test_the_trainer_of_transformers(jobs: Jobs, tmp_path: Path) -> None:
    """``save_strategy`` beside it does what it always does."""
    ours, files = tmp_path / "ours", tmp_path / "files"
    carry_on(jobs, ours, "hf_trainer.py", [f"--checkpoints={ours}", f"--files={files}"], 13, 10)
    stock = jobs.reference("hf_trainer.py").out / "checkpoints"
    assert sorted(path.name for path in files.iterdir()) == sorted(path.name for path in stock.iterdir())


@pytest.mark.nightly
def test_the_policy_hears_every_loss(jobs: Jobs, tmp_path: Path) -> None:
    extra = jobs.run("acc.py", args=[f"--checkpoints={tmp_path}"]).reports[0]["extra"]
    assert [boundary for boundary, _ in extra["noted"]] == list(range(21 - len(extra["noted"]), 21))
    assert len(extra["noted"]) > 10 and extra["noted"][-1][1] == extra["last"]


@pytest.mark.nightly
def test_a_pipeline(jobs: Jobs, tmp_path: Path) -> None:
    carry_on(jobs, tmp_path, "acc_pipe.py", ["--tied", f"--checkpoints={tmp_path}"], 5, 4)

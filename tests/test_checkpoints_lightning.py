"""``SwiftCheckpoint``: the whole job is killed; the same command continues, and all it leaves is as without that."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from checkpointed import committed, continued_from, finished, running
from harness import Jobs

from tests.support.runner import JobResult, compare

SCRIPT = "lit_checkpoint.py"


def reference(jobs: Jobs, folder: Path, *args: str) -> JobResult:
    """Stock Lightning."""
    return jobs.run(SCRIPT, args=[f"--files={folder / 'stock'}", *args], launcher="plain")


def killed_and_continued(jobs: Jobs, folder: Path, args: Sequence[str], stop: int, newest: int) -> JobResult:
    """Kill the job as it stands at a batch with a committed checkpoint, and start the same command again.

    Args:
        jobs: starts them.
        folder: for all files.
        args: of the script.
        stop: the batch.
        newest: step boundary of the checkpoint.
    """
    full = [f"--files={folder / 'files'}", f"--checkpoints={folder / 'ours'}", *args]
    with running(jobs, SCRIPT, full, env={"STOP_AT": str(stop)}) as job:
        job.until(lambda: job.boundaries() > stop and newest in committed(folder / "ours"))
        job.kill()
        job.end()
    with running(jobs, SCRIPT, full) as job:
        result = finished(job)
    assert continued_from(result) == {newest}, result.tail()
    return result


@pytest.mark.nightly
def test_the_same_command_continues(jobs: Jobs, tmp_path: Path) -> None:
    """From a checkpoint at the end of an epoch."""
    result = killed_and_continued(jobs, tmp_path, ["--every=21", "--durable=asynchronous"], 33, 21)
    stock = reference(jobs, tmp_path)
    assert result.reports[0]["extra"]["files"] == stock.reports[0]["extra"]["files"]
    compare(result, stock)


@pytest.mark.nightly
def test_files_that_a_checkpoint_counts_as_written_are(jobs: Jobs, tmp_path: Path) -> None:
    """``ModelCheckpoint`` saves in the background, to a slow disk; all is killed right after the checkpoint."""
    result = killed_and_continued(jobs, tmp_path, ["--every=21", "--durable=slow", "--best=3"], 21, 21)
    stock = reference(jobs, tmp_path, "--best=3")
    assert result.reports[0]["extra"]["files"] == stock.reports[0]["extra"]["files"]
    compare(result, stock)


@pytest.mark.nightly
def test_the_policy_hears_every_loss(jobs: Jobs, tmp_path: Path) -> None:
    args = [f"--files={tmp_path / 'files'}", f"--checkpoints={tmp_path / 'ours'}", "--price=0.001"]
    extra = jobs.run(SCRIPT, args=args).reports[0]["extra"]
    heard = dict(extra["noted"])
    logged = {int(row["step"]) + 1: float(row["loss"]) for row in extra["rows"] if "loss" in row}
    both = heard.keys() & logged.keys()
    assert len(heard) > 40 and len(both) > 20 and max(heard) == 60
    assert all(heard[boundary] == pytest.approx(logged[boundary], rel=1e-6) for boundary in both)


@pytest.mark.nightly
def test_a_pipeline(jobs: Jobs, tmp_path: Path) -> None:
    script, args = "lit_pipe.py", [f"--checkpoints={tmp_path / 'ours'}"]
    env = {"SWIFT_TEST_FILES": str(tmp_path)}
    with running(jobs, script, args, env=env | {"STOP_AT": "5"}) as job:
        job.until(lambda: job.boundaries() > 5 and 4 in committed(tmp_path / "ours"))
        job.kill()
        job.end()
    with running(jobs, script, args, env=env) as job:
        result = finished(job)
    assert continued_from(result) == {4}, result.tail()
    stock = jobs.reference(script)
    parts = set(stock.reports[0]["digests"]) - {"callbacks", "checkpoints"}  # they have paths
    compare(result, stock, sorted(parts))

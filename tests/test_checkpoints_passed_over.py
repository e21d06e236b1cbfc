"""A restart says which checkpoints it passes over, and starts from scratch only where the user says so."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpointed import committed, continued_from, options, running, saved
from harness import Jobs

from shared_core.checkpoint import store
from tests.support.runner import JobResult

pytestmark = pytest.mark.timeout(300)

SCRIPT, ARGS = "plain_ddp.py", ["--norm", "--steps", "400"]
RESTART = ["--on-failure=restart"]


def killed(jobs: Jobs, folder: Path, nproc: int = 1) -> list[Path]:
    """Two checkpoints, or more, of a job of which nothing is left; their folders, the oldest first."""
    with running(jobs, SCRIPT, ARGS, env=options(folder, 5), launcher_args=RESTART, nproc=nproc) as job:
        job.until(lambda: len(committed(folder, nproc)) > 1, 60)
        job.kill()
        job.end()
    return [each.path for each in saved(folder)]


def started(jobs: Jobs, folder: Path, boundaries: int = 0, nproc: int = 1, **more: str) -> JobResult:
    """The same command again, until it has passed so many step boundaries (0: to its end)."""
    env = options(folder, 5, **more)
    with running(jobs, SCRIPT, ARGS, env=env, launcher_args=RESTART, nproc=nproc) as job:
        if boundaries:
            job.until(lambda: job.boundaries() >= boundaries, 60)
            job.kill()
        return job.end()


def passed_over(result: JobResult) -> list[str]:
    """What it says of those that it cannot use."""
    return [line for line in result.stderr.splitlines() if "is passed over: " in line]


def empty(step: Path) -> None:
    os.truncate(step / store.MANIFEST, 0)


def newer_format(step: Path) -> None:
    manifest = json.loads(json.loads((step / store.MANIFEST).read_bytes())["manifest"])
    (step / store.MANIFEST).write_bytes(store._seal(manifest | {"format": 2}))


def cut(step: Path) -> None:
    os.truncate(step / "rank0", 100)


def flipped(step: Path) -> None:
    path = step / "replicated0.safetensors"
    data = bytearray(path.read_bytes())
    data[-9] ^= 4
    path.write_bytes(data)


def grown(step: Path) -> None:
    os.truncate(step / "rank0", 60 << 30)  # sparse


def pipe(step: Path) -> None:
    (step / "rank0").unlink()
    os.mkfifo(step / "rank0")


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "an empty manifest": (empty, "the manifest cannot be read"),
    "a newer format": (newer_format, "its format is 2, this version reads 1"),
    "a part cut short": (cut, "fails its checksum"),
    "a flipped bit": (flipped, "fails its checksum"),
    "a part that has grown": (grown, "is larger than the "),
    "a part that is a pipe": (pipe, "not a regular file"),
}


@pytest.mark.nightly
def test_each_kind_of_damage_to_the_newest_is_said_and_that_to_all_ends_the_job(jobs: Jobs, tmp_path: Path) -> None:
    """By turns, on copies of the same two checkpoints."""
    folder = tmp_path / "checkpoints"
    steps = killed(jobs, folder)
    shutil.copytree(folder, tmp_path / "kept")
    for name, (damage, reason) in DAMAGE.items():
        for which in (steps[-1:], steps):
            shutil.rmtree(folder)
            shutil.copytree(tmp_path / "kept", folder)
            for step in which:
                damage(step)
            alone = len(which) == 1
            older, newest = (store.step_of(each.name) or 0 for each in steps[-2:])
            result = started(jobs, folder, older + 3 if alone else 0)
            said = passed_over(result)
            assert all(reason in line for line in said), (name, result.tail())
            assert str(newest) in said[0] and str(steps[1].parent) in said[0], (name, result.tail())
            if alone:
                assert len(said) == 1 and continued_from(result) == {older}, (name, result.tail())
            else:
                assert result.status == 1 and len(said) == len(steps), result.tail()
                assert "checkpoint.resume='never'" in result.stderr and "none can be used" in result.stderr
                assert not continued_from(result) and all(step.exists() for step in steps)


def test_from_scratch_where_the_user_says_so(jobs: Jobs, tmp_path: Path) -> None:
    steps = killed(jobs, tmp_path)
    for step in steps:
        empty(step)
    result = started(jobs, tmp_path, 3, checkpoint_resume="never")
    assert not continued_from(result) and all(step.exists() for step in steps)
    assert "is passed over: the manifest cannot be read" in result.stderr and "starts from scratch" in result.stderr

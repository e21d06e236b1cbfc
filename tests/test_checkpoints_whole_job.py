"""The whole job is killed, or told to end: the same command, started again, continues by itself."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest
from checkpointed import Running, committed, continued_from, finished, options, running
from harness import Jobs

from shared_core.protocol.worker_messages import ENDING
from tests.support.runner import JobResult, compare

SCRIPT, ARGS = "plain_ddp.py", ["--norm", "--steps", "240"]
LONG = ["--norm", "--steps", "400"]
RESTART = ["--on-failure=restart"]


def kill_and_continue(jobs: Jobs, folder: Path, seed: int) -> None:
    """Kill the job at two random moments of its training, and let it end then."""
    chance = random.Random(seed)
    env = options(folder, every=chance.choice([1, 3, 10]))
    passed = 0
    for _ in range(2):
        with running(jobs, SCRIPT, ARGS, env=env, launcher_args=RESTART) as job:
            wanted = passed + chance.randrange(1, 90)
            job.until(lambda job=job, wanted=wanted: job.boundaries() >= wanted)  # type: ignore[misc]
            for _ in range(chance.randrange(3000)):  # not always as a batch begins
                pass
            job.kill()
            job.end()
        passed = max(committed(folder), default=0)
    newest = {passed} - {0}
    with running(jobs, SCRIPT, ARGS, env=env, launcher_args=RESTART) as job:
        result = finished(job)
    compare(result, jobs.reference(SCRIPT, args=ARGS))
    assert continued_from(result) == newest, result.tail()
    ran = {int(key.split()[1]) for report in result.reports.values() for key in report["counts"]}
    assert min(ran) == max(passed - 1, 0), (passed, min(ran))


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(100, 140))
def test_killed_at_many_random_moments(jobs: Jobs, tmp_path: Path, seed: int) -> None:
    kill_and_continue(jobs, tmp_path / "checkpoints", seed)


@pytest.mark.nightly
@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.nightly), 1])
def test_a_replacement_makes_checkpoints_of_the_run_that_the_others_continued_with(
    jobs: Jobs, tmp_path: Path, rank: int
) -> None:
    """It has not read the checkpoint from which they began."""
    env = options(tmp_path, every=5, checkpoint_resume="always")
    with running(jobs, SCRIPT, ARGS, env=env) as job:
        job.until(lambda: bool(committed(tmp_path)))
        job.kill()
        job.end()
    begins = committed(tmp_path)[-1]
    with running(jobs, SCRIPT, ARGS, env=env) as job:
        job.until(lambda: job.boundaries(rank) > begins + 10)
        os.kill(next(worker["pid"] for worker in job.workers() if worker["rank"] == rank), signal.SIGKILL)
        result = finished(job)
    compare(result, jobs.reference(SCRIPT, args=ARGS))
    assert [event.rank for event in result.kinds("failed")] == [rank], result.tail()
    assert continued_from(result) == {begins} and committed(tmp_path)[-1] >= 235, result.tail()
    with running(jobs, SCRIPT, ARGS, env=env) as job:
        assert not continued_from(finished(job)), "the run had ended"


def test_a_run_that_has_ended_well_is_not_continued(jobs: Jobs, tmp_path: Path) -> None:
    env, args = options(tmp_path, every=5), ["--norm", "--steps", "20"]
    for _ in range(2):
        with running(jobs, SCRIPT, args, env=env, launcher_args=RESTART) as job:
            result = finished(job)
        assert not continued_from(result), result.tail()
        compare(result, jobs.reference(SCRIPT, args=args))


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("number", "to_all"),
    [
        (signal.SIGTERM, False),
        pytest.param(signal.SIGUSR1, True, marks=pytest.mark.nightly),  # as SLURM does it
    ],
    ids=["SIGTERM", "SIGUSR1 to all"],
)
def test_told_to_end_nothing_is_lost(jobs: Jobs, tmp_path: Path, number: int, to_all: bool) -> None:
    """Within ten seconds, with no checkpoint due for long."""
    env, grace = options(tmp_path), "--shutdown-timeout=10"
    with running(jobs, SCRIPT, LONG, env=env, launcher_args=[*RESTART, grace]) as job:
        job.until(lambda: job.boundaries() >= 40 and bool(committed(tmp_path)))  # the policy's, to learn what it costs
        for pid in [job.pid, *(worker["pid"] for worker in job.workers() if to_all)]:
            os.kill(pid, number)
        reached = _boundaries_until_the_end(job)
        result = job.end(12.0)
    assert result.status == 1, result.tail()
    assert not result.kinds("failed"), result.tail()
    newest = committed(tmp_path)[-1]
    assert verdicts(result) == [
        f"the last checkpoint is committed, at step boundary {newest}: nothing is lost; the next start of "
        f"'plain_ddp.py --norm --steps 400' continues from step {newest}"
    ], result.tail()
    assert newest == reached, "batches were run that are in no checkpoint"
    with running(jobs, SCRIPT, LONG, env=env, launcher_args=[*RESTART, grace]) as job:
        again = finished(job)
    compare(again, jobs.reference(SCRIPT, args=LONG))
    assert continued_from(again) == {newest}, again.tail()


def verdicts(result: JobResult) -> list[str]:
    """What is said of the last checkpoint, once it is known."""
    lines = [line.removeprefix("[swift] ") for line in result.stderr.splitlines()]
    return [line for line in lines if line.startswith(("the last checkpoint", "nothing had to be written"))]


@pytest.mark.nightly
@pytest.mark.parametrize("again", [False, True], ids=["the grace runs out", "told twice"])
def test_told_to_end_while_storage_is_slow(jobs: Jobs, tmp_path: Path, again: bool) -> None:
    """The writer stands still, so the last checkpoint is not written: the one line says so, and what a start does."""
    env, args = options(tmp_path, every=10), [*RESTART, "--shutdown-timeout=3"]
    with running(jobs, SCRIPT, LONG, env=env, launcher_args=args) as job:
        job.until(lambda: len(committed(tmp_path)) > 1)
        spool = job.spool
        assert spool is not None
        os.kill(spool.status().pid, signal.SIGSTOP)
        reached = job.boundaries()
        job.until(lambda: job.boundaries() >= reached + 20)  # there is a snapshot that is not written
        os.kill(job.pid, signal.SIGTERM)
        if again:
            job.until(lambda: (job.folder or tmp_path).joinpath(ENDING).exists())
            os.kill(job.pid, signal.SIGTERM)
        result = job.end(20.0)
    newest = committed(tmp_path)[-1]
    (said,) = verdicts(result)
    boundary = int(said.removeprefix("the last checkpoint, at step boundary ").split(",")[0])
    assert boundary >= reached and newest < boundary, result.tail()
    following = f"the next start of 'plain_ddp.py --norm --steps 400' continues from step {newest}"
    assert said.endswith(f"was not written in time; {following}"), result.tail()
    with running(jobs, SCRIPT, LONG, env=env, launcher_args=args) as job:
        result = finished(job)
    compare(result, jobs.reference(SCRIPT, args=LONG))
    assert continued_from(result) == {newest}, result.tail()


def _boundaries_until_the_end(job: Running) -> int:
    """The highest step boundary that a rank passes before the job ends."""
    reached = 0
    while _alive(job.pid):
        reached = max(reached, *(job.boundaries(rank) for rank in range(2)))
    return reached


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False

"""A job continues from a checkpoint of another number of workers: every sample once, the same parameters."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from checkpointed import committed, continued_from, finished, options, running, saved
from harness import Jobs, few

from shared_core.checkpoint import image
from shared_core.worker.checkpoints.recovery_line import NAMES
from tests.support.digest import digest
from tests.support.runner import JobResult

RESTART = ["--on-failure=restart"]
#: Batches of an epoch with four, three and two workers: 240 samples in batches of four.
BATCHES = {4: 15, 3: 20, 2: 30}


def stop_and_continue(
    jobs: Jobs, folder: Path, script: str, workers: tuple[int, int], at: int, args: tuple[str, ...] = ()
) -> JobResult:
    """Kill a job that has a checkpoint at step boundary ``at``, and let it end with another number of workers.

    Each sample is to be used once an epoch, over both runs, and the second to begin with the parameters of the first.
    """
    env, (before, after) = options(folder, every=at), workers
    args = ("--epochs", "2", *args)
    with running(jobs, script, args, env=env | {"HOLD_AT": str(at + 1)}, launcher_args=RESTART, nproc=before) as job:
        job.until(lambda: at in committed(folder, before))
        job.kill()
        job.end()
    kept = parameters(folder, at)
    with running(jobs, script, args, env=env, launcher_args=RESTART, nproc=after) as job:
        result = finished(job)
    assert continued_from(result) == {at}, result.tail()
    assert f"which {before} workers have made" in result.stderr
    assert sorted(result.reports) == list(range(after)), result.tail()
    assert len({report["digests"]["all"] for report in result.reports.values()}) == 1, result.tail()
    for report in result.reports.values():
        extra = report["extra"]
        assert extra["first"] == kept, result.tail()
        assert extra["exact"] == [True, True] and extra["losses"][-1] < extra["losses"][0], (extra, result.tail())
    return result


def parameters(folder: Path, step: int) -> str:
    """Digest of the parameters in a checkpoint."""
    found = next(each for each in saved(folder) if each.step == step)
    tensors, metadata = image.load(found.path / "replicated0.safetensors")
    names = json.loads(metadata[NAMES])
    return digest([tensors[name] for name in names if not name.startswith("optimizer.")])


WAYS = {
    "plain": "resize.py",
    "lightning": "lit_resize.py",
    "accelerate": "acc_resize.py",
}
#: Workers before and after, and the step boundary of the checkpoint.
CHANGES = {
    "4 to 3": ((4, 3), 9),
    "2 to 4": ((2, 4), 9),
    "4 to 2 in the second epoch": ((4, 2), 22),
    "4 to 2 at the end of an epoch": ((4, 2), 0),
}


@pytest.mark.parametrize(
    ("way", "change"),
    [
        ("plain", "4 to 2 at the end of an epoch"),
        pytest.param("plain", "4 to 3", marks=pytest.mark.nightly),
        pytest.param("lightning", "2 to 4", marks=pytest.mark.nightly),
        pytest.param("accelerate", "4 to 2 in the second epoch", marks=pytest.mark.nightly),
    ],
)
def test_another_number_of_workers_continues(way: str, change: str, jobs: Jobs, tmp_path: Path) -> None:
    workers, at = CHANGES[change]
    # A plain loop has a step boundary after its last batch.
    at = at or BATCHES[workers[0]] + 1
    stop_and_continue(jobs, tmp_path, WAYS[way], workers, at)


SEEDED = {"SWIFT_RECOVERY_REPLAY_RANDOMNESS": "seeded"}
#: Stages before and after, and more arguments.
CUTS = {
    "2 to 4": ((2, 4), ()),
    "4 to 2 with tied layers and clipping": ((4, 2), ("--tied", "--clip", "0.1")),
}


@pytest.mark.nightly
@pytest.mark.parametrize("cut", CUTS)
def test_a_pipeline_is_repartitioned(cut: str, jobs: Jobs, tmp_path: Path) -> None:
    """With random numbers that belong to layers, what follows has the bits of the run that was not interrupted."""
    (before, after), more = CUTS[cut]
    args, at = ["--stages", "0", "--steps", "8", *more], 4
    env = options(tmp_path, every=at) | SEEDED
    with running(jobs, "pipe.py", args, env=env | {"HOLD_AT": str(at)}, launcher_args=RESTART, nproc=before) as job:
        job.until(lambda: at in committed(tmp_path, before))
        job.kill()
        job.end()
    with running(jobs, "pipe.py", args, env=env, launcher_args=RESTART, nproc=after) as job:
        result = finished(job)
    assert continued_from(result) == {at}, result.tail()
    whole = jobs.run("pipe.py", nproc=before, args=args, env=SEEDED)
    losses = whole.reports[0]["extra"]["losses"]
    assert len(losses) == 8 and len(set(losses)) == 8
    for report in result.reports.values():
        assert report["extra"]["losses"] == losses, result.tail()
        assert min(int(key.split()[1]) for key in report["counts"]) == at - 1


REFUSED = {
    "a stream": ("resize.py", ("--stream",), "a stream of items"),
    "dispatch_batches": ("acc_resize.py", ("--dispatch",), "rank 0 held batches for all"),
    "bf16": ("pipe.py", ("--stages", "0", "--bf16"), "in one piece"),
}


@pytest.mark.parametrize("name", few(REFUSED, "a stream"))
def test_what_cannot_be_exact_is_refused(name: str, jobs: Jobs, tmp_path: Path) -> None:
    """Nothing starts from scratch unasked, and what is there stays."""
    script, args, words = REFUSED[name]
    env = options(tmp_path, every=4)
    with running(jobs, script, args, env=env | {"HOLD_AT": "4"}, launcher_args=RESTART) as job:
        job.until(lambda: 4 in committed(tmp_path))
        job.kill()
        job.end()
    with running(jobs, script, args, env=env, launcher_args=RESTART, nproc=3) as job:
        result = job.end()
    assert result.status == 1 and words in result.stderr and "Start 2 workers" in result.stderr, result.tail()
    assert committed(tmp_path) == [4]

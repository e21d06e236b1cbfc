"""Sharded jobs of which nobody is left continue from their checkpoints: with the bits of the run in which nobody
failed, or with another number of workers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpointed import committed, continued_from, finished, options, running, saved
from harness import Jobs, few

from shared_core.encoding.plain import loads
from shared_core.faults import Fault
from tests.support.digest import digest
from tests.support.runner import compare

RESTART = ["--on-failure=restart"]
JOBS: dict[str, tuple[str, list[str]]] = {
    "fsdp2": ("sharded.py", []),
    "zero_3": ("zero.py", ["--stage", "3"]),
}


@pytest.mark.nightly
@pytest.mark.parametrize("kind", JOBS)
def test_killed_as_a_whole_it_continues_where_it_was(kind: str, jobs: Jobs, tmp_path: Path) -> None:
    script, args = JOBS[kind]
    args, env = [*args, "--epochs", "8"], options(tmp_path, every=5)
    with running(jobs, script, args, env=env, launcher_args=RESTART, nproc=4) as job:
        job.until(lambda: bool(committed(tmp_path, 4)), 60.0)
        job.kill()
        job.end()
    newest = committed(tmp_path, 4)[-1]
    with running(jobs, script, args, env=env, launcher_args=RESTART, nproc=4) as job:
        result = finished(job)
    compare(result, jobs.reference(script, nproc=4, args=args))
    assert continued_from(result) == {newest}, result.tail()


#: Those with more workers than two, and loops that are the frameworks' own.
RESTARTED: dict[str, tuple[int, str, list[str]]] = {
    **{kind: (4, script, args) for kind, (script, args) in JOBS.items()},
    "lightning": (2, "lit_sharded.py", []),
    "fabric": (2, "fabric.py", ["--sharded"]),
    "accelerate": (2, "acc_sharded.py", []),
    "accelerate_zero_3": (2, "acc_zero.py", ["--stage", "3"]),
}


@pytest.mark.parametrize("kind", few(RESTARTED, "lightning"))
def test_on_failure_restart_all_go_back_to_it(kind: str, jobs: Jobs, tmp_path: Path) -> None:
    nproc, script, args = RESTARTED[kind]
    env = options(tmp_path, every=4, checkpoint_background=False, on_failure="restart")
    result = jobs.run(script, nproc=nproc, args=args, faults=[Fault(1, 9, "forward", "SIGKILL")], env=env)
    assert result.status == 0, result.tail()
    compare(result, jobs.reference(script, nproc=nproc, args=args))
    assert continued_from(result) == {8}, result.tail()


#: Workers before and after, and replicas of each shard.
CHANGES: dict[str, tuple[tuple[int, int], tuple[int, int]]] = {
    "4 to 3": ((4, 3), (1, 1)),
    "4 with replicas to 2": ((4, 2), (2, 1)),
    "2 to 4 with replicas": ((2, 4), (1, 2)),
}


@pytest.mark.nightly
@pytest.mark.parametrize("change", CHANGES)
def test_another_number_of_workers_continues(change: str, jobs: Jobs, tmp_path: Path) -> None:
    """Each sample is used once an epoch, and the second run begins with the parameters and moments of the first."""
    workers, replicas = CHANGES[change]
    env, at = options(tmp_path, every=9), 9
    before, after = (["--epochs", "2", "--sharded", str(count)] for count in replicas)
    hold = env | {"HOLD_AT": str(at + 1)}
    with running(jobs, "resize.py", before, env=hold, launcher_args=RESTART, nproc=workers[0]) as job:
        job.until(lambda: at in committed(tmp_path, workers[0]), 60.0)
        job.kill()
        job.end()
    kept = state_of(tmp_path, at, workers[0] // replicas[0])
    # The arguments tell one job from another.
    env |= {"SWIFT_RECOVERY_CHECKPOINT_RESUME_FROM": str(tmp_path)} if before != after else {}
    with running(jobs, "resize.py", after, env=env, launcher_args=RESTART, nproc=workers[1]) as job:
        result = finished(job)
    assert continued_from(result) == {at} or before != after, result.tail()
    assert sorted(result.reports) == list(range(workers[1])), result.tail()
    for report in result.reports.values():
        extra = report["extra"]
        assert extra["first"] == kept, result.tail()
        assert extra["exact"] == [True, True] and extra["losses"][-1] < extra["losses"][0], (extra, result.tail())


def state_of(folder: Path, step: int, shards: int) -> str:
    """Digest of whole parameters and moments, from the parts that ranks have written."""
    found = next(each for each in saved(folder) if each.step == step)
    parts: list[Any] = []
    for rank in range(shards):
        local = loads((found.path / f"rank{rank}").read_bytes())
        parts.append(local["parts"]["swift.shard"])
    whole = [torch.cat(pieces) for pieces in zip(*(each["parameters"] for each in parts), strict=True)]
    for states in zip(*(each["states"] for each in parts), strict=True):
        for key in ("exp_avg", "exp_avg_sq"):
            whole += [torch.cat([entries[key][0] for _, _, entries in states])] * (key in states[0][2])
    return digest(whole)


#: Workers before and after, and arguments.
ZERO: dict[str, tuple[tuple[int, int], list[str]]] = {
    "stage 2, 2 to 4": ((2, 4), ["--stage", "2"]),
    "stage 3, 3 to 2, two micro-batches to three": ((3, 2), ["--stage", "3", "--micro-batches", "6"]),
    "bf16, stage 1, 4 to 2": ((4, 2), ["--stage", "1", "--bf16"]),
}


@pytest.mark.nightly
@pytest.mark.parametrize("change", ZERO)
def test_another_number_of_workers_continues_with_zero(change: str, jobs: Jobs, tmp_path: Path) -> None:
    (before, after), args = ZERO[change]
    env, at = options(tmp_path / "checkpoints", every=9), 9
    hold = env | {"HOLD_AT": str(at + 1)}
    with running(jobs, "zero_resize.py", args, env=hold, launcher_args=RESTART, nproc=before) as job:
        job.until(lambda: at in committed(tmp_path / "checkpoints", before), 60.0)
        job.kill()
        kept = (job.end().out / f"state{at - 1}").read_text()
    with running(jobs, "zero_resize.py", args, env=env, launcher_args=RESTART, nproc=after) as job:
        result = finished(job)
    assert continued_from(result) == {at}, result.tail()
    assert sorted(result.reports) == list(range(after)), result.tail()
    for report in result.reports.values():
        extra = report["extra"]
        assert extra["first"] == kept, result.tail()
        assert extra["exact"] == [True, True] and extra["losses"][-1] < extra["losses"][0], (extra, result.tail())

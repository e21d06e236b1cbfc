"""Checkpoints while training continues: nothing is torn, and storage that is slow, full or gone stops nobody."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpointed import Running, committed, finished, options, running
from harness import Jobs

from shared_core.checkpoint import lineage
from shared_core.faults import Fault
from shared_core.worker.checkpoints import recovery_line
from tests.support.digest import digest
from tests.support.runner import JobResult, compare

SCRIPT, ARGS = "every_step.py", ["--steps", "12"]
ALL = 100


def noted(result: JobResult, rank: int) -> dict[int, dict[str, str]]:
    """Digests of the stop-the-world copies of a rank, by step boundary."""
    text = (result.out / f"boundaries{rank}.jsonl").read_text()
    found = [json.loads(line) for line in text.splitlines()]
    return {each.pop("boundary"): each for each in found}


#: A folder that no file system makes.
NOWHERE = Path("/proc/nowhere")


def held(loaded: recovery_line.Restored) -> dict[str, str]:
    """The same of what a checkpoint holds."""
    parts: dict[str, Any] = loaded.parts
    return {
        "state": digest(loaded.tensors),
        "buffers": digest([*parts["swift.buffers"].values()]),
        "torch": digest(torch.frombuffer(bytearray(parts["swift.random"]["torch"]), dtype=torch.uint8)),
        "loop": digest(parts["loop"]),
    }


def check(result: JobResult, folder: Path) -> list[int]:
    """Compare each checkpoint with the copy that was taken at its step boundary."""
    found = recovery_line.in_storage(lineage.contents(str(folder)), len(result.reports))
    for rank in result.reports:
        copies = noted(result, rank)
        for line in found:
            assert held(recovery_line.load(line, rank)) == copies[line.step], f"rank {rank}, step boundary {line.step}"
    return [line.step for line in found]


def settled(steps: int) -> list[int]:
    """Step boundaries at which there can be a checkpoint: DDP makes its buckets again in the second batch."""
    return [boundary for boundary in range(1, steps + 1) if boundary != 2]


def writer_of(job: Running) -> int:
    """The process that writes; it has said something."""
    spool = job.spool
    return spool.status().pid if spool is not None else 0


@pytest.mark.parametrize(
    ("more", "nproc"),
    [
        ([], 2),
        pytest.param(["--two"], 2, marks=pytest.mark.nightly),
        pytest.param(["--inside"], 1, marks=pytest.mark.nightly),
    ],
    ids=["one", "two", "inside"],
)
def test_every_checkpoint_is_the_state_of_its_step_boundary(
    jobs: Jobs, tmp_path: Path, more: list[str], nproc: int
) -> None:
    """At every batch; parameters and optimizer state are copied after forward and backward, as late as can be."""
    args = ["--steps", "6", "--width", "256", *more]  # small tensors are copied at once
    env = options(tmp_path, every=1, checkpoint_keep=ALL)
    result = jobs.run(SCRIPT, args=[*args, "--late"], env=env, nproc=nproc)
    compare(result, jobs.reference(SCRIPT, args=args, nproc=nproc))
    boundaries = list(range(1, 7)) if "--inside" in more else settled(6)  # without DistributedDataParallel
    assert check(result, tmp_path) == boundaries, result.tail()


@pytest.mark.nightly
def test_a_full_device_stops_nobody(jobs: Jobs, small_device: Path) -> None:
    result = jobs.run(SCRIPT, args=ARGS, env=options(small_device, every=2))
    compare(result, jobs.reference(SCRIPT, args=ARGS))
    assert not committed(small_device)
    assert len(result.told("no room")) == 1, result.tail()


def test_a_writer_that_stands_still_stops_nobody(jobs: Jobs, tmp_path: Path) -> None:
    """Memory stays bounded: at most three snapshots wait, and the user is told once that others are left out."""
    with running(jobs, SCRIPT, ARGS, env=options(tmp_path, every=1)) as job:
        job.until(lambda: bool(writer_of(job)))
        writer = writer_of(job)
        os.kill(writer, signal.SIGSTOP)
        spool, most = job.spool, 0
        assert spool is not None
        while not (job.out / "rank0.json").exists() and job.boundaries() < 12:
            most = max(most, len(spool.steps()))
        os.kill(writer, signal.SIGCONT)
        result = finished(job)
    compare(result, jobs.reference(SCRIPT, args=ARGS))
    assert most <= 3, most
    assert check(result, tmp_path), result.tail()


@pytest.mark.parametrize("failed", ["SIGKILL", pytest.param("os._exit", marks=pytest.mark.nightly)])
def test_a_restart_continues_from_memory(jobs: Jobs, tmp_path: Path, failed: str) -> None:
    """Nothing was ever written: the storage cannot be used. All workers start again from the snapshot in memory."""
    env = options(NOWHERE, every=5)
    args = ["--norm", "--steps", "20"]
    fault = Fault(1, 13, "bucket", failed)
    result = jobs.run("plain_ddp.py", args=args, env=env, faults=[fault], launcher_args=["--on-failure=restart"])
    compare(result, jobs.reference("plain_ddp.py", args=args))
    assert result.stderr.count("continues from the checkpoint at step boundary 10 (memory)") == 1, result.tail()
    ran = {int(key.split()[1]) for report in result.reports.values() for key in report["counts"]}
    assert min(ran) == 9

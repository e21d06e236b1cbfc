"""The hardware list, ``pytest -m gpu -n 6``: jobs of two or three workers on one GPU lose workers.

All ranks are on the first GPU, over the transport that stages device memory on the host. Each job first has to end
twice with the same bits without a failure, else a comparison would say nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from checkpointed import options
from device_jobs import JOBS, RESTART, RESTARTS, kill
from harness import Jobs

from tests.support.device import environment
from tests.support.runner import JobResult, compare

GPU = environment("cuda")
#: Jobs that stock PyTorch can run over gloo with all ranks on one GPU: the barriers of Accelerate name one for each.
STOCK = ("ddp", "accumulate", "lightning")
TIMEOUT_S = 150.0

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here"),
]


@pytest.fixture(scope="module", autouse=True)
def no_context_in_servers() -> Iterator[None]:
    """Servers that fork workers are not to start CUDA when a framework that they import asks whether there is a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in GPU.items():
            if not name.startswith("SWIFT_"):
                patch.setenv(name, value)
        yield


def whole(jobs: Jobs, name: str) -> JobResult:
    """The run on the GPU without a failure; made once in each process of the tests."""
    job = JOBS[name]
    return jobs.reference(job.script, nproc=job.nproc, args=job.args, env=GPU, launcher="swiftrun", timeout_s=TIMEOUT_S)


@pytest.mark.parametrize("name", JOBS)
def test_without_a_failure_two_runs_are_equal(name: str, jobs: Jobs) -> None:
    job = JOBS[name]
    again = jobs.run(job.script, nproc=job.nproc, args=job.args, env=GPU, timeout_s=TIMEOUT_S)
    compare(again, whole(jobs, name))


@pytest.mark.parametrize("name", STOCK)
def test_without_a_failure_it_is_what_stock_gives(name: str, jobs: Jobs) -> None:
    """Two runs of stock over gloo are equal, and the product's is equal to them."""
    job = JOBS[name]
    runs = [
        jobs.run(job.script, nproc=job.nproc, args=job.args, env=GPU, launcher="torchrun", timeout_s=TIMEOUT_S)
        for _ in range(2)
    ]
    compare(runs[1], runs[0])
    compare(whole(jobs, name), runs[0])


@pytest.mark.parametrize("name", JOBS)
def test_ten_kills_change_no_bit(name: str, jobs: Jobs) -> None:
    job = JOBS[name]
    result = jobs.check(
        job.script,
        nproc=job.nproc,
        args=job.args,
        env=GPU,
        faults=job.many,
        timeout_s=2 * TIMEOUT_S,
        reference_launcher="swiftrun",
    )
    stalls = sorted(event.fields["stall_s"] for event in result.kinds("resumed"))
    middle, most = stalls[len(stalls) // 2], stalls[-1]
    print(f"{name}: {len(result.struck)} kills, stall {middle:.2f} s in the middle, {most:.2f} s at most")


@pytest.mark.parametrize("name", JOBS)
def test_a_kill_in_the_update_changes_no_bit(name: str, jobs: Jobs) -> None:
    """By itself: where ten in a row fail, this says whether one does."""
    job = JOBS[name]
    jobs.check(
        job.script,
        nproc=job.nproc,
        args=job.args,
        env=GPU,
        faults=[job.kills["in_the_update"]],
        timeout_s=TIMEOUT_S,
        reference_launcher="swiftrun",
    )


@pytest.mark.parametrize("name", ["ddp", "fsdp2", "lightning"])
def test_all_start_again_over_nccl(name: str, jobs: Jobs, tmp_path: Path) -> None:
    """The groups are torch's own: nothing is staged, and no bucket is seen."""
    job = JOBS[name]
    env = {name: value for name, value in GPU.items() if not name.startswith("SWIFT_RECOVERY_")}
    arguments = {"nproc": 2, "args": job.args, "timeout_s": TIMEOUT_S, "launcher_args": RESTARTS}
    env |= {"SWIFT_TEST_BACKEND": "nccl"} | options(tmp_path, every=3, checkpoint_background="false")
    reference = jobs.run(job.script, env=env | {"SWIFT_RECOVERY_CHECKPOINT_DIR": str(tmp_path / "other")}, **arguments)
    faults = [kill(1, 5, "forward"), kill(0, 11, "update.during", 4), kill(0, 17, "forward")]
    result = jobs.run(job.script, env=env, faults=faults, **arguments)
    compare(result, reference)
    assert len(result.struck) == len(faults) == len(result.kinds("restart")), result.tail()


def test_all_start_again_from_checkpoints(jobs: Jobs, tmp_path: Path) -> None:
    job = RESTART
    reference = jobs.run(job.script, nproc=job.nproc, args=job.args, env=GPU, timeout_s=TIMEOUT_S)
    result = jobs.run(
        job.script,
        nproc=job.nproc,
        args=job.args,
        env=GPU | options(tmp_path, every=3, checkpoint_background="false"),
        faults=job.many,
        launcher_args=RESTARTS,
        timeout_s=2 * TIMEOUT_S,
    )
    compare(result, reference)
    assert len(result.struck) == len(job.many) == len(result.kinds("restart")), result.tail()

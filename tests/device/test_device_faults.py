"""Jobs on the simulated device lose workers and end, on every rank, with the bits of the run in which nobody failed.

The run in which nobody failed is one on the same device; and, without dropout, which draws there, it is stock's on the
CPU.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpointed import continued_from, options
from device_jobs import JOBS, RESTART, RESTARTS, kill
from harness import Jobs, few

from tests.support.device import environment
from tests.support.runner import Mismatch, compare, unconfirmed

SIM = environment("sim")
#: Kills that every run has; the others are left to the night.
USUAL = (
    "ddp-in_backward",
    "ddp-in_the_update",
    "fsdp2-a_gather_in_forward",
    "fsdp2-a_reduction_in_backward",
    "lightning-in_backward",
    "accelerate-in_backward",
)
KILLS = {f"{name}-{where}": (job, fault) for name, job in JOBS.items() for where, fault in job.kills.items()}
TIMEOUT_S = 150.0

simulated = pytest.mark.usefixtures("simulated")
pytestmark = pytest.mark.timeout(400)


@simulated
@pytest.mark.parametrize("name", few(KILLS, "ddp-in_the_update"))
def test_a_kill_changes_no_bit(name: str, jobs: Jobs) -> None:
    job, fault = KILLS[name]
    result = jobs.check(
        job.script,
        nproc=job.nproc,
        args=job.args,
        env=SIM,
        faults=[fault],
        timeout_s=TIMEOUT_S,
        reference_launcher="swiftrun",
    )
    assert [event.rank for event in result.kinds("failed")] == [fault.rank], result.tail()


@pytest.mark.nightly
@simulated
@pytest.mark.parametrize("name", JOBS)
def test_without_a_kill_it_is_what_stock_gives_on_the_cpu(name: str, jobs: Jobs) -> None:
    job = JOBS[name]
    stock = jobs.reference(job.script, nproc=job.nproc, args=job.without_dropout, timeout_s=TIMEOUT_S)
    result = jobs.run(job.script, nproc=job.nproc, args=job.without_dropout, env=SIM, timeout_s=TIMEOUT_S)
    compare(result, stock, [*stock.reports[0]["digests"]])


@pytest.mark.nightly
@simulated
@pytest.mark.parametrize("name", JOBS)
def test_many_kills_and_it_is_what_stock_gives_on_the_cpu(name: str, jobs: Jobs) -> None:
    job = JOBS[name]
    stock = jobs.reference(job.script, nproc=job.nproc, args=job.without_dropout, timeout_s=TIMEOUT_S)
    result = jobs.run(
        job.script, nproc=job.nproc, args=job.without_dropout, env=SIM, faults=job.many, timeout_s=TIMEOUT_S
    )
    compare(result, stock, [*stock.reports[0]["digests"]])
    assert not unconfirmed(result), "\n".join([*unconfirmed(result), result.tail()])


@pytest.mark.nightly
@pytest.mark.parametrize("device", ["sim", "cpu"])
def test_all_start_again_from_checkpoints(
    device: str, jobs: Jobs, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if device == "sim":
        request.getfixturevalue("simulated")
    env = environment(device)
    launcher = "plain" if device == "cpu" else "swiftrun"
    reference = jobs.reference(
        RESTART.script, nproc=RESTART.nproc, args=RESTART.args, env=env, launcher=launcher, timeout_s=TIMEOUT_S
    )
    result = jobs.run(
        RESTART.script,
        nproc=RESTART.nproc,
        args=RESTART.args,
        env=env | options(tmp_path, every=3, checkpoint_background="false"),
        faults=RESTART.many,
        launcher_args=RESTARTS,
        timeout_s=TIMEOUT_S,
    )
    compare(result, reference)
    assert len(result.struck) == len(RESTART.many) == len(result.kinds("restart")), result.tail()
    assert continued_from(result) == {3, 9, 15}, result.tail()


@simulated
def test_a_device_generator_that_is_ahead_is_seen(jobs: Jobs) -> None:
    """The control: these comparisons fail if the replacement's dropout draws other numbers."""
    job = JOBS["ddp"]
    args = [*job.args, "--mistake", "draw"]
    reference = jobs.reference(
        job.script, nproc=job.nproc, args=job.args, env=SIM, launcher="swiftrun", timeout_s=TIMEOUT_S
    )
    result = jobs.run(
        job.script, nproc=job.nproc, args=args, env=SIM, faults=[kill(1, 4, "bucket")], timeout_s=TIMEOUT_S
    )
    with pytest.raises(Mismatch, match=r"rank 1 \(struck\): device_generator is"):
        compare(result, reference)


@pytest.mark.nightly
@pytest.mark.parametrize("name", JOBS)
def test_the_same_jobs_on_the_cpu(name: str, jobs: Jobs) -> None:
    job = JOBS[name]
    jobs.check(
        job.script,
        nproc=job.nproc,
        args=job.args,
        env=environment("cpu"),
        faults=job.many,
        timeout_s=TIMEOUT_S,
    )

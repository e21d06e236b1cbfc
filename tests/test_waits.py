"""No wait of a job is silent, and none lasts for ever."""

from __future__ import annotations

import re

import pytest
from harness import Jobs

from shared_core.faults import Fault
from tests.support.runner import ROOT, JobResult

FAILURE = [Fault(1, 3, "collective.after", "SIGKILL")]
#: What the replacement does instead of the collective its peers are in, and where the others are told that it is.
ELSEWHERE = {
    "group": r"rank 1 waits for rank 0 in barrier\(\) \(#0 of group '.+' of ranks 0, 1\)",
    "message": r"rank 1 waits for rank 0 in recv \(message 0 from rank 0 in the default group\)",
    "ends": r"#4 of the default group\), though the program of rank 1 has ended",
}


def _run(jobs: Jobs, how: str, *, wait_s: float, torch_s: float = 1800, failure: bool = True) -> JobResult:
    env = {"SWIFT_RECOVERY_DETECTION_WAIT_TIMEOUT_S": str(wait_s)}
    return jobs.run("waits.py", nproc=3, faults=FAILURE if failure else [], args=[how, str(torch_s)], env=env)


def _said(result: JobResult, words: str) -> list[str]:
    return [line for line in result.stderr.splitlines() if re.match(rf"\[swift\] {words}", line)]


@pytest.mark.nightly
@pytest.mark.parametrize("how", ELSEWHERE)
def test_a_replacement_in_another_collective_ends_the_job(how: str, jobs: Jobs) -> None:
    """Its peers have a time-out of half an hour, which would be as good as a hang."""
    result = _run(jobs, how, wait_s=4)
    assert result.status == 1, result.tail()
    held = rf"ranks 0, 2 wait for rank 1 in all_reduce\(float32\[4, 3\]\) .*{ELSEWHERE[how]}"
    ends = r"this ends with an error in \d s \(detection.wait_timeout_s\)$"
    assert len(_said(result, rf"no rank can continue: {held}.*; {ends}")) == 1
    assert (
        len(
            _said(
                result, r"the job failed after .* s: rank [012]: ReplayDivergence: after the recovery in generation 1"
            )
        )
        == 1
    )
    assert re.search(rf"no rank can continue, for \d+ s \(detection.wait_timeout_s\): {held}", result.stderr), (
        result.tail()
    )
    assert len(result.kinds("failed")) == 1


@pytest.mark.nightly
def test_who_is_late_is_named_once(jobs: Jobs) -> None:
    """Rank 0 computes until the others have said that they wait for it, and rank 1's replacement likewise."""
    result = _run(jobs, "slow", wait_s=6)
    assert result.status == 0, result.tail()
    late = (
        r"rank [12] waits for rank 0 in all_reduce\(float32\[4, 3\]\) \(#1 of the default group\): rank 0 is not in a"
    )
    assert len(_said(result, late)) == 1, result.tail()
    start = (
        r"rank 0 waits for rank 1 to create the process group \(rank 1 failed, its replacement runs the script up to"
    )
    assert len(_said(result, start)) == 1, result.tail()
    assert len([line for line in result.stderr.splitlines() if " waits for " in line and "rank 2" in line[:20]]) <= 1


def test_a_replacement_that_hangs_in_its_start_up_ends_the_job(jobs: Jobs) -> None:
    result = _run(jobs, "hangs", wait_s=2)
    assert result.status == 1, result.tail()
    why = r"rank [02] waited 2 s \(detection.wait_timeout_s\) for rank 1 to create the process group \(rank 1 failed"
    [line] = _said(result, rf"the job failed after .* s: rank [02]: WaitTimeout: {why}")
    assert f"(see {ROOT}/docs/troubleshooting.md#waittimeout); report:" in line, line
    assert not result.kinds("restart")


@pytest.mark.nightly
def test_torchs_time_out_holds_and_says_who_was_late(jobs: Jobs) -> None:
    result = _run(jobs, "late", wait_s=300, torch_s=4, failure=False)
    assert result.status == 1, result.tail()
    why = (
        r"CollectiveTimeout: rank \d waited 4 s \(time-out of the process group\) in all_reduce\(float32\[4, 3\]\) \(#1"
    )
    assert re.search(why, result.stderr), result.tail()
    assert "waits for rank 0 in all_reduce" in result.stderr, result.tail()
    assert "waited in vain, and so would a replacement" in result.stderr, result.tail()


@pytest.mark.nightly
def test_a_standstill_without_a_failure_ends_as_one(jobs: Jobs) -> None:
    result = _run(jobs, "mistake", wait_s=300, failure=False)
    assert result.status == 1, result.tail()
    assert len(_said(result, r"no rank can continue: .* \(none of them does anything else\)$")) == 1, result.tail()
    assert "ReplayDivergence" not in result.stderr and "Deadlock" in result.stderr, result.tail()


def test_ranks_that_end_an_epoch_at_different_batches_are_named(jobs: Jobs) -> None:
    """One waits in C++, for a bucket."""
    result = jobs.run("uneven.py", env={"SWIFT_RECOVERY_DETECTION_WAIT_TIMEOUT_S": "2"})
    assert result.status == 1, result.tail()
    bucket, barrier = r"rank 0 waits for rank 1 in all_reduce\(float32\[5\]\)", "rank 1 waits for rank 0 in barrier"
    assert len(_said(result, rf"no rank can continue: {bucket} .*; {barrier}")) == 1, result.tail()

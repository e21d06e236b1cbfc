"""Averages of weights, and all else that a script changes outside an optimizer, survive failures bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import Jobs, few

import tests.support.jobs
from shared_core.faults import Fault
from tests.support.runner import compare

JOB = str(Path(tests.support.jobs.__file__).parent / "outside_job.py")
AVERAGES, BY_HAND = ["--what", "averages"], ["--what", "by-hand"]

#: Faults in a batch; the averages' update after the step of a batch meets "outside" 2 + 12 times and more.
PLACES: dict[str, tuple[list[str], Fault]] = {
    "averages_first_batch": (AVERAGES, Fault(1, 1, "outside", "SIGKILL", nth=2)),
    "averages_in_the_step": (AVERAGES, Fault(0, 4, "update.during", "SIGKILL", nth=9)),
    "averages_before_the_update": (AVERAGES, Fault(1, 4, "outside", "SIGKILL")),
    "averages_in_the_update": (AVERAGES, Fault(0, 5, "outside", "SIGKILL", nth=7)),
    "hand_first_batch": (BY_HAND, Fault(1, 1, "outside", "SIGKILL", nth=9)),
    "hand_new_group": (BY_HAND, Fault(0, 7, "update.after", "SIGKILL")),
    "hand_between_forward_and_backward": (BY_HAND, Fault(1, 4, "outside", "SIGKILL", nth=4)),
    "hand_in_the_step": (BY_HAND, Fault(1, 5, "update.during", "SIGKILL", nth=9)),
    "hand_after_the_step": (BY_HAND, Fault(1, 6, "outside", "SIGKILL", nth=8)),
}


@pytest.mark.parametrize(
    "name",
    few(PLACES, "hand_between_forward_and_backward"),
)
def test_a_failure_changes_no_bit(name: str, jobs: Jobs) -> None:
    args, fault = PLACES[name]
    jobs.check(JOB, faults=[fault], args=args)


@pytest.mark.nightly
@pytest.mark.parametrize("args", [AVERAGES, BY_HAND], ids=["averages", "by_hand"])
def test_when_all_fail_a_checkpoint_has_it_all(args: list[str], jobs: Jobs, tmp_path: Path) -> None:
    env = {"SWIFT_RECOVERY_CHECKPOINT_DIR": str(tmp_path / "kept"), "SWIFT_RECOVERY_CHECKPOINT_EVERY_STEPS": "5"}
    both = [Fault(rank, 12, "bucket", "SIGKILL") for rank in (0, 1)]
    result = jobs.run(JOB, faults=both, args=args, env=env)
    compare(result, jobs.reference(JOB, args=args))
    assert len(result.kinds("restart")) == 1, result.tail()


@pytest.mark.nightly
@pytest.mark.parametrize("args", [AVERAGES, BY_HAND], ids=["averages", "by_hand"])
def test_with_fewer_workers_all_of_them_agree(args: list[str], jobs: Jobs) -> None:
    env = {"SWIFT_RECOVERY_ON_FAILURE": "shrink"}
    faults = [Fault(1, 5, "outside", "SIGKILL", nth=5)]
    result = jobs.run(JOB, nproc=3, faults=faults, args=[*args, "--world", "3"], env=env)
    assert result.status == 0 and len(result.kinds("resize")) == 1, result.tail()
    ends = [report["digests"] for report in result.reports.values()]
    assert len(ends) == 2 and ends[0]["optimizers"] == ends[1]["optimizers"], result.tail()


def test_an_average_that_nobody_was_told_of_is_a_likely_cause(jobs: Jobs) -> None:
    """A replacement that cannot have it makes it again; where the weights come to depend on it, replicas differ."""
    args, blind = [*AVERAGES, "--forget", "--pull"], {"SWIFT_TEST_NO_VARIABLES": "1"}
    result = jobs.run(JOB, faults=[Fault(1, 4, "outside", "SIGKILL")], args=args, env=blind)
    assert result.status == 1, result.tail()
    assert "changes parameters or optimizer state outside an optimizer's step" in result.stderr, result.tail()


LATE = ["--what", "weights", "--begin", "4"]


@pytest.mark.nightly
def test_changes_that_begin_late_are_followed_from_the_next_batch_on(jobs: Jobs) -> None:
    jobs.check(JOB, faults=[Fault(1, 6, "outside", "SIGKILL", nth=2)], args=LATE)


@pytest.mark.nightly
def test_a_failure_in_the_batch_in_which_they_begin_goes_back_to_the_checkpoint(jobs: Jobs, tmp_path: Path) -> None:
    env = {"SWIFT_RECOVERY_CHECKPOINT_DIR": str(tmp_path / "kept"), "SWIFT_RECOVERY_CHECKPOINT_EVERY_STEPS": "3"}
    result = jobs.run(JOB, faults=[Fault(1, 5, "outside", "SIGKILL", nth=2)], args=LATE, env=env)
    [restart] = result.kinds("restart")
    assert "outside an optimizer's update for the first time" in restart.fields["reason"], result.tail()
    compare(result, jobs.reference(JOB, args=LATE))


@pytest.mark.nightly
def test_unless_the_state_is_kept_from_the_start(jobs: Jobs) -> None:
    env = {"SWIFT_RECOVERY_STATE_PREIMAGES": "always"}
    jobs.check(JOB, faults=[Fault(1, 5, "outside", "SIGKILL", nth=2)], args=LATE, env=env)

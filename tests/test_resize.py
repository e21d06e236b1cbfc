"""The number of workers changes in the middle of an epoch: no sample is lost or used twice, and training continues."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
from harness import Jobs

from shared_core.faults import ANY_STEP, Fault
from tests.support.runner import JobResult, unconfirmed

SHRINK = ["--on-failure=shrink"]
#: Where a rank fails; each leaves the survivors elsewhere.
CASES: dict[str, tuple[list[str], list[Fault]]] = {
    "rank_0": ([], [Fault(0, 5, "bucket", "SIGKILL", nth=2)]),
    "in_the_update": ([], [Fault(1, 5, "update.during", "SIGKILL", nth=3)]),
    # the survivors have made the update and wait in a collective that cannot be completed: they undo it
    "after_the_update": ([], [Fault(1, 5, "update.after", "SIGKILL", nth=2)]),
    "before_the_first_batch": ([], [Fault(1, 0, "startup", "SIGKILL")]),
    "after_the_last_batch": ([], [Fault(1, 21, "step_boundary", "SIGKILL")]),
    "another_meanwhile": ([], [Fault(1, 5, "bucket", "SIGKILL"), Fault(2, ANY_STEP, "resize.severed", "SIGKILL")]),
    "the_donor_meanwhile": ([], [Fault(1, 5, "bucket", "SIGKILL"), Fault(0, ANY_STEP, "resize.cut", "SIGKILL")]),
    "another_in_the_first_batch_after": ([], [Fault(1, 5, "bucket", "SIGKILL")] * 2),
    "loader_processes": (["--workers", "1"], [Fault(1, 5, "bucket", "SIGKILL")]),
}


def run(
    jobs: Jobs,
    faults: list[Fault],
    *args: str,
    nproc: int = 3,
    script: str = "resize.py",
    options: list[str] | None = None,
    **env: str,
) -> JobResult:
    result = jobs.run(
        script,
        nproc=nproc,
        faults=faults,
        args=["--epochs", "2", *args],
        launcher_args=SHRINK if options is None else options,
        env=env,
    )
    assert result.status == 0, result.tail()
    assert not unconfirmed(result), "\n".join([*unconfirmed(result), result.tail()])
    return result


def check_exact(result: JobResult, workers: int) -> None:
    """All ranks have the same state at the end, which has seen each sample once an epoch."""
    assert sorted(result.reports) == list(range(workers)), result.tail()
    assert len({report["digests"]["all"] for report in result.reports.values()}) == 1, result.tail()
    extra = result.reports[0]["extra"]
    assert all(extra["exact"]) and extra["losses"][-1] < extra["losses"][0] / 2, (extra, result.tail())


@pytest.mark.nightly
@pytest.mark.parametrize("name", CASES)
def test_the_others_continue(name: str, jobs: Jobs) -> None:
    args, faults = CASES[name]
    result = run(jobs, faults, *args)
    check_exact(result, 3 - len(faults))
    assert result.kinds("resize")[-1].fields["workers"] == 3 - len(faults)
    said = "variables begin again as the script makes them: `counted` (resize.py:"
    assert (said in result.stderr) == (faults[0].step > 1 and "world" not in args), result.tail()


#: With updates overlapped with communication: survivors have updated a part of the parameters.
TORN = {
    "after_a_bucket": [Fault(1, 5, "bucket", "SIGKILL", nth=2)],
    "amid_the_update": [Fault(2, 6, "update.during", "SIGKILL", nth=4)],
    "another_meanwhile": [Fault(1, 5, "bucket", "SIGKILL", nth=2), Fault(2, ANY_STEP, "resize.severed", "SIGKILL")],
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", TORN)
def test_torn_survivors_continue(name: str, jobs: Jobs) -> None:
    result = run(jobs, TORN[name], "--one-optimizer", "--epochs", "5", SWIFT_RECOVERY_STATE_OVERLAPPED_UPDATE="true")
    check_exact(result, 3 - len(TORN[name]))


def test_four_three_two_four(jobs: Jobs) -> None:
    faults = [Fault(2, 5, "bucket", "SIGKILL"), Fault(1, 12, "update.during", "SIGKILL", nth=3)]
    result = run(jobs, faults, "--until", "4", nproc=4, SWIFT_RECOVERY_RESIZE_GROW_AFTER_S="4")
    check_exact(result, 4)
    assert [event.fields["workers"] for event in result.kinds("resize")] == [3, 2, 4]


LIGHTNING: dict[str, list[Fault]] = {
    "rank_0": [Fault(0, 5, "update.during", "SIGKILL", nth=2)],
    "validation": [Fault(2, 20, "validation", "SIGKILL")],
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", LIGHTNING)
def test_the_trainer_of_lightning(name: str, jobs: Jobs) -> None:
    """One validation an epoch, and one row a step in the log."""
    result = run(jobs, LIGHTNING[name], "--devices", "3", script="lit_resize.py")
    check_exact(result, 2)
    extra = result.reports[0]["extra"]
    assert extra["validations"] == len(extra["losses"])
    check_rows(extra, may_miss=int(name == "rank_0"))


def check_rows(extra: dict[str, Any], may_miss: int) -> None:
    rows = list(csv.DictReader(extra["rows"].splitlines()))
    steps = [int(row["step"]) for row in rows if row["loss_step"]]
    # What rank 0 had not logged yet of the batch in which it failed, nobody can log.
    assert steps == sorted(set(steps)) and extra["steps"] - len(steps) <= may_miss, steps


def test_a_loop_of_accelerate_that_accumulates(jobs: Jobs) -> None:
    faults = [Fault(0, 6, "bucket", "SIGKILL")]
    check_exact(run(jobs, faults, "--accumulate", "2", script="acc_resize.py"), 2)


@pytest.mark.nightly
def test_nobody_takes_the_place_in_time(jobs: Jobs) -> None:
    """The replacement hangs on its way to the training loop."""
    env = {"SWIFT_RECOVERY_RESIZE_REPLACE_TIMEOUT_S": "0.3"}
    result = run(jobs, [Fault(1, 5, "bucket", "SIGKILL")], "--replacements-hang", options=[], **env)
    check_exact(result, 2)
    assert "nobody has taken the place of rank 1 within 0.3 s" in result.stderr


@pytest.mark.nightly
def test_a_replacement_in_time_takes_the_place(jobs: Jobs) -> None:
    env = {"SWIFT_RECOVERY_RESIZE_REPLACE_TIMEOUT_S": "40"}
    result = run(jobs, [Fault(1, 5, "bucket", "SIGKILL")], options=[], **env)
    check_exact(result, 3)
    assert not result.kinds("resize")


@pytest.mark.nightly
def test_the_rest_of_a_failed_worker_may_be_dropped(jobs: Jobs) -> None:
    """The first pass has not seen what the failed worker had left: 15 of 20 batches of 4."""
    result = run(jobs, [Fault(1, 5, "bucket", "SIGKILL")], "--epochs", "1", SWIFT_RECOVERY_RESIZE_DATA="drop")
    assert result.reports[0]["extra"]["used"] == [240 - 4 * 16], result.tail()


@pytest.mark.nightly
def test_a_restart_in_a_pass_that_was_dealt_out(jobs: Jobs, tmp_path: Path) -> None:
    """What the checkpoint says of the pass is enough; what was published about it is gone."""
    faults = [Fault(1, 5, "bucket", "SIGKILL"), *(Fault(rank, 9, "bucket", "SIGKILL") for rank in range(2))]
    options = [*SHRINK, "--checkpoint-dir", str(tmp_path)]
    result = run(jobs, faults, options=options, SWIFT_RECOVERY_CHECKPOINT_EVERY_STEPS="4")
    check_exact(result, 2)
    assert result.kinds("resize") and result.kinds("restart"), result.tail()


@pytest.mark.nightly
def test_a_failure_right_after_a_restart(jobs: Jobs, tmp_path: Path) -> None:
    """The replacement continues in the middle of the pass, where the checkpoint was."""
    at_8, at_9 = (
        Fault(1, 8, "bucket", "SIGKILL"),
        [Fault(rank, 9, "bucket", "SIGKILL", incarnation=rank) for rank in (0, 1)],
    )
    options = ["--checkpoint-dir", str(tmp_path), "--crash-loop", "9"]
    result = run(jobs, [at_8, at_8, *at_9], nproc=2, options=options, SWIFT_RECOVERY_CHECKPOINT_EVERY_STEPS="4")
    check_exact(result, 2)
    assert result.kinds("restart") and len(result.kinds("failed")) == 4, result.tail()


@pytest.mark.nightly
def test_a_stream_is_refused_unless_it_may_be_dropped(jobs: Jobs) -> None:
    faults = [Fault(1, 5, "bucket", "SIGKILL")]
    refused = jobs.run("resize.py", nproc=3, args=["--stream"], launcher_args=SHRINK)
    assert refused.status == 1 and "resize.data='drop'" in refused.stderr, refused.tail()
    result = run(jobs, faults, "--stream", SWIFT_RECOVERY_RESIZE_DATA="drop")
    assert result.reports[0]["extra"]["worlds"] == [2, 2], result.tail()


@pytest.mark.nightly
def test_a_worker_failed_after_others_have_finished_is_replaced(jobs: Jobs) -> None:
    """What the others did at their end must not be done twice."""
    result = run(jobs, [], "--last", "1")
    assert not result.kinds("resize") and result.kinds("replacement_start"), result.tail()
    check_exact(result, 3)


@pytest.mark.nightly
def test_between_two_calls_of_the_trainer_a_failed_worker_is_replaced(jobs: Jobs) -> None:
    """The workers that stay have no batch to continue from, so the agent is told that the number cannot change."""
    result = run(jobs, [], "--devices", "3", "--failed-after", "1", script="lit_resize.py")
    check_exact(result, 3)
    assert "the number of workers cannot change now" in result.stderr, result.tail()
    assert not result.kinds("resize") and result.kinds("replacement_start"), result.tail()


@pytest.mark.parametrize(
    ("args", "words"),
    [(["--optimizer", "LBFGS"], "LBFGS"), (["--optimizer", "SparseAdam"], "SparseAdam takes sparse gradients only")],
)
def test_an_update_that_cannot_be_undone_is_refused(args: list[str], words: str, jobs: Jobs) -> None:
    result = jobs.run("resize.py", nproc=2, args=args, launcher_args=SHRINK)
    assert result.status == 1 and words in result.stderr, result.tail()


@pytest.mark.parametrize(
    ("script", "args", "words"),
    [
        ("acc_resize.py", ["--dispatch"], "set dispatch_batches=False"),
        ("hf_trainer.py", [], "transformers.Trainer counts the steps of an epoch in advance"),
    ],
)
def test_what_is_refused_under_accelerate(script: str, args: list[str], words: str, jobs: Jobs) -> None:
    result = jobs.run(script, nproc=2, args=args, launcher_args=SHRINK)
    assert result.status == 1 and words in result.stderr, result.tail()

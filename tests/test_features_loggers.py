"""After a failure there is one version of each log, no step in it is lost or doubled, and the
checkpoints are the same.
"""

from __future__ import annotations

import pytest
from harness import Jobs
from trackers import csv_file, of_tensorboard

from shared_core.faults import Fault

ARGS = ["--feature", "loggers"]


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(Fault(0, 6, "validation", "SIGKILL"), marks=pytest.mark.nightly),
        Fault(0, 9, "update.after", "os._exit"),
    ],
    ids=str,
)
def test_logs_and_checkpoints_are_those_of_the_run_without_a_failure(fault: Fault, jobs: Jobs) -> None:
    reference = jobs.reference("lit.py", args=ARGS)
    result = jobs.check("lit.py", faults=[fault], args=ARGS)
    assert csv_file(result).read_text() == csv_file(reference).read_text()
    assert of_tensorboard(result.out / "board") == of_tensorboard(reference.out / "board")
    files = [sorted(str(p.relative_to(job.out)) for p in job.out.rglob("*.ckpt")) for job in (result, reference)]
    assert files[0] == files[1]
    assert result.reports[0]["extra"]["checkpoints"] == reference.reports[0]["extra"]["checkpoints"]


@pytest.mark.nightly
def test_a_second_trainer_logs_in_a_version_of_its_own(jobs: Jobs) -> None:
    args = ["--feature", "two_trainers"]
    faults = [Fault(0, 4, "forward", "SIGKILL"), Fault(0, 17, "forward", "SIGKILL", incarnation=1)]
    result, reference = jobs.check("lit.py", faults=faults, args=args), jobs.reference("lit.py", args=args)
    logs = [{str(p.relative_to(job.out)): p.read_text() for p in job.out.rglob("*.csv")} for job in (result, reference)]
    assert logs[0] == logs[1] and len(logs[1]) == 2, result.tail()


@pytest.mark.nightly
def test_recoveries_are_logged_where_that_is_asked_for(jobs: Jobs) -> None:
    asked = {"SWIFT_RECOVERY_LOG_RECOVERIES": "1"}
    result = jobs.check("lit.py", faults=[Fault(1, 9, "bucket", "SIGKILL")], args=ARGS, env=asked)
    assert {"swift/generation", "swift/stall_s"} <= set(csv_file(result).read_text().splitlines()[0].split(","))
    assert [step for step, _ in of_tensorboard(result.out / "board")["swift/stall_s"]] == [9]

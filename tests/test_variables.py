"""What a script holds in plain variables is put back in a replacement, or refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import Jobs, few

from shared_core.faults import Fault
from shared_core.worker.variables.variables import OFF
from tests.support.runner import Mismatch, compare

#: Parts of the script, and where workers fail in them: an epoch has ten batches and eleven step boundaries.
CASES: dict[str, list[Fault]] = {
    "breaks": [Fault(1, 25, "bucket", "SIGKILL")],
    "mean": [Fault(0, 17, "bucket", "SIGKILL")],
    "kinds": [Fault(1, 8, "forward", "SIGKILL"), Fault(0, 27, "update.before", "SIGKILL")],
    "order": [Fault(1, 16, "bucket", "SIGKILL")],
    "late": [Fault(1, 19, "bucket", "SIGKILL"), Fault(0, 30, "forward", "SIGKILL")],
    "left": [Fault(0, 19, "forward", "SIGKILL")],
    "places": [Fault(1, 8, "forward", "SIGKILL"), Fault(0, 27, "update.before", "SIGKILL")],
    "parts": [Fault(0, 6, "forward", "SIGKILL"), Fault(1, 19, "bucket", "SIGKILL")],
}


@pytest.mark.parametrize("part", few(CASES, "kinds"))
def test_what_a_script_counts_is_put_back(part: str, jobs: Jobs) -> None:
    jobs.check("variables.py", args=[part], faults=CASES[part])


@pytest.mark.parametrize(("part", "step"), [("mean", 19), ("order", 8)])
def test_a_job_that_begins_again_has_them_from_its_checkpoint(part: str, step: int, jobs: Jobs, tmp_path: Path) -> None:
    """Also what has there, again, the value of the first step boundary, and had another one in between."""
    env = {"DIR": str(tmp_path), "POLICY": "fixed", "EVERY_STEPS": "1", "BACKGROUND": "false"}
    env = {f"SWIFT_RECOVERY_CHECKPOINT_{name}": value for name, value in env.items()}
    env["SWIFT_RECOVERY_ON_FAILURE"] = "restart"
    result = jobs.run("variables.py", args=[part], faults=[Fault(1, step, "bucket", "SIGKILL")], env=env)
    compare(result, jobs.reference("variables.py", args=[part]))
    assert any(each.fields.get("whence") for each in result.kinds("began")), result.tail()


@pytest.mark.parametrize("part", ["mean", "kinds", "late"])
def test_without_the_capture_it_is_not(part: str, jobs: Jobs) -> None:
    """The control of the tests above."""
    with pytest.raises(Mismatch):
        jobs.check("variables.py", args=[part], faults=CASES[part], env={OFF: "1"})


def test_what_cannot_be_put_back_is_refused_by_name(jobs: Jobs) -> None:
    """A generator that runs: all workers start again, from the beginning where there is no checkpoint."""
    result = jobs.run("variables.py", args=["unrestorable"], faults=[Fault(1, 17, "bucket", "SIGKILL")])
    compare(result, jobs.reference("variables.py", args=["unrestorable"]))
    [restart] = result.kinds("restart")
    reason = restart.fields["reason"]
    assert "`stream` (variables.py:" in reason and "job.ignore('stream')" in reason, reason


@pytest.mark.nightly
def test_what_is_ignored_is_not_compared(jobs: Jobs) -> None:
    """The control of the test above, and what ``job.ignore`` asks for."""
    result = jobs.run("variables.py", args=["ignored"], faults=[Fault(1, 17, "bucket", "SIGKILL")])
    assert result.status == 0 and not result.kinds("restart"), result.tail()
    with pytest.raises(Mismatch):  # what the stream counts is wrong, as the script has asked for
        compare(result, jobs.reference("variables.py", args=["ignored"]))


#: Frameworks, and where workers fail: an epoch has six batches.
FRAMEWORKS: dict[str, list[Fault]] = {
    "lightning": [Fault(1, 4, "bucket", "SIGKILL"), Fault(0, 14, "forward", "SIGKILL")],
    "fabric": [Fault(0, 10, "bucket", "SIGKILL")],
    "accelerate": [Fault(1, 10, "bucket", "SIGKILL")],
    "transformers": [Fault(1, 10, "bucket", "SIGKILL")],
}


@pytest.mark.parametrize("framework", few(FRAMEWORKS, "accelerate"))
def test_what_the_frameworks_scripts_hold_is_put_back(framework: str, jobs: Jobs) -> None:
    jobs.check("variables_in.py", args=[framework], faults=FRAMEWORKS[framework])


def test_without_the_capture_they_end_otherwise(jobs: Jobs) -> None:
    """The control of the tests above."""
    with pytest.raises(Mismatch):
        jobs.check("variables_in.py", args=["accelerate"], faults=FRAMEWORKS["accelerate"], env={OFF: "1"})


#: Where a worker fails: in the second epoch, of six batches.
CHANGED = [Fault(1, 9, "bucket", "SIGKILL")]


@pytest.mark.parametrize(
    ("framework", "what", "name"),
    [
        ("lightning", "order", "training data 0: sampler.order"),
        pytest.param("transformers", "weights", "training data: dataset.weights", marks=pytest.mark.nightly),
    ],
)
def test_what_a_script_changes_in_data_that_a_framework_reads_is_refused_by_name(
    framework: str, what: str, name: str, jobs: Jobs
) -> None:
    result = jobs.run("data_changed.py", args=[framework, what], faults=CHANGED)
    compare(result, jobs.reference("data_changed.py", args=[framework, what]))
    [restart] = result.kinds("restart")
    assert f"`{name}` has changed" in restart.fields["reason"], restart.fields["reason"]


@pytest.mark.nightly
def test_a_sampler_that_draws_by_what_a_trainer_holds_and_changes_is_refused_by_name(jobs: Jobs) -> None:
    result = jobs.run("data_changed.py", args=["transformers", "drawn"], faults=CHANGED)
    compare(result, jobs.reference("data_changed.py", args=["transformers", "drawn"]))
    [restart] = result.kinds("restart")
    assert "has changed what the sampler of this pass holds" in restart.fields["reason"], restart.fields["reason"]


def test_a_sampler_whose_rest_the_script_changes_in_a_pass_is_refused_by_name(jobs: Jobs) -> None:
    """It has drawn all in advance: the indices so far are those of the failed worker, the others are not."""
    result = jobs.run("data_changed.py", args=["plain", "tail"], faults=CHANGED)
    compare(result, jobs.reference("data_changed.py", args=["plain", "tail"]))
    [restart] = result.kinds("restart")
    assert "has changed what the sampler of this pass holds" in restart.fields["reason"], restart.fields["reason"]
    assert not jobs.check("data_changed.py", args=["plain", "nothing"], faults=CHANGED).kinds("restart")


@pytest.mark.parametrize("framework", few(["lightning", "plain"], "plain"))
def test_loader_workers_keep_what_the_script_held_when_they_were_started(framework: str, jobs: Jobs) -> None:
    """Under Lightning in each epoch, else in the first."""
    jobs.check("data_changed.py", args=[framework, "stage"], faults=CHANGED)


@pytest.mark.parametrize("framework", few(["lightning", "plain"], "plain"))
def test_a_trained_model_that_loader_workers_call_is_refused_by_name(framework: str, jobs: Jobs) -> None:
    """It was another one when they were started."""
    result = jobs.run("data_changed.py", args=[framework, "model"], faults=CHANGED)
    compare(result, jobs.reference("data_changed.py", args=[framework, "model"]))
    [restart] = result.kinds("restart")
    assert "loader workers call a model" in restart.fields["reason"], restart.fields["reason"]


@pytest.mark.nightly
def test_a_frozen_one_is_not(jobs: Jobs) -> None:
    assert not jobs.check("data_changed.py", args=["plain", "frozen"], faults=CHANGED).kinds("restart")


@pytest.mark.nightly
@pytest.mark.parametrize("framework, what", [("lightning", "stage"), ("plain", "stage"), ("plain", "model")])
def test_else_they_would_read_other_items(framework: str, what: str, jobs: Jobs) -> None:
    """The control of the tests above."""
    result = jobs.run("data_changed.py", args=[framework, what, "--late"], faults=CHANGED)
    with pytest.raises(Mismatch):
        compare(result, jobs.reference("data_changed.py", args=[framework, what]))


@pytest.mark.parametrize("framework", few(["lightning", "transformers"], "lightning"))
def test_numbers_in_it_and_what_reading_changes_are_put_back(framework: str, jobs: Jobs) -> None:
    """The data set keeps what it has read."""
    jobs.check("data_changed.py", args=[framework, "level"], faults=CHANGED)

"""What a script does with a trained model between loops, at the top of an epoch and between passes.

A replacement runs that again before it has the trained parameters.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import Jobs

from shared_core.faults import Fault
from tests.support.runner import JobResult, Mismatch, compare

SCRIPT = "between.py"
#: A worker fails in the second loop; an epoch has five step boundaries, with two passes ten.
LATE = {
    part: [Fault(0, step, "bucket", "SIGKILL")] for part, step in (("saves", 17), ("passes", 27), ("evaluates", 12))
}


def printed(result: JobResult) -> set[str]:
    return {line for line in result.stdout.splitlines() if line.startswith("mean ")}


@pytest.mark.parametrize("part", ["saves", "passes"])
def test_what_was_saved_stays(part: str, jobs: Jobs) -> None:
    """Also what is written there of variables, which are put back."""
    result = jobs.check(SCRIPT, args=[part], faults=LATE[part])
    assert result.told("the file stays as it was saved before the failure"), result.tail()


def test_unwatched_it_is_overwritten(jobs: Jobs) -> None:
    """The control; below it, that of the evaluation."""
    result = jobs.run(SCRIPT, args=["saves", "--unwatched"], faults=LATE["saves"])
    with pytest.raises(Mismatch, match=r"end0\.pt"):
        compare(result, jobs.reference(SCRIPT, args=["saves"]))
    result = jobs.run(SCRIPT, args=["evaluates", "--unwatched"], faults=LATE["evaluates"])
    assert printed(result) > printed(jobs.reference(SCRIPT, args=["evaluates"]))


def test_after_an_evaluation_all_start_again(jobs: Jobs, tmp_path: Path) -> None:
    """A checkpoint of the first loop serves; in the second one none is made."""
    env = {"SWIFT_RECOVERY_CHECKPOINT_DIR": str(tmp_path), "SWIFT_RECOVERY_CHECKPOINT_EVERY_STEPS": "2"}
    reference = jobs.reference(SCRIPT, args=["evaluates"])
    result = jobs.run(SCRIPT, args=["evaluates"], faults=LATE["evaluates"], env=env)
    compare(result, reference)
    assert printed(result) == printed(reference)
    [restart] = result.kinds("restart")
    assert "uses a model that is not trained there" in restart.fields["reason"], restart
    assert result.told("no checkpoints from here on: between.py"), result.tail()
    assert "checkpoint at step boundary" in result.stderr, result.tail()


def test_a_script_that_goes_another_way_is_refused(jobs: Jobs, tmp_path: Path) -> None:
    """It leaves the loop before the checkpoint's place, and would end well with another model."""
    env = {"SWIFT_RECOVERY_CHECKPOINT_DIR": str(tmp_path), "SWIFT_RECOVERY_CHECKPOINT_EVERY_STEPS": "2"}
    result = jobs.run(SCRIPT, args=["leaves"], faults=[Fault(0, 8, "bucket", "SIGKILL")], env=env)
    assert result.status and "has gone another way than before" in result.stderr, result.tail()

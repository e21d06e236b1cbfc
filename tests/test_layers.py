"""Layers that a script changes while it trains, and scripts that attach one model after the other."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import Jobs, few

from shared_core.faults import Fault
from shared_core.worker.state.attached import LAYERS_OFF
from tests.support.runner import Mismatch, compare

#: Parts of the script, and where workers fail in them: an epoch has five batches and six step boundaries.
CASES: dict[str, list[Fault]] = {
    "attributes": [Fault(1, 9, "bucket", "SIGKILL"), Fault(0, 15, "forward", "SIGKILL")],
    "buffers": [Fault(0, 9, "bucket", "SIGKILL")],
    "views": [Fault(0, 9, "bucket", "SIGKILL"), Fault(1, 15, "forward", "SIGKILL")],
    "own": [Fault(1, 9, "update.after", "SIGKILL"), Fault(0, 14, "update.after", "SIGKILL")],
    "weights": [Fault(0, 15, "bucket", "SIGKILL")],
    "folds": [Fault(1, 9, "bucket", "SIGKILL")],
}


@pytest.mark.parametrize("part", few(CASES, "buffers"))
def test_what_changes_is_put_back(part: str, jobs: Jobs) -> None:
    jobs.check("layers.py", args=[part], faults=CASES[part])


def test_without_it_a_replacement_ends_otherwise(jobs: Jobs) -> None:
    """The control of the tests above and below."""
    for part in ("attributes", "pruned"):
        result = jobs.run("layers.py", args=[part], faults=CASES["buffers"], env={LAYERS_OFF: "1"})
        with pytest.raises(Mismatch):
            compare(result, jobs.reference("layers.py", args=[part]))


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        ("pruned", "the model was changed after attach(): in the failed worker parameter 0.weight was removed"),
        pytest.param("head", "layer 3 was replaced", marks=pytest.mark.nightly),
        pytest.param("list", "Odd keeps 'norms' as list", marks=pytest.mark.nightly),
    ],
)
def test_what_cannot_be_put_back_is_refused_by_name(part: str, reason: str, jobs: Jobs) -> None:
    """All workers start again, and end as without a failure."""
    result = jobs.run("layers.py", args=[part], faults=[Fault(0, 15, "bucket", "SIGKILL")])
    compare(result, jobs.reference("layers.py", args=[part]))
    [restart] = result.kinds("restart")
    assert reason in restart.fields["reason"], restart
    assert "Traceback" not in result.stderr, result.stderr


def test_a_failure_in_a_later_loop_restarts_all(jobs: Jobs, tmp_path: Path) -> None:
    """What the loops before have made is not there: a replacement would write models that nobody has trained. All start
    again from a checkpoint of the first loop; later ones have none.
    """
    env = {"SWIFT_RECOVERY_CHECKPOINT_DIR": str(tmp_path), "SWIFT_RECOVERY_CHECKPOINT_EVERY_STEPS": "2"}
    result = jobs.run("layers.py", args=["folds"], faults=[Fault(0, 32, "forward", "SIGKILL")], env=env)
    compare(result, jobs.reference("layers.py", args=["folds"]))
    [restart] = result.kinds("restart")
    assert "the failed worker was in loop number 2 of this script" in restart.fields["reason"], restart
    assert result.told("no checkpoints from here on: a worker that resumes here"), result.tail()


def test_a_pass_over_what_the_model_chose_is_refused_by_name(jobs: Jobs) -> None:
    """Between two passes a replacement does not have the parameters yet. An epoch has six and three step boundaries."""
    result = jobs.run("layers.py", args=["between"], faults=[Fault(0, 17, "bucket", "SIGKILL")])
    assert result.status, result.tail()
    assert "this pass reads a TensorDataset of 8 with checksum" in result.stderr, result.tail()


def test_loaders_are_asked_for_again_as_the_failed_worker_did(jobs: Jobs) -> None:
    """With ``reload_dataloaders_every_n_epochs`` hooks count, and the data depends on it."""
    jobs.check("reloaded.py", faults=[Fault(1, 7, "bucket", "SIGKILL"), Fault(0, 9, "forward", "SIGKILL")])

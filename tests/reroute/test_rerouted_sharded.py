"""Pipelines in bf16 and with ZeRO-1 continue without a failed worker: its shard of the optimizer is
stepped by its peers.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import Jobs
from rerouted import ORDERED, SCRIPT, go, kill, once

from shared_core.faults import ANY_STEP, Fault
from tests.support.runner import compare

pytest.importorskip("deepspeed")

#: Which of DeepSpeed's optimizers, and the type in which gradients are added up.
MODES = {
    "bf16": ("--bf16",),
    "zero": ("--zero", "1"),
    "both": ("--bf16", "--zero", "1"),
    "both_adding_in_fp32": ("--bf16", "--zero", "1", "--accumulate", "fp32"),
}
MODELS = {
    "clipped": ("--clip", "0.05", "--decay", "0.1"),
    "tied": ("--tied", "two", "--clip", "0.1"),
    "several": ("--several", "--clip", "0.05", "--micro-batches", "3"),
}


USUAL = (("bf16", "tied"), ("zero", "clipped"), ("both_adding_in_fp32", "several"))


@pytest.mark.nightly
@pytest.mark.parametrize(("mode", "model"), USUAL)
def test_without_a_failure_it_is_deepspeed(jobs: Jobs, mode: str, model: str) -> None:
    args = ("--dropout", "0", *MODES[mode], *MODELS[model])
    theirs = jobs.reference(SCRIPT, nproc=4, args=args)
    compare(jobs.run(SCRIPT, nproc=4, args=args, env=ORDERED), theirs)


#: How often a worker has been where in the step when it fails.
PLACES = {
    "before": (1, "step_boundary"),
    "forward": (2, "reroute.forward"),
    "backward": (2, "reroute.backward"),
    "reduction": (1, "reroute.reduce"),
    "sum is being sent": (11, "survivor_group.wait"),
    "step": (1, "reroute.step"),
    "update begins": (1, "update.before"),
    "in the update": (1, "update.during"),
    "after the update": (1, "update.after"),
}
#: Both clip, and decay the learning rate: a replacement has the scheduler's.
CLIPPED = ("--clip", "0.05", "--decay", "0.1")


@pytest.mark.nightly
def test_replacements_are_admitted(jobs: Jobs) -> None:
    """Whose peers then fail: what the replacements have of the optimizer is all that there is."""
    faults = [kill(1, 2, 1, "reroute.backward"), kill(0, 4, 1, "update.during"), kill(3, 4, 1, "reroute.forward")]
    result = once(jobs, faults, (*MODES["both"], *CLIPPED, "--sum-after", "2", "3", "5"))
    assert [event.rank for event in result.kinds("admitted")][0] == 1, result.tail()
    assert {event.rank for event in result.kinds("admitted")} == {0, 1, 3}, result.tail()


@pytest.mark.nightly
def test_two_of_three_replicas_fail(jobs: Jobs) -> None:
    """The one that is left has the shards of all three."""
    faults = [kill(3, 3, 1, "reroute.backward"), kill(4, 4, 1, "update.during")]
    once(jobs, faults, (*MODES["zero"], *CLIPPED), nproc=6)


#: Gradients that are not finite in one stage, which leaves the update of all out.
ODD = ("--odd", "9", "--odd-value", "nan", "--decay", "0.1", "--dropout", "0")


@pytest.mark.nightly
def test_an_update_is_left_out(jobs: Jobs) -> None:
    """In the step in which a worker fails, and which its replacement passes by."""
    args = (*MODES["both"], *ODD, "--sum-after", "3")
    theirs = jobs.reference(SCRIPT, nproc=4, args=args)
    result = jobs.run(SCRIPT, nproc=4, args=args, env=ORDERED, faults=[kill(2, 2, 1, "reroute.reduce")])
    compare(result, theirs)
    assert result.struck and not result.kinds("restart") and len(result.kinds("admitted")) == 1, result.tail()


@pytest.mark.nightly
def test_the_last_worker_of_a_stage_fails(jobs: Jobs, tmp_path: Path) -> None:
    """Then all go back to the checkpoint, which has all shards."""
    env = {"SWIFT_RECOVERY_CHECKPOINT_DIR": str(tmp_path), "SWIFT_RECOVERY_CHECKPOINT_EVERY_STEPS": "2"}
    faults = [kill(rank, 5, 1, "reroute.forward") for rank in (2, 3)]
    result = go(jobs, faults, (*MODES["both"], *CLIPPED), env=env)
    assert len(result.kinds("restart")) == 1, result.tail()
    assert {4} <= {event.fields["boundary"] for event in result.kinds("checkpoint")}, result.tail()


@pytest.mark.nightly
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("mode", MODES)
def test_every_place(jobs: Jobs, mode: str, rank: int, place: str) -> None:
    nth, point = PLACES[place]
    once(jobs, [kill(rank, 3, nth, point)], (*MODES[mode], *CLIPPED, "--tied", "two", "--steps", "5"))


@pytest.mark.nightly
def test_a_replacement_fails_again(jobs: Jobs) -> None:
    long = ("--steps", "16", "--work-ms", "30", "--micro-batches", "2")
    again = Fault(3, ANY_STEP, "update.during", "SIGKILL", incarnation=1)
    result = once(jobs, [kill(3, 2, 1, "reroute.backward"), again], (*MODES["both"], *CLIPPED, *long))
    assert len(result.struck) == 2, result.tail()

"""Clipping by the norm over all stages, and gradients that are not finite: where a stage steps before it knows that
norm, it ends with the same bits as one that waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from harness import Jobs
from rerouted import ORDERED, SCRIPT, alike, kill

from shared_core.faults import Fault
from tests.support.runner import JobResult

pytest.importorskip("deepspeed")
STAGGERED = ORDERED | {"SWIFT_RECOVERY_REROUTE_PLAN": "staggered"}
WAITING = ORDERED | {"SWIFT_RECOVERY_REROUTE_PLAN": "decoupled"}
#: Steps 2 (counted from 0), 5 and 7 have a label that makes one stage's gradients, or all of them, larger than allowed.
CLIPPED = ("--clip", "2.5", "--steps", "9", "--decay", "0.1", "--odd", "10", "21", "30", "--odd-value", "300")


def check(
    jobs: Jobs, args: Sequence[str], faults: Sequence[Fault] = (), env: dict[str, str] | None = None, nproc: int = 4
) -> JobResult:
    """The staggered optimizer, also with losses, ends as the one that waits, without any."""
    reference = jobs.reference(SCRIPT, nproc=nproc, args=args, env=WAITING, launcher="swiftrun")
    assert not reference.kinds("update_taken_back")
    result = jobs.run(SCRIPT, nproc=nproc, args=args, env=STAGGERED | (env or {}), faults=faults)
    alike(result, reference, faults)
    return result


@pytest.mark.nightly
def test_updates_that_were_too_early_are_taken_back(jobs: Jobs) -> None:
    result = check(jobs, CLIPPED)
    assert {event.fields["step"] for event in result.kinds("update_taken_back")} <= {2, 5, 7}
    assert result.kinds("update_taken_back"), result.tail()


@pytest.mark.nightly
def test_a_checkpoint_has_no_update_that_is_taken_back(jobs: Jobs, tmp_path: Path) -> None:
    """Both workers of a stage fail after the checkpoint that follows such an update."""
    env = {"SWIFT_RECOVERY_CHECKPOINT_DIR": str(tmp_path), "SWIFT_RECOVERY_CHECKPOINT_EVERY_STEPS": "3"}
    faults = [kill(rank, 8) for rank in (2, 3)]
    result = check(jobs, CLIPPED, faults, env)
    taken = {event.fields["step"] for event in result.kinds("update_taken_back")}
    boundaries = [event.fields["boundary"] for event in result.kinds("checkpoint")]
    assert result.kinds("restart") and 5 in taken and 6 in boundaries, result.tail()


@pytest.mark.nightly
@pytest.mark.parametrize("value", ["nan", "3e38", "1e21", "inf"])
def test_gradients_that_are_not_finite(jobs: Jobs, value: str) -> None:
    check(jobs, ("--clip", "2.5", "--odd", "10", "--odd-value", value))


@pytest.mark.nightly
@pytest.mark.parametrize("stages", (2, 4))
@pytest.mark.parametrize("step", (2, 3, 4))
@pytest.mark.parametrize(
    ("point", "nth"),
    [
        ("reroute.action", 1),
        ("reroute.action", 6),
        ("reroute.reduce", 1),
        ("reroute.step", 1),
        ("update.before", 1),
        ("update.during", 1),
        ("update.after", 1),
        ("update.before", 2),
        ("update.after", 2),
        ("survivor_group.wait", 9),
        ("survivor_group.wait", 11),
        ("survivor_group.wait", 13),
    ],
)
def test_a_failure_around_an_update_that_is_taken_back(
    jobs: Jobs, point: str, nth: int, step: int, stages: int
) -> None:
    """One step before it, in it, and in the next; each rank of one pipeline."""
    for rank in range(0, 2 * stages, 2):
        faults = [kill(rank, step, nth, point)]
        result = check(jobs, (*CLIPPED, "--stages", str(stages)), faults, nproc=2 * stages)
        assert not result.kinds("restart"), result.tail()

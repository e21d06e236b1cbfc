"""Loops as people write them lose workers in every epoch, and end with the bits of the stock script."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpointed import options
from harness import Jobs, few

from shared_core.faults import Fault
from tests.support.runner import check_clean, compare, unconfirmed

EACH = (
    "tqdm fresh own_generator generator enumerate islice zip map wrapper list nested turns left empty rounds stream "
    "bare_generator workers agreed"
).split()

#: Forms, one after the other with two epochs each, and where workers fail. The end of a pass is a step boundary,
#: too.
JOBS: dict[str, tuple[str, list[Fault]]] = {
    "one_source": (
        "tqdm own_generator generator zip nested turns rounds stream",
        [
            Fault(1, 3, "bucket", "SIGKILL"),
            Fault(0, 17, "forward", "SIGKILL"),
            Fault(1, 28, "bucket", "SIGKILL", incarnation=1),
            Fault(0, 33, "update.after", "SIGKILL", incarnation=1),
            Fault(1, 49, "bucket", "SIGKILL", incarnation=2),
            Fault(0, 58, "bucket", "SIGKILL", incarnation=2),
            Fault(1, 79, "forward", "SIGKILL", incarnation=3),
            Fault(0, 94, "bucket", "SIGKILL", incarnation=3),
        ],
    ),
    "another_each_time": (
        "fresh left empty bare_generator workers list",
        [
            Fault(1, 7, "bucket", "SIGKILL"),
            Fault(0, 15, "bucket", "SIGKILL"),
            Fault(1, 23, "collective.before", "SIGKILL", incarnation=1),
            Fault(0, 31, "bucket", "SIGKILL", incarnation=1),
            Fault(1, 39, "bucket", "SIGKILL", incarnation=2),
            Fault(0, 49, "bucket", "SIGKILL", incarnation=2),
        ],
    ),
    "what_rank_0_gives_out": (
        "agreed tqdm",
        [
            Fault(1, 5, "bucket", "SIGKILL"),
            Fault(0, 7, "bucket", "SIGKILL"),
            Fault(1, 11, "forward", "SIGKILL", incarnation=1),
            Fault(0, 14, "bucket", "SIGKILL", incarnation=1),
        ],
    ),
}


@pytest.mark.parametrize("name", few(JOBS, "what_rank_0_gives_out"))
def test_failures_change_no_bit(name: str, jobs: Jobs) -> None:
    forms, faults = JOBS[name]
    jobs.check("loops.py", faults=faults, args=["--epochs", "2", *forms.split()])


@pytest.mark.nightly
def test_restarts_from_checkpoints_change_no_bit(jobs: Jobs, tmp_path: Path) -> None:
    args = ["--epochs", "2", *"tqdm own_generator zip turns rounds".split()]
    env = options(tmp_path / "checkpoints", every=3, on_failure="restart", checkpoint_background="false")
    faults = [Fault(1, 9, "bucket", "SIGKILL"), Fault(0, 28, "bucket", "SIGKILL"), Fault(1, 61, "forward", "SIGKILL")]
    result = jobs.run("loops.py", args=args, faults=faults, env=env)
    compare(result, jobs.reference("loops.py", args=args))
    assert not unconfirmed(result), result.tail()
    boundaries = [event.fields["boundary"] for event in result.kinds("checkpoint")]
    assert boundaries == list(range(3, 64, 3)), "each start began at the newest checkpoint"


def test_an_iterator_that_nobody_can_follow_is_refused_before_the_first_step(jobs: Jobs) -> None:
    result = jobs.run("loops.py", args=["shared_stream"])
    check_clean(result)
    assert result.status == 1
    assert "this islice reads from 'stream'" in result.stderr and "leave the pass with break" in result.stderr
    assert {event.fields["boundaries"] for event in result.kinds("failed")} == {0}


@pytest.mark.nightly
@pytest.mark.parametrize("boundary", range(1, 16))
@pytest.mark.parametrize("form", EACH)
def test_every_form_at_every_boundary(form: str, boundary: int, jobs: Jobs) -> None:
    """Where a boundary is the end of a pass nothing strikes, and the run is one without a failure."""
    faults = [Fault(boundary % 2, boundary, "bucket", "SIGKILL")]
    compare(jobs.run("loops.py", faults=faults, args=[form]), jobs.reference("loops.py", args=[form]))

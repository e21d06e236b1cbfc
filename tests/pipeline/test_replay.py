"""Stages without replicas: a failed one is rebuilt from its checkpoint and the messages that its neighbours logged."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import Jobs, few
from pipelines import instructions, logging, resolutions, run, starts

from shared_core.faults import Fault

BASE = ("--stages", "4", "--steps", "10", "--tied", "--clip", "0.5")

#: A checkpoint is written at step boundaries 3, 6 and 9. The loss, and the boundary at which the replay starts.
PLACES = {
    "first stage, before the first checkpoint": (Fault(0, 2, "pipe.forward", "SIGKILL", nth=3), 0),
    "middle stage, first batch": (Fault(1, 1, "pipe.backward", "SIGKILL", nth=2), 0),
    "first stage, after the third checkpoint": (Fault(0, 10, "pipe.recv_grad", "SIGKILL", nth=4), 9),
    "first stage, in the update": (Fault(0, 7, "update.during", "SIGKILL", nth=5), 6),
}


@pytest.mark.parametrize(
    "place",
    few(PLACES, "first stage, before the first checkpoint"),
)
def test_a_failed_stage_is_rebuilt(jobs: Jobs, tmp_path: Path, place: str) -> None:
    fault, boundary = PLACES[place]
    result = run(jobs, [fault], BASE, env=logging(tmp_path))
    assert resolutions(result) == {"replay"}, result.tail()
    assert starts(result) == [(fault.rank, boundary)]


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", ["0 3", "0 1 2"])
def test_several_stages_at_once(jobs: Jobs, tmp_path: Path, ranks: str) -> None:
    failed = [int(rank) for rank in ranks.split()]
    result = run(jobs, [Fault(r, 5, "pipe.backward", "SIGKILL", nth=1) for r in failed], BASE, env=logging(tmp_path))
    assert sorted(starts(result)) == [(rank, 3) for rank in failed]


@pytest.mark.nightly
def test_the_replacement_fails_in_its_replay(jobs: Jobs, tmp_path: Path) -> None:
    faults = [
        Fault(1, 5, "pipe.backward", "SIGKILL", nth=2),
        Fault(1, 4, "pipe.forward", "SIGKILL", nth=3, incarnation=1),
    ]
    assert starts(run(jobs, faults, BASE, env=logging(tmp_path))) == [(1, 3), (1, 3)]


@pytest.mark.nightly
@pytest.mark.parametrize(("neighbour", "point"), [("0", "recovery.installed"), ("2", "recovery.streamed")])
def test_a_neighbour_fails_while_it_streams(jobs: Jobs, tmp_path: Path, neighbour: str, point: str) -> None:
    faults = [Fault(1, 5, "pipe.backward", "SIGKILL", nth=2), Fault(int(neighbour), -1, point, "SIGKILL")]
    result = run(jobs, faults, BASE, env=logging(tmp_path))
    assert {boundary for _, boundary in starts(result)} == {3}


@pytest.mark.nightly
def test_failed_while_a_checkpoint_is_written(jobs: Jobs, tmp_path: Path) -> None:
    result = run(jobs, [Fault(0, 6, "checkpoint.write", "SIGKILL")], BASE, env=logging(tmp_path))
    assert starts(result) == [(0, 3)]


@pytest.mark.nightly
def test_another_stage_after_the_first_was_rebuilt(jobs: Jobs, tmp_path: Path) -> None:
    faults = [
        Fault(1, 4, "pipe.backward", "SIGKILL", nth=2),
        Fault(2, 5, "pipe.forward", "SIGKILL", nth=2),
        Fault(1, 8, "pipe.forward", "SIGKILL", nth=4, incarnation=1),
    ]
    assert starts(run(jobs, faults, BASE, env=logging(tmp_path))) == [(1, 3), (2, 3), (1, 6)]


@pytest.mark.nightly
def test_without_checkpoints_it_is_rebuilt_from_the_beginning(jobs: Jobs) -> None:
    result = run(jobs, [Fault(2, 6, "pipe.backward", "SIGKILL", nth=2)], BASE)
    assert starts(result) == [(2, 0)]


@pytest.mark.nightly
def test_a_replacement_that_is_slow_to_receive(jobs: Jobs) -> None:
    """Its neighbours' connections were made with a short time-out, which must not hold for what they stream."""
    result = run(jobs, [Fault(1, 5, "pipe.backward", "SIGKILL", nth=2)], BASE, extra=["--slow", "1.5"])
    assert starts(result) == [(1, 0)]


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("rank", range(4))
def test_every_instruction_of_the_schedule(jobs: Jobs, tmp_path: Path, rank: int) -> None:
    for nth in range(1, 1 + instructions(4, rank)):
        run(jobs, [Fault(rank, 5, "pipe.instruction", "SIGKILL", nth=nth)], BASE, env=logging(tmp_path / str(nth)))

"""Two stages with two replicas each: a failed stage is taken over from its replica, at any instruction, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import Jobs, few
from pipelines import FULL, SCRIPT, instructions, logging, resolutions, run, starts

from shared_core.faults import ANY_STEP, Fault

#: Ranks 0 and 1 are the first stage, ranks 2 and 3 the second.
STAGES = 2
PLACES = {
    "first stage, reduce": Fault(1, 4, "pipe.reduce", "SIGKILL"),
    "first stage, in the update": Fault(0, 5, "update.during", "SIGKILL", nth=7),
    "first stage, evaluation": Fault(0, 3, "pipe.forward", "SIGKILL", nth=2),  # every third call evaluates
}


@pytest.mark.parametrize(
    "place",
    few(PLACES, "first stage, reduce"),
)
def test_a_failed_stage_is_taken_over_from_its_replica(jobs: Jobs, place: str) -> None:
    result = run(jobs, [PLACES[place]], FULL)
    assert resolutions(result) == {"replica"}


def test_fp16_by_autocast_is_refused(jobs: Jobs) -> None:
    result = jobs.run(SCRIPT, nproc=2, args=["--autocast", "float16"])
    assert result.status != 0 and "fp16 with its loss scale cannot be recovered" in result.stderr, result.tail()


@pytest.mark.nightly
def test_a_plain_pipeline(jobs: Jobs) -> None:
    """Its steps get twice as many micro-batches."""
    run(jobs, [Fault(2, 4, "pipe.send_grad", "SIGKILL", nth=6)], ["--grow"])


@pytest.mark.nightly
def test_replicas_of_different_stages_at_once(jobs: Jobs) -> None:
    faults = [Fault(0, 4, "pipe.recv_grad", "SIGKILL", nth=2), Fault(3, 4, "pipe.backward", "SIGKILL", nth=2)]
    assert resolutions(run(jobs, faults, FULL)) == {"replica"}


def both_of_a_stage(stage: str, step: int) -> list[Fault]:
    """One replica of a stage fails, and the other before it can give its state to a replacement."""
    one, other = (0, 1) if stage == "first" else (2, 3)
    return [
        Fault(one, step, "pipe.backward", "SIGKILL", nth=2),
        Fault(other, ANY_STEP, "recovery.severed", "SIGKILL"),
    ]


@pytest.mark.parametrize("stage", ["first", "last"])
@pytest.mark.nightly
def test_all_replicas_of_a_stage_fail_with_messages_logged(jobs: Jobs, tmp_path: Path, stage: str) -> None:
    faults = both_of_a_stage(stage, 7)
    result = run(jobs, faults, FULL, env=logging(tmp_path, log_messages="always"))
    assert resolutions(result) == {"replay"}
    assert {boundary for _, boundary in starts(result)} == {6}


@pytest.mark.nightly
@pytest.mark.parametrize("stage", ["first", "last"])
def test_all_replicas_of_a_stage_fail_without_a_log(jobs: Jobs, tmp_path: Path, stage: str) -> None:
    """Two steps after the checkpoint: of one step, the others mostly have all messages in memory still."""
    faults = both_of_a_stage(stage, 8)
    result = run(jobs, faults, FULL, env=logging(tmp_path), restarts=1)
    assert "continues from the checkpoint at step boundary 6" in result.stderr, result.tail()


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("rank", range(4))
def test_every_instruction_of_the_schedule(jobs: Jobs, rank: int) -> None:
    for nth in range(1, 1 + instructions(STAGES, rank // 2)):
        run(jobs, [Fault(rank, 4, "pipe.instruction", "SIGKILL", nth=nth)], FULL)

"""Survivors compute a part of what a replacement replays; the result is the same, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import Jobs

from shared_core.config import variable_of
from shared_core.faults import ANY_STEP, Fault
from shared_core.pipeline.cost import ReplayCost, shares
from tests.support.runner import JobResult, compare, unconfirmed

STEPS = 12


def run(jobs: Jobs, tmp_path: Path, fault: list[Fault], *args: str, **options: str) -> JobResult:
    """A 1 x 4 pipeline with seeded random numbers, compared with the same without faults."""
    env = {"SWIFT_RECOVERY_REPLAY_RANDOMNESS": "seeded", "SWIFT_RECOVERY_REPLAY_PARALLEL": "always"}
    script = ["--stages", "4", "--steps", str(STEPS), *args]
    reference = jobs.reference("pipe.py", nproc=4, env=env, args=script, launcher="swiftrun")
    more = {"checkpoint_dir": str(tmp_path), "checkpoint_every_steps": "3", "checkpoint_background": "False"} | options
    env |= {variable_of(name): value for name, value in more.items()}
    result = jobs.run("pipe.py", nproc=4, faults=fault, env=env, args=script)
    assert not unconfirmed(result), result.tail()
    if options.get("replay_sums") != "slices":
        compare(result, reference)
    assert not [event for event in result.events if event.kind == "restart"], result.tail()
    return result


def helped(result: JobResult) -> list[int]:
    """Steps that were shared, of each replacement."""
    return [event.fields["steps"] for event in result.events if event.kind == "help"]


@pytest.mark.nightly
def test_a_replay_is_shared_and_bitwise_the_same(jobs: Jobs, tmp_path: Path) -> None:
    fault = Fault(1, 8, "pipe.forward", "SIGKILL", 2)
    result = run(jobs, tmp_path, [fault], "--tied", "--clip", "0.1", "--schedule", "--autocast", "bfloat16")
    assert helped(result) == [2]  # from the checkpoint at step boundary 6 to step boundary 8, and no further


#: Log groups, and who fails. The line that replays together is the whole group, or all neighbours that fail. From
#: the checkpoint at step boundary 4 to step boundary 7: by then the first messages since are dropped from memory.
LINES = {
    "middle two stages": ("1-2", [Fault(2, 7, "pipe.backward", "SIGKILL", 2)]),
    "three stages": ("0-2", [Fault(0, 7, "pipe.forward", "SIGKILL", 2)]),
    "neighbours of two groups": (
        "worker",
        [Fault(1, 7, "pipe.forward", "SIGKILL", 2), Fault(2, ANY_STEP, "recovery.severed", "SIGKILL")],
    ),
}


@pytest.mark.nightly
@pytest.mark.parametrize("line", LINES)
def test_the_replay_of_several_stages_is_shared(jobs: Jobs, tmp_path: Path, line: str) -> None:
    groups, faults = LINES[line]
    args = ("--tied", "--clip", "0.1", "--schedule")
    result = run(jobs, tmp_path, faults, *args, log_groups=groups, checkpoint_every_steps="4")
    assert helped(result) == [3] * (3 if line == "three stages" else 2), result.tail()


@pytest.mark.nightly
@pytest.mark.parametrize("groups", ["worker", "1-2"])
def test_a_helper_that_fails_costs_only_its_share(jobs: Jobs, tmp_path: Path, groups: str) -> None:
    """With its share computed, and nothing of it handed back."""
    faults = [Fault(1, 7, "pipe.forward", "SIGKILL", 2), Fault(3, ANY_STEP, "replay.helped", "SIGKILL")]
    run(jobs, tmp_path, faults, log_groups=groups, checkpoint_every_steps="4")


@pytest.mark.nightly
@pytest.mark.parametrize("rank", [1, 2])
def test_a_replacement_of_several_fails_again(jobs: Jobs, tmp_path: Path, rank: int) -> None:
    """In its first shared step, with all messages of it sent: the other may be in the next step by then."""
    faults = [
        Fault(1, 7, "pipe.forward", "SIGKILL", 2),
        Fault(rank, ANY_STEP, "pipe.reduce", "SIGKILL", incarnation=1),
    ]
    run(jobs, tmp_path, faults, log_groups="1-2", checkpoint_every_steps="4")


@pytest.mark.nightly
def test_sums_by_worker_are_equal_up_to_rounding(jobs: Jobs, tmp_path: Path) -> None:
    fault = [Fault(1, 8, "pipe.forward", "SIGKILL", 2)]
    result = run(jobs, tmp_path, fault, replay_sums="slices")
    exact = run(jobs, tmp_path / "exact", fault)
    assert helped(result) == [2]
    losses, expected = (each.reports[0]["extra"]["losses"] for each in (result, exact))
    assert losses == pytest.approx(expected, rel=1e-5)


def test_shares_are_even_and_the_replacement_has_the_fewest() -> None:
    for micro_batches in range(1, 20):
        for workers in range(1, micro_batches + 1):
            found = shares(micro_batches, workers)
            assert sum(found) == micro_batches and max(found) - min(found) <= 1 and found[0] == min(found)


def test_a_line_pipelines_its_share() -> None:
    """Two stages of 1 s each: a micro-batch is through the line after 2 s, and another each second from then on."""
    assert shares(4, 2, (1.0, 1.0)) == [2, 2] and shares(5, 2, (1.0, 1.0)) == [3, 2]
    assert shares(9, 3, (1.0, 1.0)) == [4, 3, 2] and shares(9, 3) == [3, 3, 3]
    line = ReplayCost(5, (1.0, 1.0), 10, 1, 10.0)
    assert line.seconds(1) == 6.0
    assert line.seconds(2) == pytest.approx(4 + (10 + 2 * 10 + 2 * 1) / 10)
    uneven = ReplayCost(4, (3.0, 1.0), 0, 0, 10.0)
    assert uneven.seconds(1) == 13.0 and uneven.seconds(2) == 8.0 and uneven.best(4) == 4


def test_the_best_number_of_workers_is_the_least_of_all() -> None:
    for bytes_per_s in (1.0, 30.0, 1e3, 1e6):
        replay = ReplayCost(16, (0.3,), 10, 2, bytes_per_s)
        assert replay.seconds(replay.best(12)) == min(replay.seconds(n) for n in range(1, 13))
    assert ReplayCost(16, (0.3,), 10, 2, 1e9).best(4) == 4 and ReplayCost(3, (0.3,), 10, 2, 1e9).best(9) == 3

"""Survivors compute a part of what a newcomer replays; the result is the same, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import Jobs, most

from shared_core.config import variable_of
from shared_core.faults import ANY_STEP, Fault
from shared_core.pipeline.cost import ReplayCost, shares
from shared_core.testing.runner import JobResult, compare, unconfirmed

STEPS = 12


def run(jobs: Jobs, tmp_path: Path, fault: list[Fault], *args: str, **options: str) -> JobResult:
    """A 1 x 4 pipeline with seeded random numbers, compared with the same without faults."""
    env = {"SWIFT_RECOVERY_REPLAY_RANDOMNESS": "seeded", "SWIFT_RECOVERY_REPLAY_PARALLEL": "always"}
    script = ["--stages", "4", "--steps", str(STEPS), *args]
    reference = jobs.reference("pipe.py", nproc=4, env=env, args=script, launcher="swiftrun")
    env |= {variable_of(name): value for name, value in options.items()}
    env |= {"SWIFT_RECOVERY_CHECKPOINT_DIR": str(tmp_path), "SWIFT_RECOVERY_CHECKPOINT_EVERY_STEPS": "3"}
    result = jobs.run("pipe.py", nproc=4, faults=fault, env=env, args=script)
    assert not unconfirmed(result), result.tail()
    if options.get("replay_sums") != "slices":
        compare(result, reference)
    assert not [event for event in result.events if event.kind == "restart"], result.tail()
    return result


def helped(result: JobResult) -> list[int]:
    """Steps that were shared, of each newcomer."""
    return [event.fields["steps"] for event in result.events if event.kind == "help"]


@pytest.mark.parametrize("rank", most(["0", "1", "3"], "0", "3"))
def test_a_replay_is_shared_and_bitwise_the_same(jobs: Jobs, tmp_path: Path, rank: str) -> None:
    fault = Fault(int(rank), 8, "pipe.forward", "SIGKILL", 2 if rank != "3" else 1)
    result = run(jobs, tmp_path, [fault], "--tied", "--clip", "0.1", "--schedule", "--autocast", "bfloat16")
    assert helped(result) == [2]  # from the checkpoint at batch top 6 to batch top 8, and no further


#: Log groups, and who is lost. The line that replays together is the whole group, or all neighbours that are lost.
LINES = {
    "first two stages": ("0-1", [Fault(1, 8, "pipe.forward", "SIGKILL", 2)]),
    "middle two stages": ("1-2", [Fault(2, 8, "pipe.backward", "SIGKILL", 2)]),
    "last two stages": ("2-3", [Fault(3, 8, "pipe.forward", "SIGKILL", 2)]),
    "three stages": ("0-2", [Fault(0, 8, "pipe.forward", "SIGKILL", 2)]),
    "neighbours of two groups": (
        "worker",
        [Fault(1, 8, "pipe.forward", "SIGKILL", 2), Fault(2, ANY_STEP, "recovery.severed", "SIGKILL")],
    ),
}


@pytest.mark.parametrize("line", most(LINES, *(name for name in LINES if name != "middle two stages")))
def test_the_replay_of_several_stages_is_shared(jobs: Jobs, tmp_path: Path, line: str) -> None:
    groups, faults = LINES[line]
    result = run(jobs, tmp_path, faults, "--tied", "--clip", "0.1", "--schedule", log_groups=groups)
    assert helped(result) == [2] * (3 if line == "three stages" else 2), result.tail()


@pytest.mark.nightly
@pytest.mark.parametrize("groups", ["worker", "1-2"])
def test_a_helper_that_is_lost_costs_only_its_share(jobs: Jobs, tmp_path: Path, groups: str) -> None:
    faults = [Fault(1, 8, "pipe.forward", "SIGKILL", 2), Fault(3, ANY_STEP, "replay.helped", "SIGKILL")]
    run(jobs, tmp_path, faults, log_groups=groups)


@pytest.mark.nightly
@pytest.mark.parametrize("rank", [1, 2])
def test_a_newcomer_of_several_is_lost_again(jobs: Jobs, tmp_path: Path, rank: int) -> None:
    faults = [
        Fault(1, 8, "pipe.forward", "SIGKILL", 2),
        Fault(rank, ANY_STEP, "pipe.reduce", "SIGKILL", incarnation=1),
    ]
    assert helped(run(jobs, tmp_path, faults, log_groups="1-2")) == [2, 2]


@pytest.mark.nightly
def test_sums_by_worker_are_equal_up_to_rounding(jobs: Jobs, tmp_path: Path) -> None:
    fault = [Fault(1, 8, "pipe.forward", "SIGKILL", 2)]
    result = run(jobs, tmp_path, fault, replay_sums="slices")
    exact = run(jobs, tmp_path / "exact", fault)
    assert helped(result) == [2]
    losses, expected = (each.reports[0]["extra"]["losses"] for each in (result, exact))
    assert losses == pytest.approx(expected, rel=1e-5)


def test_shares_are_even_and_the_newcomer_has_the_fewest() -> None:
    for micro_batches in range(1, 20):
        for workers in range(1, micro_batches + 1):
            found = shares(micro_batches, workers)
            assert sum(found) == micro_batches and max(found) - min(found) <= 1 and found[0] == min(found)


def test_cost_of_a_shared_step() -> None:
    """By hand: 8 micro-batches of 1 s, a stage of 10 bytes, messages of 1 byte, 10 bytes a second."""
    ordered = ReplayCost(8, (1.0,), 10, 1, 10.0)
    assert ordered.seconds(1) == 8.0
    assert ordered.seconds(2) == pytest.approx(4 + (10 + 4 * 10 + 4 * 1) / 10)
    slices = ReplayCost(8, (1.0,), 10, 1, 10.0, ordered=False)
    assert slices.seconds(2) == pytest.approx(4 + (10 + 10 + 4 * 1) / 10)
    assert ordered.best(8) == 1 and slices.best(8) == 2


def test_the_best_number_of_workers_is_the_least_of_all() -> None:
    for bytes_per_s in (1.0, 30.0, 1e3, 1e6):
        replay = ReplayCost(16, (0.3,), 10, 2, bytes_per_s)
        assert replay.seconds(replay.best(12)) == min(replay.seconds(n) for n in range(1, 13))
    assert ReplayCost(16, (0.3,), 10, 2, 1e9).best(4) == 4 and ReplayCost(3, (0.3,), 10, 2, 1e9).best(9) == 3

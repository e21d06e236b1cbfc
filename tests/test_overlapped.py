"""The update overlapped with communication: the bits of plain DDP, whoever fails between two updates."""

from __future__ import annotations

import pytest
from harness import Jobs, few

from shared_core.faults import ANY_STEP, Fault
from tests.support.runner import JobResult

ON = {"SWIFT_RECOVERY_STATE_OVERLAPPED_UPDATE": "true"}
SCRIPT = "overlapped.py"

#: A bucket is handed over while others of the step have had their update: a failure there finds survivors torn.
FAULTS: dict[str, list[Fault]] = {
    "others_are_torn": [Fault(1, 4, "bucket", "SIGKILL", nth=3)],
    "rank_0_amid_its_update": [Fault(0, 5, "update.during", "SIGKILL", nth=20)],
    "in_the_first_update": [Fault(2, 2, "update.during", "SIGKILL", nth=10)],
    "before_the_update": [Fault(2, 4, "update.before", "SIGKILL")],
    "who_gives_the_state": [
        Fault(1, 4, "bucket", "SIGKILL", nth=3),
        Fault(0, ANY_STEP, "recovery.giving", "SIGKILL"),
    ],
    "the_replacement_is_torn": [
        Fault(1, 4, "bucket", "SIGKILL", nth=3),
        Fault(1, 4, "bucket", "SIGKILL", nth=4, incarnation=1),
    ],
    "a_step_apart": [Fault(rank, 3 + rank, "update.during", "SIGKILL", nth=30) for rank in range(3)],
}
WAYS = ("view", "accumulate", "closure", "tied", "outside", "zeroed", "average")
OPTIMIZERS = ("nesterov", "Adam", "fused", "Adafactor")

MISTAKES = {
    "clip": "the gradient of a parameter of shape (24",
    "data": "the gradient of a parameter of shape (24, 24) was changed",
    "replaced": "the gradient of a parameter of shape (24, 24) was changed",
    "removed": "the gradient of a parameter of shape (24, 24) was changed",
    "rate": "a hyper-parameter of the optimizer (a learning rate?) was changed",
    "weight": "a parameter of shape (24, 24) was changed",
    "skip": "a batch ends after backward without optimizer.step()",
    "twice": "a second backward before optimizer.step()",
    "unused": "does not work with DistributedDataParallel(find_unused_parameters=...)",
}


def check(jobs: Jobs, faults: list[Fault], *args: str, nproc: int = 3) -> JobResult:
    result = jobs.check(SCRIPT, nproc=nproc, faults=faults, env=ON, args=args)
    for rank, report in result.reports.items():
        assert report["extra"]["early"] > 0, f"rank {rank} has updated nothing before the step"
    return result


@pytest.mark.parametrize("name", few(FAULTS, "who_gives_the_state"))
def test_a_failure_changes_no_bit(name: str, jobs: Jobs) -> None:
    check(jobs, FAULTS[name])


@pytest.mark.nightly
@pytest.mark.parametrize("way", WAYS)
def test_ways_of_the_loop(way: str, jobs: Jobs) -> None:
    check(jobs, [Fault(1, 4, "bucket", "SIGKILL", nth=3)], "--way", way)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizers(optimizer: str, jobs: Jobs) -> None:
    check(jobs, [Fault(1, 4, "bucket", "SIGKILL", nth=4)], "--optimizer", optimizer)


#: Of the 14 batches, those with an update are 2, 4, 6, 7, 9, 11, 13 and 14.
LIGHTNING = {
    "rank_0": [Fault(0, 9, "update.during", "SIGKILL", nth=12)],
    "two": [Fault(0, 6, "bucket", "SIGKILL", nth=2), Fault(1, 11, "bucket", "SIGKILL", nth=3)],
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", LIGHTNING)
def test_lightning(name: str, jobs: Jobs) -> None:
    jobs.check("lit.py", faults=LIGHTNING[name], env=ON, args=["--feature", "small_buckets"])


ACCELERATE = {
    "two": [Fault(0, 6, "bucket", "SIGKILL", nth=2), Fault(1, 10, "bucket", "SIGKILL", nth=2)],
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", ACCELERATE)
def test_accelerate(name: str, jobs: Jobs) -> None:
    result = jobs.check("acc.py", faults=ACCELERATE[name], env=ON, args=["--small-buckets"])
    assert all(report["extra"]["early"] > 0 for report in result.reports.values())


@pytest.mark.nightly
def test_accelerate_accumulates(jobs: Jobs) -> None:
    faults = [Fault(1, 8, "bucket", "SIGKILL", nth=2)]
    jobs.check("acc.py", faults=faults, env=ON, args=["--small-buckets", "--accumulate", "2"])


@pytest.mark.parametrize("name", few(MISTAKES, "clip"))
def test_what_the_early_update_cannot_follow_is_refused(name: str, jobs: Jobs) -> None:
    result = jobs.run(SCRIPT, env=ON, args=["--mistake", name])
    assert result.status != 0
    assert MISTAKES[name] in " ".join(result.tail().split()), result.tail()

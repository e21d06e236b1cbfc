"""Random scripts end with a failure as they end stock, or with an error that says why they cannot."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from harness import Jobs

from .grammar import write
from .trial import HANG, OTHER, REFUSED, Trials

#: Programs of a night; at most so many of a hundred are refused.
_NIGHTLY, _MOST_REFUSED = 300, 5


@pytest.fixture
def runs(jobs: Jobs, tmp_path: Path) -> Trials:
    return Trials(tmp_path, jobs.plain, jobs.warm)


@pytest.mark.parametrize("seed", range(1, 9))
def test_a_random_program_ends_as_without_a_failure_or_is_refused(seed: int, runs: Trials) -> None:
    outcome = runs.run(seed, restart=seed % 4 == 0)
    assert outcome.verdict not in (OTHER, HANG), f"{outcome.row()}\n{outcome.program.swift}"


@pytest.mark.nightly
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("restart", [False, True], ids=["replaced", "start_again"])
def test_many_random_programs(restart: bool, runs: Trials, request: pytest.FixtureRequest) -> None:
    """Others each night: the date is the first seed."""
    first = request.config.getoption("night") or 1
    count = _NIGHTLY // 3 if restart else _NIGHTLY
    outcomes = [runs.run(seed, restart=restart) for seed in range(first, first + count)]
    found = Counter(outcome.verdict for outcome in outcomes)
    wrong = [outcome.row() for outcome in outcomes if outcome.verdict in (OTHER, HANG)]
    refused = [outcome.row() for outcome in outcomes if outcome.verdict == REFUSED]
    assert not wrong, "\n".join([f"{found}", *wrong])
    assert len(refused) <= _MOST_REFUSED * count / 100, "\n".join([f"{found}", *refused])


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_what_is_registered_is_never_refused(runs: Trials) -> None:
    outcomes = [runs.run(seed, plain=False) for seed in range(1, 41)]
    assert not [outcome.row() for outcome in outcomes if outcome.verdict != "same"]


def test_a_seed_gives_the_same_program() -> None:
    assert all(write(seed) == write(seed) for seed in range(100))
    assert write(1) != write(2)
    assert write(1).stock.count("shared_core") == 0

"""Thousands of schedules with failures at any moment; a failure names the seed that repeats it."""

from __future__ import annotations

import random
import re

import pytest
from harness import few
from simulator import EXCLUSIVE, Job, Stuck, random_program

from shared_core.errors import RecoveryFailed

KINDS = {
    "replicated": {"exclusive": False, "messages": False},
    "rank_specific": {"messages": False},
    "messages": {"exclusive": False},
    "all": {},
    "waits_across_boundaries": {"crossing": True},
}


def simulate(kind: str, seed: int, failures: int, chance: float) -> tuple[Job, RecoveryFailed | None]:
    """One job; whether and why it could not continue in place."""
    rng = random.Random(f"{kind} {seed}")
    job = Job(random_program(rng, rng.choice((2, 3, 3, 4)), rng.randint(1, 6), **KINDS[kind]), rng)
    try:
        job.run(chance, failures)
    except RecoveryFailed as failed:
        return job, failed
    except (Stuck, AssertionError, LookupError) as error:
        raise AssertionError(f"kind {kind}, seed {seed}: {error!r}") from error
    return job, None


def is_kept(job: Job, failed: str) -> bool:
    """Whether those who never failed have the result that is said to be gone. All of a group hold what is the same
    for all; the rest is computed again from what the others gave.
    """
    found = re.match(r"collective (\d+) of group '(\w+)' is needed by rank (\d+)", failed)
    assert found, failed
    number, group, needed_by = int(found[1]), found[2], int(found[3])
    members = {*job.program.groups[group]}
    steps = job.program.steps[needed_by]
    [what] = [step.what for step in steps if (step.do, step.group, step.number) == ("issue", group, number)]
    return members - {needed_by} <= job.originals if what in EXCLUSIVE else bool(members & job.originals)


def schedules(kind: str, seeds: range) -> None:
    recovered = 0
    for seed in seeds:
        job, failed = simulate(kind, seed, failures=3, chance=0.03)
        recovered += len(job.plans)
        if failed is not None and kind in ("replicated", "rank_specific") and is_kept(job, str(failed)):
            raise AssertionError(f"kind {kind}, seed {seed}: ranks {job.originals} never failed, but {failed}")
    assert recovered > len(seeds), "failures did happen"


@pytest.mark.parametrize("kind", few(KINDS, "messages"))
def test_failures_at_any_moment(kind: str) -> None:
    schedules(kind, range(500))


@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS)
def test_many_more(kind: str) -> None:
    schedules(kind, range(500, 8000))


@pytest.mark.parametrize("kind", ["replicated", "rank_specific", "messages", "all"])
def test_one_failure_is_always_made_good(kind: str) -> None:
    """Without operations that are waited for beyond a step boundary: any number of ranks but all, failed at once."""
    for seed in range(10_000, 10_250):
        _, failed = simulate(kind, seed, failures=1, chance=0.02)
        assert failed is None, f"kind {kind}, seed {seed}: {failed}"

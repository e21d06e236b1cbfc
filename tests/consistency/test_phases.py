"""Workers in their phases: failures at any moment in thousands of seeds, and the most telling ones line by line.

A failure names the seed that repeats it. After a change of the transcripts that is meant:
``SWIFT_TESTS_GOLDEN=write pytest tests/consistency/test_phases.py``.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from cluster import Job
from cluster_worker import Failure, Stuck

from shared_core.protocol.worker_phase import TRANSITIONS, IllegalWorkerEvent, WorkerEvent, WorkerPhase, transition

GOLDEN = Path(__file__).parents[1] / "golden" / "phases.txt"
HEAD = "=== "
FIRST = Failure(1, "step 3")
SCENARIOS = {
    "a crash in a step": Job(None, 3, 4, failures=[FIRST]),
    "a crash in the recovery": Job(None, 3, 4, failures=[FIRST, Failure(0, "exchange 1")]),
    "two at once": Job(None, 4, 4, failures=[Failure(1, "step 3", also=(2,))]),
    "all replicas of a stage": Job(None, 4, 4, replicas=2, failures=[Failure(2, "step 3", also=(3,))]),
    "the replacement fails": Job(None, 3, 4, failures=[FIRST, Failure(1, "script", incarnation=1)]),
    "the one that decides fails": Job(None, 3, 4, failures=[FIRST, Failure(2, "deciding 1")]),
    "continuing without a failed rank": Job(None, 3, 6, "reroute", failures=[FIRST]),
    "a failure while admitting": Job(None, 3, 6, "reroute", failures=[FIRST, Failure(0, "exchange 1")]),
    "a change that is given up while admitting": Job(
        None, 3, 6, "reroute", failures=[FIRST, Failure(1, "agreed 1", incarnation=1, how="changed")]
    ),
    "another number of workers": Job(None, 3, 4, "shrink", failures=[FIRST]),
    "all workers fail": Job(None, 3, 4, failures=[Failure(1, "step 3", also=(0, 2))]),
    "a replica whose state differs": Job(None, 3, 4, failures=[Failure(1, "step 3", how="divergent")]),
    "a machine that is taken for failed": Job(None, 3, 4, failures=[Failure(1, "step 3", how="taken")]),
}


def simulate(on_failure: str, seed: int) -> Job:
    rng = random.Random(f"{on_failure} {seed}")
    job = Job(rng, rng.choice((2, 3, 4)), rng.randint(2, 8), on_failure, chance=0.02, most=3)
    return finished(job, f"on_failure {on_failure}, seed {seed}")


def finished(job: Job, which: str) -> Job:
    try:
        job.run()
    except (Stuck, IllegalWorkerEvent, AssertionError, LookupError) as error:
        raise AssertionError("\n".join([*job.lines, f"{which}: {error!r}"])) from error
    return job


def many(on_failure: str, seeds: range) -> set[tuple[WorkerPhase, WorkerEvent]]:
    jobs = [simulate(on_failure, seed) for seed in seeds]
    assert sum(job.ledger.generation for job in jobs) > len(seeds) // 2, "failures did happen"
    return set[tuple[WorkerPhase, WorkerEvent]]().union(*(job.rows for job in jobs))


@pytest.mark.parametrize("on_failure", ["replace", "reroute", "shrink"])
def test_failures_in_any_phase(on_failure: str) -> None:
    rows = many(on_failure, range(100))
    if on_failure == "reroute":
        assert {
            (WorkerPhase.ASKS_TO_JOIN, WorkerEvent.ADMITTED_SOME),
            (WorkerPhase.WITHOUT, WorkerEvent.ADMITTED_SOME),
        } <= rows


def given_up(seed: int) -> Job:
    """A change of the number of workers begins while replacements are admitted, and is given up."""
    rng = random.Random(seed)
    change = Failure(rng.choice((0, 2)), "agreed 1", how="changed")
    job = Job(rng, 3, 6, "reroute", failures=[FIRST, change])
    return finished(job, f"seed {seed}")


def test_a_change_that_is_given_up_while_replacements_are_admitted() -> None:
    rows = set[tuple[WorkerPhase, WorkerEvent]]().union(*(given_up(seed).rows for seed in range(100)))
    assert {(WorkerPhase.ASKS_TO_JOIN, WorkerEvent.FORM), (WorkerPhase.RECOVERING, WorkerEvent.ADMITTED_LATE)} <= rows


@pytest.mark.nightly
def test_many_more() -> None:
    """Everything that may happen in a phase does, in one of them."""
    rows = set[tuple[WorkerPhase, WorkerEvent]]().union(*(given_up(seed).rows for seed in range(100)))
    for on_failure in ("replace", "reroute", "shrink"):
        for seed in range(100, 2000):
            rows |= simulate(on_failure, seed).rows
    assert not TRANSITIONS.keys() - rows


def test_the_most_telling_failures_line_by_line() -> None:
    for job in SCENARIOS.values():
        job.run()
    found = "".join(f"{HEAD}{name}\n" + "".join(f"{line}\n" for line in job.lines) for name, job in SCENARIOS.items())
    if os.environ.get("SWIFT_TESTS_GOLDEN") == "write":
        GOLDEN.write_text(found)
    assert found == GOLDEN.read_text()


@pytest.mark.parametrize(
    ("phase", "event"),
    [
        (WorkerPhase.LIVE, WorkerEvent.ARRIVED),
        (WorkerPhase.LIVE, WorkerEvent.ADMITTED),
        (WorkerPhase.WITHOUT, WorkerEvent.INSTALLED),
        (WorkerPhase.BEHIND, WorkerEvent.CARRY_ON),
        (WorkerPhase.STARTING, WorkerEvent.INSTALLED),
        (WorkerPhase.ASKS_TO_JOIN, WorkerEvent.ARRIVED),
    ],
)
def test_an_event_that_cannot_happen_is_named(phase: WorkerPhase, event: WorkerEvent) -> None:
    with pytest.raises(IllegalWorkerEvent, match=f"{phase.value}.*{event.value}"):
        transition(phase, event)


@pytest.mark.parametrize("phase", WorkerPhase)
def test_every_worker_ends_when_its_rank_is_given_away(phase: WorkerPhase) -> None:
    assert transition(phase, WorkerEvent.REPLACED)[0] is WorkerPhase.ENDED

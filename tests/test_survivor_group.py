"""``on_failure="reroute"``: the others continue without a failed rank, and admit its replacement at a step boundary."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from checkpointed import options
from harness import Jobs, few

from shared_core.faults import ANY_STEP, Fault
from tests.support.runner import JobResult, check_survivors, compare, unconfirmed

REROUTE = ["--on-failure=reroute"]


def run(jobs: Jobs, faults: list[Fault], *args: str, nproc: int = 4, **env: str) -> JobResult:
    result = jobs.run("survivor_group.py", nproc=nproc, faults=faults, args=args, launcher_args=REROUTE, env=env)
    assert result.status == 0, result.tail()
    assert not unconfirmed(result), "\n".join([*unconfirmed(result), result.tail()])
    assert not result.kinds("restart"), result.tail()
    return result


@pytest.mark.nightly
def test_without_a_failure(jobs: Jobs) -> None:
    result = run(jobs, [])
    compare(result, jobs.reference("survivor_group.py", nproc=4))
    assert [event.fields["ranks"] for event in result.kinds("survivor_group")] == [[0, 1, 2, 3]], result.tail()


#: Faults, and from which step on the others wait for replacements (of 12).
CASES: dict[str, tuple[list[Fault], int]] = {
    "in_a_step": ([Fault(2, 4, "survivor_group.wait", "SIGKILL", nth=3)], 7),
    "in_the_update": ([Fault(1, 4, "update.during", "SIGKILL", nth=3)], 7),
    "in_the_startup": ([Fault(2, 0, "startup", "SIGKILL")], 7),
    "in_the_last_step": ([Fault(1, 12, "survivor_group.wait", "SIGKILL", nth=3)], 99),
    "another_while_absent": (
        [Fault(1, 4, "survivor_group.wait", "SIGKILL", nth=3), Fault(2, 6, "survivor_group.wait", "SIGKILL", nth=3)],
        8,
    ),
    "one_rank_again": (
        [Fault(2, 3, "survivor_group.wait", "SIGKILL", nth=3), Fault(2, 9, "update.before", "SIGKILL", incarnation=1)],
        6,
    ),
    "the_replacement_while_admitted": (
        [
            Fault(2, 3, "survivor_group.wait", "SIGKILL", nth=3),
            Fault(2, ANY_STEP, "recovery.exchanged", "SIGKILL", incarnation=1),
        ],
        6,
    ),
    "a_survivor_before_admitting": (
        [Fault(2, 3, "survivor_group.wait", "SIGKILL", nth=3), Fault(1, ANY_STEP, "survivor_group.admit", "SIGKILL")],
        6,
    ),
    "the_donor_while_admitting": (
        [Fault(2, 3, "survivor_group.wait", "SIGKILL", nth=3), Fault(0, ANY_STEP, "recovery.connected", "SIGKILL")],
        6,
    ),
    "a_survivor_that_has_admitted": (
        [Fault(2, 3, "survivor_group.wait", "SIGKILL", nth=3), Fault(3, ANY_STEP, "recovery.installed", "SIGKILL")],
        6,
    ),
    "the_replacement_when_agreed": (
        [
            Fault(2, 3, "survivor_group.wait", "SIGKILL", nth=3),
            Fault(2, ANY_STEP, "survivor_group.agreed", "SIGKILL", incarnation=1),
        ],
        6,
    ),
    "frozen": ([Fault(2, 4, "survivor_group.wait", "SIGSTOP", nth=3)], 7),
}


@pytest.mark.parametrize("name", few(CASES, "in_a_step"))
def test_a_failure(name: str, jobs: Jobs) -> None:
    """The bits are those of the run without a failure, and nobody else starts again."""
    faults, admitted_at = CASES[name]
    result = run(jobs, faults, "--admitted-at", str(admitted_at))
    reference = jobs.reference("survivor_group.py", nproc=4)
    away = {event.rank for event in result.kinds("failed")} if admitted_at > 12 else set()
    there = {rank: report for rank, report in reference.reports.items() if rank not in away}
    compare(result, replace(reference, reports=there))
    check_survivors(result)


@pytest.mark.nightly
def test_what_happens_meanwhile(jobs: Jobs, tmp_path: Path) -> None:
    """The others make steps, and write no checkpoint; the replacement is a copy of a replica."""
    env = options(tmp_path, every=2, checkpoint_background=False)
    result = run(jobs, [Fault(2, 4, "survivor_group.wait", "SIGKILL", nth=3)], "--admitted-at", "7", **env)
    compare(result, jobs.reference("survivor_group.py", nproc=4))
    ranks = [event.fields["ranks"] for event in result.kinds("survivor_group")]
    assert ranks == [[0, 1, 2, 3], [0, 1, 3], [0, 1, 2, 3]], result.tail()
    (admitted,) = result.kinds("admitted")
    assert (admitted.rank, admitted.fields["boundary"]) == (2, 8), result.tail()
    assert [event.fields["boundary"] for event in result.kinds("checkpoint")] == [2, 4, 10, 12], result.tail()
    extra = {rank: report["extra"] for rank, report in result.reports.items()}
    assert [extra[rank]["rejoined"] for rank in range(4)] == [False, False, True, False]
    assert extra[2]["plan"] == {"who": 0} and extra[3]["plan"] == {"who": 3}


#: Two fail in step 4, and the replacement of rank 3 waits until another one is in. What fails meanwhile.
TURNS: dict[str, list[Fault]] = {
    "nobody": [],
    "the_one_that_decides": [Fault(0, ANY_STEP, "survivor_group.admit", "SIGKILL")],
    "the_one_that_waits": [Fault(3, ANY_STEP, "survivor_group.join_request", "SIGKILL", incarnation=1)],
    "the_replacement_later": [Fault(1, 9, "survivor_group.wait", "SIGKILL", nth=3, incarnation=1)],
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", TURNS)
def test_replacements_are_admitted_one_by_one(name: str, jobs: Jobs) -> None:
    """The others train on with the first while the second is still starting."""
    failed = [Fault(rank, 4, "survivor_group.wait", "SIGKILL", nth=3) for rank in (1, 3)]
    args = ["--admitted-at", "7", "--last-at", "10", "--wait-for", "one", "--hold", "3"]
    result = run(jobs, [*failed, *TURNS[name]], *args)
    compare(result, jobs.reference("survivor_group.py", nproc=4))
    check_survivors(result)
    assert len(result.struck) == 2 + len(TURNS[name]), result.tail()
    boundaries = {event.rank: event.fields["boundary"] for event in result.kinds("admitted")}
    assert {1, 3} <= boundaries.keys(), result.tail()
    if name == "nobody":
        assert boundaries == {1: 8, 3: 11}, result.tail()
        ranks = [event.fields["ranks"] for event in result.kinds("survivor_group")]
        assert ranks == [[0, 1, 2, 3], [0, 2], [0, 1, 2], [0, 1, 2, 3]], result.tail()


@pytest.mark.nightly
def test_the_replacement_may_be_started_later(jobs: Jobs) -> None:
    """The others wait longer for it than they wait for a connection."""
    fault = Fault(2, 4, "survivor_group.wait", "SIGKILL", nth=3)
    result = run(jobs, [fault], "--admitted-at", "7", SWIFT_RECOVERY_REROUTE_REJOIN_AFTER_S="7")
    compare(result, jobs.reference("survivor_group.py", nproc=4))
    (failed,), (started,) = result.kinds("failed"), result.kinds("replacement_start")
    assert started.time - failed.fields["detected"] >= 7, result.tail()


@pytest.mark.nightly
def test_replicas_are_compared_after_the_admission(jobs: Jobs) -> None:
    """The damaged replacement is in the minority, and is replaced by another."""
    result = run(
        jobs, [Fault(2, 4, "survivor_group.wait", "SIGKILL", nth=3)], "--admitted-at", "6", "--steps", "20", "--damage"
    )
    assert [(event.rank, "differs" in event.fields["cause"]) for event in result.kinds("failed")] == [
        (2, False),
        (2, True),
    ], result.tail()
    assert len({report["digests"]["all"] for report in result.reports.values()}) == 1, result.tail()


#: Arguments, faults and what is said, where the job goes back to its beginning.
BACK: dict[str, tuple[list[str], list[Fault], str]] = {
    "a_collective_of_all_ranks": (
        ["--admitted-at", "99", "--collective-at", "6"],
        [Fault(1, 4, "survivor_group.wait", "SIGKILL", nth=3)],
        "rank 0 is in barrier() of group '0', which waits for all ranks, and rank 1 is absent",
    ),
    "nobody_is_left_who_could_admit": (
        ["--admitted-at", "99"],
        [Fault(1, 4, "survivor_group.wait", "SIGKILL", nth=3), Fault(0, 9, "survivor_group.wait", "SIGKILL")],
        "all workers failed",
    ),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", BACK)
def test_where_others_cannot_continue(name: str, jobs: Jobs) -> None:
    args, faults, words = BACK[name]
    result = jobs.run("survivor_group.py", nproc=2, faults=faults, args=args, launcher_args=REROUTE)
    compare(result, jobs.reference("survivor_group.py", nproc=2))
    assert len(result.kinds("restart")) == 1 and words in result.stderr, result.tail()

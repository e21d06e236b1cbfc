"""``on_failure="reroute"``: the others go on without a lost rank, and let its newcomer in at a batch top."""

from __future__ import annotations

from dataclasses import replace

import pytest
from harness import Jobs, most

from shared_core.testing import ANY_STEP, Fault
from shared_core.testing.runner import JobResult, check_survivors, compare, unconfirmed

REROUTE = ["--on-failure=reroute"]


def run(jobs: Jobs, faults: list[Fault], *args: str, nproc: int = 4, **env: str) -> JobResult:
    result = jobs.run("lane.py", nproc=nproc, faults=faults, args=args, launcher_args=REROUTE, env=env)
    assert result.status == 0, result.tail()
    assert not unconfirmed(result), "\n".join([*unconfirmed(result), result.tail()])
    assert not result.kinds("restart"), result.tail()
    return result


def test_without_a_loss(jobs: Jobs) -> None:
    result = run(jobs, [])
    compare(result, jobs.reference("lane.py", nproc=4))
    assert [event.fields["ranks"] for event in result.kinds("lane")] == [[0, 1, 2, 3]], result.tail()


#: Faults, and from which step on the others wait for newcomers (of 12).
CASES: dict[str, tuple[list[Fault], int]] = {
    "in_a_step": ([Fault(2, 4, "lane.wait", "SIGKILL", nth=3)], 7),
    "rank_0": ([Fault(0, 4, "lane.wait", "SIGKILL", nth=3)], 7),
    "at_a_batch_top": ([Fault(3, 5, "batch_top", "SIGKILL")], 7),
    "in_the_update": ([Fault(1, 4, "update.during", "SIGKILL", nth=3)], 7),
    "after_the_update": ([Fault(1, 4, "update.after", "SIGKILL")], 7),
    "before_the_first_lane": ([Fault(1, 1, "lane.connect", "SIGKILL")], 7),
    "before_the_first_batch": ([Fault(2, 1, "batch_top", "SIGKILL")], 7),
    "in_the_startup": ([Fault(2, 0, "startup", "SIGKILL")], 7),
    "in_the_last_step": ([Fault(1, 12, "lane.wait", "SIGKILL", nth=3)], 99),
    "absent_at_the_end": ([Fault(1, 9, "lane.wait", "SIGKILL", nth=3)], 99),
    "two_at_once": ([Fault(0, 4, "lane.wait", "SIGKILL", nth=3), Fault(3, 4, "lane.wait", "SIGKILL", nth=3)], 7),
    "another_while_absent": (
        [Fault(1, 4, "lane.wait", "SIGKILL", nth=3), Fault(2, 6, "lane.wait", "SIGKILL", nth=3)],
        8,
    ),
    "one_rank_again": (
        [Fault(2, 3, "lane.wait", "SIGKILL", nth=3), Fault(2, 9, "update.before", "SIGKILL", incarnation=1)],
        6,
    ),
    "another_after_the_let_in": (
        [Fault(2, 3, "lane.wait", "SIGKILL", nth=3), Fault(1, 9, "lane.wait", "SIGKILL", nth=3)],
        6,
    ),
    "the_newcomer_before_it_knocks": (
        [Fault(2, 3, "lane.wait", "SIGKILL", nth=3), Fault(2, ANY_STEP, "lane.knock", "SIGKILL", incarnation=1)],
        6,
    ),
    "the_newcomer_while_let_in": (
        [
            Fault(2, 3, "lane.wait", "SIGKILL", nth=3),
            Fault(2, ANY_STEP, "recovery.exchanged", "SIGKILL", incarnation=1),
        ],
        6,
    ),
    "the_newcomer_when_let_in": (
        [
            Fault(2, 3, "lane.wait", "SIGKILL", nth=3),
            Fault(2, ANY_STEP, "recovery.installed", "SIGKILL", incarnation=1),
        ],
        6,
    ),
    "a_survivor_before_letting_in": (
        [Fault(2, 3, "lane.wait", "SIGKILL", nth=3), Fault(1, ANY_STEP, "lane.let_in", "SIGKILL")],
        6,
    ),
    "the_donor_while_letting_in": (
        [Fault(2, 3, "lane.wait", "SIGKILL", nth=3), Fault(0, ANY_STEP, "recovery.connected", "SIGKILL")],
        6,
    ),
    "a_survivor_after_letting_in": (
        [Fault(2, 3, "lane.wait", "SIGKILL", nth=3), Fault(0, ANY_STEP, "recovery.exchanged", "SIGKILL")],
        6,
    ),
    "a_survivor_that_has_let_in": (
        [Fault(2, 3, "lane.wait", "SIGKILL", nth=3), Fault(3, ANY_STEP, "recovery.installed", "SIGKILL")],
        6,
    ),
    "frozen": ([Fault(2, 4, "lane.wait", "SIGSTOP", nth=3)], 7),
}


@pytest.mark.parametrize("name", most(CASES, *CASES.keys() - {"in_a_step", "the_donor_while_letting_in"}))
def test_a_loss(name: str, jobs: Jobs) -> None:
    """The bits are those of the run without a loss, and nobody else starts again."""
    faults, let_in_at = CASES[name]
    result = run(jobs, faults, "--let-in-at", str(let_in_at))
    reference = jobs.reference("lane.py", nproc=4)
    away = {event.rank for event in result.kinds("lost")} if let_in_at > 12 else set()
    there = {rank: report for rank, report in reference.reports.items() if rank not in away}
    compare(result, replace(reference, reports=there))
    check_survivors(result)

"""Loops without boundaries, jobs that attach nothing: what is said, and when; nothing is promised that fails."""

from __future__ import annotations

import pytest
from harness import Jobs, few

from shared_core.faults import ANY_STEP, Fault
from shared_core.loop import UNMARKED
from shared_core.worker.program.unmarked import NOTHING_ATTACHED
from tests.support.runner import compare, unconfirmed


def test_a_loop_without_boundaries_is_told_after_three_updates(jobs: Jobs) -> None:
    result = jobs.run("endless.py", args=["endless"])
    compare(result, jobs.reference("endless.py", args=["endless"]))
    [warning] = [each for each in result.kinds("warning") if each.fields["message"] == UNMARKED["job"]]
    assert warning.rank == 0 and result.stderr.count(UNMARKED["job"]) == 1, result.tail()
    assert "for step, _ in job.steps(range(n)):" in UNMARKED["job"]


def test_its_log_has_an_end(jobs: Jobs) -> None:
    """The gradients of one update take 17 KB."""
    result = jobs.run("endless.py", args=["endless"], env={"SWIFT_RECOVERY_LOG_BUDGET_BYTES": "100000"})
    assert result.status == 1 and "updates without a step boundary" in result.stderr, result.tail()
    assert "log.budget_bytes sets how much the log may take, now 100000" in result.stderr


@pytest.mark.nightly
def test_what_the_line_says_is_replaced(jobs: Jobs) -> None:
    result = jobs.check("endless.py", args=["counted"], faults=[Fault(1, 6, "bucket", "SIGKILL")])
    assert UNMARKED["job"] not in result.stderr


@pytest.mark.parametrize("form", few(["unattached", "by_hand"], "unattached-True"))
def test_a_job_that_attaches_nothing_trains_as_stock(form: str, jobs: Jobs) -> None:
    """A failed worker is not replaced: all start again, as the line says. One form does not call install() either, and
    averages gradients itself.
    """
    number = {"unattached": 9, "by_hand": 420}[form]
    faults = [Fault(1, ANY_STEP, "collective.after", "SIGKILL", nth=number)]
    result = jobs.run("endless.py", args=[form], faults=faults)
    compare(result, jobs.reference("endless.py", args=[form]))
    assert not unconfirmed(result), result.tail()
    assert len(result.kinds("restart")) == 1 and not result.kinds("replacement_ready"), result.tail()
    assert NOTHING_ATTACHED in result.stderr and "a failed one is replaced;" not in result.stderr
    [memory] = {event.fields["peak_bytes"] for event in result.kinds("log_memory") if event.rank == 0}
    assert form == "by_hand" or memory < 40_000, "nothing is kept for a replacement"

"""Every operation gives the bits of plain gloo, without a failure and with one amid each class of operation."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import Jobs, most

from shared_core.faults import ANY_STEP, Fault
from tests.support.runner import compare

SCRIPT = str(Path(__file__).parent / "scripts" / "operations.py")
REPLICATED = "all_reduce,all_reduce_async,broadcast,all_gather,objects"
SPECIFIC = "reduce,gather,scatter,reduce_scatter,all_to_all"
MESSAGES = "messages,all_reduce"

CASES: dict[str, list[Fault]] = {
    "at_random_places": [Fault(1, 2, "collective.before", "SIGKILL", nth=70)],
    "two_at_once": [Fault(0, 3, "collective.after", "SIGKILL", nth=30), Fault(2, 3, "collective.before", "SIGKILL")],
}
#: Of each class of operation: (operations, faults, place by place where a rank fails).
CLASSES: dict[str, tuple[str, list[Fault]]] = {
    "replicated": (REPLICATED, [Fault(1, 2, "collective.before", "SIGKILL", nth=3)]),
    # Ranks 0 and 1 are roots of broadcasts: they are finished with them before anybody has received anything.
    "broadcast_root_ahead": (
        "broadcast,sub_groups",
        [Fault(n % 2, n, "collective.after", "SIGKILL", nth=1 + n, incarnation=(n - 2) // 2) for n in (2, 3, 4, 5)],
    ),
    "rank_specific": (SPECIFIC, [Fault(n - 2, n, "collective.after", "SIGKILL", nth=4 * n - 5) for n in (2, 3, 4)]),
    "messages": (
        MESSAGES,
        [Fault(1, 2, "step_boundary", "SIGKILL", delay_s=0.002), Fault(0, 4, "collective.before", "SIGKILL")],
    ),
    "sub_groups": (
        "sub_groups,messages",
        [Fault(0, 2, "collective.before", "SIGKILL", nth=3), Fault(2, 4, "collective.before", "SIGKILL", nth=2)],
    ),
    "second_replacement": (
        SPECIFIC,
        [
            Fault(1, 3, "collective.before", "SIGKILL", nth=6),
            Fault(1, ANY_STEP, "recovery.installed", "SIGKILL", incarnation=1),
        ],
    ),
}


def test_without_a_failure_every_operation_gives_the_bits_of_gloo(jobs: Jobs) -> None:
    result = jobs.run(SCRIPT, nproc=3)
    compare(result, jobs.reference(SCRIPT, nproc=3))
    assert not result.kinds("failed") and not result.kinds("warning")


@pytest.mark.parametrize("name", CASES)
def test_all_operations_with_failures(name: str, jobs: Jobs) -> None:
    jobs.check(SCRIPT, nproc=3, faults=CASES[name])


@pytest.mark.parametrize("name", most(CLASSES, "broadcast_root_ahead", "second_replacement", "messages", "sub_groups"))
def test_a_failure_in_the_middle_of(name: str, jobs: Jobs) -> None:
    only, faults = CLASSES[name]
    jobs.check(SCRIPT, nproc=3, faults=faults, args=["--only", only, "--steps", "6"])


def test_results_are_served_from_disk(jobs: Jobs) -> None:
    """Memory for logs is so small that nearly all results are spilled before the replacement needs them."""
    fault = [Fault(1, 3, "collective.after", "SIGKILL", nth=25)]
    result = jobs.check(SCRIPT, nproc=3, faults=fault, env={"SWIFT_RECOVERY_LOG_SPILL_BYTES": "256"})
    assert all(report["extra"]["spilled"] > 1_000_000 for report in result.reports.values())
    assert result.reports[1]["extra"]["served"] > 10
    assert any(int(event.fields["spilled_bytes"]) > 0 for event in result.kinds("recovered"))
    assert not list(result.out.glob("swift-log*"))


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["collective.before", "collective.after"])
@pytest.mark.parametrize("nth", range(1, 76, 4))
def test_a_failure_at_every_place(kind: str, nth: int, jobs: Jobs) -> None:
    jobs.check(SCRIPT, nproc=3, faults=[Fault(nth % 3, 2 + nth % 2, kind, "SIGKILL", nth=nth)])


def test_the_last_holder_of_a_result_fails_while_a_replacement_copies_it(jobs: Jobs) -> None:
    """Only the first replacement still has the result. It gives it to the second."""
    script = str(Path(__file__).parent / "scripts" / "while_served.py")
    result = jobs.run(script, faults=[Fault(0, 2, "collective.before", "SIGKILL", nth=2)])
    assert result.status == 0 and result.struck, result.tail()
    assert [event.rank for event in result.kinds("failed")] == [0, 1]
    assert not result.kinds("restart")
    compare(result, jobs.reference(script))

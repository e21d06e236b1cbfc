"""Every operation gives the bits of plain gloo, with failures amid all of them and at every place."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import Jobs, few

from shared_core.faults import ANY_STEP, Fault
from tests.support.runner import compare

SCRIPT = str(Path(__file__).parent / "scripts" / "operations.py")
SPECIFIC = "reduce,gather,scatter,reduce_scatter,all_to_all"

CASES: dict[str, list[Fault]] = {
    "at_random_places": [Fault(1, 2, "collective.before", "SIGKILL", nth=70)],
    "two_at_once": [Fault(0, 3, "collective.after", "SIGKILL", nth=30), Fault(2, 3, "collective.before", "SIGKILL")],
}
#: Of each class of operation: (operations, faults, place by place where a rank fails).
CLASSES: dict[str, tuple[str, list[Fault]]] = {
    # Ranks 0 and 1 are roots of broadcasts: they are finished with them before anybody has received anything.
    "broadcast_root_ahead": (
        "broadcast,sub_groups",
        [Fault(n % 2, n, "collective.after", "SIGKILL", nth=1 + n, incarnation=(n - 2) // 2) for n in (2, 3, 4, 5)],
    ),
    "second_replacement": (
        SPECIFIC,
        [
            Fault(1, 3, "collective.before", "SIGKILL", nth=6),
            Fault(1, ANY_STEP, "recovery.installed", "SIGKILL", incarnation=1),
        ],
    ),
}


@pytest.mark.parametrize("name", few(CASES, "two_at_once"))
def test_all_operations_with_failures(name: str, jobs: Jobs) -> None:
    jobs.check(SCRIPT, nproc=3, faults=CASES[name])


@pytest.mark.nightly
@pytest.mark.parametrize("name", CLASSES)
def test_a_failure_in_the_middle_of(name: str, jobs: Jobs) -> None:
    only, faults = CLASSES[name]
    jobs.check(SCRIPT, nproc=3, faults=faults, args=["--only", only, "--steps", "6"])


@pytest.mark.nightly
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

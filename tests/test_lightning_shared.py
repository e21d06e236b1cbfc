"""Lightning with ``on_failure="reroute"``: survivors run ``training_step`` for the lost worker, bit for bit."""

from __future__ import annotations

import pytest
from harness import Jobs, most

from shared_core.testing import ANY_STEP, Fault
from shared_core.testing.runner import JobResult, compare, unconfirmed

pytest.importorskip("lightning")

ORDERED = {"SWIFT_RECOVERY_ON_FAILURE": "reroute", "SWIFT_RECOVERY_REDUCTION": "ordered"}
SCRIPT = "lit_shared.py"


def check(jobs: Jobs, faults: list[Fault], args: list[str], nproc: int = 3) -> JobResult:
    """Ends as the run without faults, on every rank."""
    reference = jobs.reference(SCRIPT, nproc=nproc, args=args, env=ORDERED, launcher="swiftrun")
    result = jobs.run(SCRIPT, nproc=nproc, args=args, env=ORDERED, faults=faults)
    assert not unconfirmed(result), "\n".join([*unconfirmed(result), result.tail()])
    compare(result, reference)
    assert result.kinds("rerouted") and not result.kinds("restart"), result.tail()
    assert {event.rank for event in result.kinds("let_in")} == {fault.rank for fault in faults}, result.tail()
    return result


#: Arguments, faults. On three ranks an epoch has seven batches; the place behind its last one is a batch top, too.
CASES: dict[str, tuple[list[str], list[Fault]]] = {
    "forward": ([], [Fault(1, 3, "reroute.forward", "SIGKILL")]),
    "backward": ([], [Fault(2, 3, "reroute.backward", "SIGKILL")]),
    "before_the_sum": ([], [Fault(0, 3, "reroute.reduce", "SIGKILL")]),
    "in_the_sum": ([], [Fault(2, 3, "lane.wait", "SIGKILL", nth=2)]),
    "at_the_step": ([], [Fault(1, 3, "reroute.step", "SIGKILL")]),
    "clipping": (["--feature", "clip"], [Fault(1, 3, "clip", "SIGKILL")]),
    "in_the_update": ([], [Fault(1, 3, "update.during", "SIGKILL", nth=2)]),
    "at_the_top": ([], [Fault(0, 4, "batch_top", "SIGKILL")]),
    "last_batch": ([], [Fault(2, 7, "reroute.backward", "SIGKILL")]),
    "behind_the_last_batch": ([], [Fault(2, 8, "batch_top", "SIGKILL")]),
    "end": ([], [Fault(1, 15, "reroute.forward", "SIGKILL")]),
    "two_at_once": ([], [Fault(0, 3, "reroute.forward", "SIGKILL"), Fault(2, 3, "reroute.reduce", "SIGKILL")]),
    "two_in_turn": ([], [Fault(0, 3, "reroute.forward", "SIGKILL"), Fault(1, 4, "lane.wait", "SIGKILL")]),
    "all_in_turn": (["--epochs", "3"], [Fault(r, 3 + 8 * r, "reroute.backward", "SIGKILL") for r in range(3)]),
    "frozen": ([], [Fault(1, 3, "reroute.reduce", "SIGSTOP")]),
    "newcomer": (
        [],
        [Fault(1, 3, "reroute.forward", "SIGKILL"), Fault(1, ANY_STEP, "lane.knock", "SIGKILL", incarnation=1)],
    ),
    "letting_in": (
        [],
        [Fault(1, 3, "reroute.forward", "SIGKILL"), Fault(0, ANY_STEP, "lane.let_in", "SIGKILL")],
    ),
    "accumulate": (["--feature", "accumulate"], [Fault(1, 5, "reroute.backward", "SIGKILL")]),
    "accumulate_short": (["--feature", "accumulate"], [Fault(0, 7, "reroute.forward", "SIGKILL")]),
    "half_epochs": (["--feature", "half_epochs"], [Fault(1, 2, "reroute.forward", "SIGKILL")]),
    "bf16": (["--feature", "bf16"], [Fault(2, 3, "reroute.backward", "SIGKILL")]),
    "fits": (["--feature", "fits"], [Fault(1, 17, "reroute.forward", "SIGKILL")]),
    "between_fits": (["--feature", "fits"], [Fault(1, 3, "reroute.forward", "SIGKILL")]),
    "files": (["--feature", "files"], [Fault(1, 3, "reroute.forward", "SIGKILL")]),
    "files_of_rank_0": (["--feature", "files"], [Fault(0, 3, "reroute.reduce", "SIGKILL")]),
    "files_of_rank_0_at_the_top": (["--feature", "files"], [Fault(0, 4, "batch_top", "SIGKILL")]),
    "workers": (["--workers", "1"], [Fault(0, 3, "reroute.forward", "SIGKILL")]),
}


@pytest.mark.parametrize("name", most(CASES, *CASES.keys() - {"before_the_sum", "two_in_turn"}))
def test_a_loss_changes_no_bit(name: str, jobs: Jobs) -> None:
    args, faults = CASES[name]
    check(jobs, faults, args)

"""A worker gets slow while a pipeline trains: all go by new times from the same step on, and no bit changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from harness import Jobs
from rerouted import ORDERED, SCRIPT, alike, kill

from shared_core.faults import ANY_STEP, Fault
from shared_core.schedule.schedule import PlannedWorker
from tests.support.runner import JobResult

pytest.importorskip("deepspeed")
#: Rank 1 is the first stage of pipeline 1. Ranks 2 and 3 are last stages; rank 2 decides.
SLOW = PlannedWorker(1, 0)
STEPS = ("--steps", "32", "--dropout", "0")
STRAGGLER = ("--work-ms", "5", "--straggler", "1", "5", "15")
#: Nothing is planned in the background, whose processes may starve on a busy machine: workers plan when they switch.
AT_ONCE = {"SWIFT_RECOVERY_REROUTE_AHEAD": "0"}
STAYS_AWAY = {"SWIFT_RECOVERY_REROUTE_REJOIN_AFTER_S": "600"}
FAILURES = {
    "before": kill(0, 4, 3),
    "when it is proposed": Fault(3, ANY_STEP, "reroute.proposed", "SIGKILL"),
    "when one is told": Fault(2, ANY_STEP, "reroute.switching", "SIGKILL", nth=2),
    "who decides, when all are told": Fault(2, ANY_STEP, "reroute.switched", "SIGKILL"),
}

#: Where the survivors have switched before the failure, or have the time to do so after it. Elsewhere the fault itself,
#: which struck, shows that times had drifted and were agreed upon.
TOLD = ("before", "who decides, when all are told")


def switches(result: JobResult) -> list[dict[str, Any]]:
    """Plans that were made because times had drifted."""
    return [event.fields for event in result.kinds("planned") if event.fields.get("drifted")]


def run(
    jobs: Jobs,
    faults: list[Fault],
    nproc: int = 4,
    env: dict[str, str] | None = None,
    slow: Sequence[str] = STRAGGLER,
) -> JobResult:
    """Train with a straggler; equal by hash to DeepSpeed's own engine without faults, or with three pipelines, which
    gloo adds up in another order, to this product's.
    """
    given = ORDERED | AT_ONCE | (env or {})
    launcher, theirs_env = ("plain", None) if nproc == 4 else ("swiftrun", given)
    theirs = jobs.reference(SCRIPT, nproc=nproc, args=STEPS, launcher=launcher, env=theirs_env)
    result = jobs.run(SCRIPT, nproc=nproc, args=(*STEPS, *slow), env=given, faults=faults, timeout_s=90)
    alike(result, theirs, faults)
    assert len(result.struck) == len(faults) and not result.kinds("restart"), result.tail()
    return result


@pytest.mark.nightly
@pytest.mark.parametrize("when", FAILURES)
def test_a_worker_fails_around_a_switch(jobs: Jobs, when: str) -> None:
    result = run(jobs, [FAILURES[when]])
    if when in TOLD:
        drifts = [tuple(drift) for switch in switches(result) for drift in switch["drifted"]]
        assert any(drift[:3] == (*SLOW, "F") and drift[4] > drift[3] for drift in drifts), (drifts, result.tail())


@pytest.mark.nightly
def test_a_slow_peer_gets_none_of_the_failed_workers_micro_batches(jobs: Jobs) -> None:
    """It would be its turn. Its times are known from the first steps."""
    slow = ("--work-ms", "5", "--straggler", "1", "0", "30")
    result = run(jobs, [kill(0, 9, 3)], 6, STAYS_AWAY, slow)
    computed = {rank: report["extra"]["computed"] for rank, report in result.reports.items()}
    assert (computed[1], computed[2]) == (4, 8), (computed, result.tail())

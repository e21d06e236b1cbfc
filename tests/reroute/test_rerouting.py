"""Pipelines that continue without a failed worker: its peers compute its micro-batches, and a
replacement is admitted later.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from harness import Jobs, few
from rerouted import ORDERED, SCRIPT, carry_on, go

from shared_core.faults import ANY_STEP, Fault
from tests.support.runner import compare

pytest.importorskip("deepspeed")


#: A layer that the first and the last stage have, and clipping.
TIED = ("--tied", "two", "--clip", "0.5")
MODELS = {
    "all": (*TIED, "--autocast", "--checkpointing", "2"),
    "several": ("--several", "--autocast", "--clip", "0.5", "--micro-batches", "3"),
}


@pytest.mark.nightly
@pytest.mark.parametrize("model", MODELS)
def test_without_a_failure_it_is_deepspeed(jobs: Jobs, model: str) -> None:
    args = ("--dropout", "0", *MODELS[model])
    theirs = jobs.reference(SCRIPT, nproc=4, args=args)
    compare(jobs.run(SCRIPT, nproc=4, args=args, env=ORDERED), theirs)


@pytest.mark.nightly
def test_three_pipelines_are_deepspeed_with_a_failure_too(jobs: Jobs) -> None:
    """From three ranks on, gloo does not add gradients in rank order."""
    args, nproc = ("--dropout", "0", "--clip", "0.5", "--evaluate-after", "4"), 6
    theirs = jobs.reference(SCRIPT, nproc=nproc, args=args)
    result = jobs.run(
        SCRIPT, nproc=nproc, args=args, env=ORDERED, faults=[Fault(1, 3, "reroute.action", "SIGKILL", nth=5)]
    )
    assert result.kinds("rerouted") and not result.kinds("restart"), result.tail()
    compare(result, replace(theirs, reports={r: report for r, report in theirs.reports.items() if r in result.reports}))


def test_a_worker_fails_inside_a_step(jobs: Jobs) -> None:
    result = carry_on(jobs, [Fault(1, 3, "reroute.action", "SIGKILL", nth=5)], ["--autocast"])
    assert result.kinds("rerouted"), result.tail()


@pytest.mark.nightly
def test_a_replacement_is_admitted(jobs: Jobs) -> None:
    result = carry_on(
        jobs, [Fault(3, 2, "reroute.action", "SIGKILL", nth=3)], ["--evaluate-after", "4", "--sum-evaluated"]
    )
    assert [event.rank for event in result.kinds("admitted")] == [3], result.tail()


#: Failures around a copy of the state, the options, and steps that wait for failures and their copies.
COPIES: dict[str, tuple[list[Fault], tuple[str, ...], str]] = {
    "the_donor": (
        [Fault(3, 2, "reroute.action", "SIGKILL", nth=3), Fault(2, ANY_STEP, "copy.give", "SIGKILL")],
        (),
        "5:1",
    ),
    "the_replacement": (
        [
            Fault(3, 2, "reroute.action", "SIGKILL", nth=3),
            Fault(3, ANY_STEP, "copy.take", "SIGKILL", incarnation=1),
        ],
        (),
        "5:2",
    ),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", COPIES)
def test_replacements_copy_the_state_while_the_others_train(jobs: Jobs, name: str) -> None:
    faults, args, copies = COPIES[name]
    run = go if name == "the_donor" else carry_on  # who has lost both workers of a stage goes back to the checkpoint
    result = run(jobs, faults, ["--steps", "40", "--copies", copies, *args])
    if name != "the_donor":
        assert {event.rank for event in result.kinds("admitted")} == {fault.rank for fault in faults}, result.tail()
        copied = [event.rank for event in result.kinds("copied") if not event.fields["why"]]
        assert {*copied} == {fault.rank for fault in faults}, result.tail()


@pytest.mark.nightly
def test_a_collective_waits_for_all(jobs: Jobs) -> None:
    """One replacement passes by the step in which the failed worker failed, the other several."""
    faults = [Fault(3, 2, "reroute.action", "SIGKILL", nth=3), Fault(1, 4, "reroute.step", "SIGKILL")]
    result = carry_on(jobs, faults, ["--sum-after", "2", "4"])
    assert [event.rank for event in result.kinds("admitted")] == [3, 1], result.tail()


REFUSED = {"--counts": "the forward pass changes the buffer", "--grow": "on_failure='reroute' has planned for 4"}


@pytest.mark.parametrize("option", few(REFUSED, "--counts"))
def test_what_no_plan_allows_is_refused(jobs: Jobs, option: str) -> None:
    result = jobs.run(SCRIPT, nproc=4, args=[option], env=ORDERED)
    assert result.status != 0 and REFUSED[option] in result.stderr, result.tail()
    assert "AssertionError" not in result.stderr, "the size of a batch stays as it was"


@pytest.mark.nightly
def test_plans_go_by_measured_times(jobs: Jobs) -> None:
    withheld = {"SWIFT_RECOVERY_REROUTE_REJOIN_AFTER_S": "600"}  # a replacement that is quick has plans made again
    result = carry_on(jobs, [Fault(3, 5, "reroute.action", "SIGKILL", nth=5)], env=withheld)
    before, after = [event.fields for event in result.kinds("planned")]
    assert before["failed"] == [] and after["failed"] == [[1, 1]], result.tail()
    assert before["times"] == after["times"] and len(before["times"]["stages"]) == 2
    assert before["room"] == after["room"] and len(set(before["room"])) == 1, "more than 1F1B holds: it all fits"
    (planned,) = {tuple(event.fields["rest_s"]) for event in result.kinds("rerouted")}
    assert planned in (("4",), ("3", "4")), "the peers were in step 4; a slow one may still have been in step 3"

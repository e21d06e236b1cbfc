"""Plain PyTorch jobs lose workers and end, on every rank, with the bits of the run in which nobody failed."""

from __future__ import annotations

import pytest
from harness import Jobs, few

from shared_core.faults import ANY_STEP, Fault
from tests.support.runner import compare

NORM = ["--norm"]

CASES: dict[str, list[Fault]] = {
    "in_the_first_batch": [Fault(1, 1, "bucket", "SIGKILL")],
    "between_buckets": [Fault(1, 4, "bucket", "SIGKILL", nth=2)],
    "after_a_collective": [Fault(2, 4, "collective.after", "os._exit", nth=2)],
    "before_the_update": [Fault(3, 5, "update.before", "segfault")],
    "in_the_update": [Fault(1, 5, "update.during", "SIGKILL", nth=20)],
    "after_the_update": [Fault(1, 5, "update.after", "SIGTERM")],
    "stopped": [Fault(2, 3, "collective.before", "SIGSTOP")],
    "exception": [Fault(2, 3, "step_boundary", "exception")],
    "all_but_one": [Fault(rank, 4, "collective.before", "SIGKILL") for rank in (0, 1, 2)],
    "the_replacement": [Fault(1, 4, "bucket", "SIGKILL"), Fault(1, ANY_STEP, "join", "SIGKILL", incarnation=1)],
    "a_survivor_in_the_recovery": [
        Fault(1, 4, "bucket", "SIGKILL"),
        Fault(2, ANY_STEP, "recovery.exchanged", "SIGKILL"),
    ],
    "one_rank_again": [Fault(2, step, "forward", "SIGKILL", incarnation=n) for n, step in enumerate((3, 5, 8))],
    "at_any_moment": [Fault(1, 3, "step_boundary", "SIGKILL", delay_s=0.004)],
}


#: Buckets are reduced in place, and are what a replacement is given until the next backward overwrites them. Without
#: BatchNorm nothing in a forward waits for other ranks, so that survivors get as far as to overwrite them.
IN_PLACE: dict[str, list[Fault]] = {
    "others_are_a_boundary_ahead": [Fault(1, 5, "step_boundary", "SIGKILL")],
    "it_stops_and_others_are_a_boundary_ahead": [Fault(2, 5, "step_boundary", "SIGSTOP")],
    "reductions_are_cut_off": [Fault(3, 4, "bucket", "SIGKILL", nth=2), Fault(0, 6, "bucket", "SIGKILL")],
    "of_three": [Fault(1, 4, "bucket", "SIGKILL", nth=2), Fault(0, 5, "step_boundary", "SIGKILL")],
    "the_replacement_in_the_same_batch": [
        Fault(1, 5, "step_boundary", "SIGKILL"),
        Fault(1, 5, "collective.after", "SIGKILL", nth=2, incarnation=1),
    ],
}


@pytest.mark.parametrize("name", few(CASES, "in_the_update"))
def test_a_failure_changes_no_bit(name: str, jobs: Jobs) -> None:
    jobs.check("plain_ddp.py", nproc=4, faults=CASES[name], args=NORM)


@pytest.mark.nightly
def test_without_standbys_a_fresh_process_takes_the_place(jobs: Jobs) -> None:
    jobs.check("plain_ddp.py", nproc=4, faults=[Fault(1, 4, "bucket", "SIGKILL")], args=NORM, standbys=0)


@pytest.mark.parametrize(
    "way",
    few(["view", "hook", "builtin", "accumulate", "metric", "double", "zeros"], "metric"),
)
def test_ways_of_gradients(way: str, jobs: Jobs) -> None:
    """Whatever DDP puts into its buckets: a bucket that cannot be computed again is copied."""
    jobs.check("plain_ddp.py", nproc=3, faults=IN_PLACE["of_three"], args=["--way", way])


@pytest.mark.parametrize("optimizer", few(["Adam", "Adagrad"], "Adam"))
def test_optimizers(optimizer: str, jobs: Jobs) -> None:
    args = ["--optimizer", optimizer, "--steps", "6"]
    jobs.check("plain_ddp.py", faults=[Fault(1, 4, "update.during", "SIGKILL", nth=3)], args=args)


def test_without_a_failure_nothing_differs(jobs: Jobs) -> None:
    result = jobs.run("plain_ddp.py", nproc=4, args=NORM)
    compare(result, jobs.reference("plain_ddp.py", nproc=4, args=NORM))
    assert not result.kinds("failed")


@pytest.mark.nightly
def test_the_reference_is_what_torchrun_gives(jobs: Jobs) -> None:
    """Reference workers are forked from one process to save imports; that changes no bit."""
    plain = jobs.reference("plain_ddp.py", args=NORM)
    compare(plain, jobs.reference("plain_ddp.py", args=NORM, launcher="torchrun"))


@pytest.mark.parametrize("name", few(IN_PLACE, "reductions_are_cut_off"))
def test_buckets_that_are_the_log(name: str, jobs: Jobs) -> None:
    result = jobs.check("plain_ddp.py", nproc=4, faults=IN_PLACE[name])
    assert result.kinds("failed")

"""Lightning trains models that ``configure_model`` shards, loses workers and ends, on every rank, with the bits of the
stock ``ModelParallelStrategy`` that failed none: shards, statistics, logged values, loops, generators, files."""

from __future__ import annotations

import pytest
from harness import Jobs, few

from shared_core.faults import Fault
from tests.support.runner import check_survivors, compare, unconfirmed

#: An epoch has six batches, and a validation after the third and the last. In each batch Lightning asks for a signal, a
#: forward gathers four times, a backward gathers three times and reduces four times, and clipping sums.
FIT: dict[str, tuple[int, list[Fault]]] = {
    "a_gather_in_forward": (2, [Fault(1, 4, "collective.before", "SIGKILL", nth=4)]),
    "before_it_clips": (2, [Fault(0, 8, "clip", "SIGKILL")]),
    "rank_0_at_a_step_boundary": (4, [Fault(0, 7, "step_boundary", "SIGKILL")]),
    "in_a_validation": (2, [Fault(1, 3, "validation", "SIGKILL", nth=2)]),
    "in_the_first_batch": (2, [Fault(0, 1, "collective.after", "SIGKILL", nth=6)]),
}
HSDP: dict[str, list[Fault]] = {
    "both_replicas_of_a_shard": [Fault(0, 5, "collective.after", "SIGKILL", nth=9), Fault(2, 5, "forward", "SIGKILL")],
}
#: The first fit has twelve batches, a test or the loading of a checkpoint follows, and a second fit.
CALLS: dict[str, list[Fault]] = {
    "between_calls": [Fault(1, 12, "entry", "SIGKILL", nth=2)],
    "the_second_fit": [Fault(0, 17, "update.during", "SIGKILL", nth=9)],
}
FILES: dict[str, list[Fault]] = {
    "rank_0_before_a_file": [Fault(0, 8, "checkpoint.write", "SIGKILL")],
    "in_the_exchange_of_a_file": [Fault(1, 4, "collective.before", "SIGKILL", nth=18)],
    "resumed": [Fault(0, 15, "forward", "SIGKILL")],
}
WAYS: dict[str, list[str]] = {
    "callback": ["--how", "callback"],
    "env": ["--how", "env"],
    "accumulate": ["--accumulate", "2"],
}


@pytest.mark.parametrize(
    "name",
    few(FIT, "in_a_validation"),
)
def test_a_failure_changes_no_bit(name: str, jobs: Jobs) -> None:
    nproc, faults = FIT[name]
    jobs.check("lit_sharded.py", nproc=nproc, faults=faults)


@pytest.mark.nightly
@pytest.mark.parametrize("name", HSDP)
def test_a_failure_among_replicas_of_shards_changes_no_bit(name: str, jobs: Jobs) -> None:
    jobs.check("lit_sharded.py", nproc=4, args=["--replicas", "2"], faults=HSDP[name])


@pytest.mark.nightly
@pytest.mark.parametrize("name", CALLS)
def test_several_calls(name: str, jobs: Jobs) -> None:
    check_with_earlier_ends(jobs, ["--what", "calls"], CALLS[name])


@pytest.mark.nightly
@pytest.mark.parametrize("name", FILES)
def test_files_of_lightning(name: str, jobs: Jobs) -> None:
    check_with_earlier_ends(jobs, ["--what", "files"], FILES[name])


@pytest.mark.nightly
def test_whole_files_of_lightning(jobs: Jobs) -> None:
    faults = [Fault(1, 4, "checkpoint.write", "SIGKILL"), Fault(0, 15, "forward", "SIGKILL")]
    check_with_earlier_ends(jobs, ["--what", "files", "--whole"], faults)


def check_with_earlier_ends(jobs: Jobs, args: list[str], faults: list[Fault]) -> None:
    """A replacement in a later call returns from finished ones at once: their ends are those of survivors."""
    result = jobs.check("lit_sharded.py", args=args, faults=faults)
    reference = jobs.reference("lit_sharded.py", args=args)
    for rank in reference.reports.keys() - result.struck_ranks():
        assert result.reports[rank]["extra"] == reference.reports[rank]["extra"]


@pytest.mark.nightly
@pytest.mark.parametrize("way", WAYS)
def test_ways_of_training(way: str, jobs: Jobs) -> None:
    env = {"SWIFT_RECOVERY": "1"} if way == "env" else {}
    faults = [Fault(1, 4, "collective.before", "SIGKILL", nth=6), Fault(0, 9, "forward", "SIGKILL")]
    result = jobs.run("lit_sharded.py", args=WAYS[way], env=env, faults=faults)
    reference = jobs.reference("lit_sharded.py", args=WAYS[way])
    compare(result, reference)
    assert not unconfirmed(result), result.tail()
    check_survivors(result, reference)


def test_a_model_that_is_not_sharded_is_refused(jobs: Jobs) -> None:
    result = jobs.run("lit_sharded.py", args=["--no-shards"])
    assert result.status == 1
    assert "Sharded.configure_model() has sharded nothing: call in it fully_shard(" in result.stderr, result.tail()


@pytest.mark.nightly
def test_other_answers_to_a_failure_are_refused(jobs: Jobs) -> None:
    result = jobs.run("lit_sharded.py", env={"SWIFT_RECOVERY_ON_FAILURE": "reroute"})
    assert result.status == 1
    assert "on_failure='reroute' does not work with sharded models" in result.stderr, result.tail()

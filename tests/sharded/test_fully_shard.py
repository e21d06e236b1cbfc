"""Sharded models lose workers and end, on every rank, with the bits of the run in which nobody failed: all shards of
the parameters and of the optimizer's state, counters, generators.
"""

from __future__ import annotations

import pytest
from harness import Jobs, few
from shard_failures import EVERYWHERE

from shared_core.faults import Fault

#: Four groups of parameters: in each batch a forward gathers four times, a backward gathers three times and reduces
#: four times, and clipping sums once. Two epochs have six batches and seven boundaries each, the last one for the end.
FSDP: dict[str, tuple[int, list[Fault]]] = {
    **EVERYWHERE,
    "a_gather_in_forward": (2, [Fault(1, 4, "collective.before", "SIGKILL", nth=3)]),
    "in_the_first_batch": (2, [Fault(0, 1, "collective.after", "SIGKILL", nth=6)]),
    "two_at_once": (4, [Fault(0, 4, "collective.before", "SIGKILL", nth=9), Fault(3, 4, "forward", "SIGKILL")]),
    "the_replacement_in_the_same_batch": (
        2,
        [
            Fault(1, 5, "update.during", "SIGKILL", nth=9),
            Fault(1, 5, "collective.after", "SIGKILL", nth=9, incarnation=1),
        ],
    ),
    "at_any_moment": (4, [Fault(1, 3, "step_boundary", "SIGKILL", delay_s=0.01)]),
}
#: Two replicas of two shards: ranks 0 and 2 hold the same.
HSDP: dict[str, list[Fault]] = {
    "in_the_update": [Fault(0, 9, "update.during", "SIGKILL", nth=12)],
    "both_replicas_of_a_shard": [Fault(0, 5, "collective.after", "SIGKILL", nth=9), Fault(2, 5, "forward", "SIGKILL")],
}
WAYS: dict[str, list[str]] = {
    "bf16": ["--mixed"],
    "accumulate": ["--accumulate", "3"],
    "accumulate_reduced": ["--accumulate", "3", "--sync"],
    "freeze": ["--freeze"],
}
#: In the first batch after an evaluation, and later.
AFTER_EVALUATIONS = [
    Fault(1, 1, "collective.before", "SIGKILL", nth=7),
    Fault(0, 8, "collective.before", "SIGKILL", nth=7),
    Fault(1, 11, "update.during", "SIGKILL", nth=3, incarnation=1),
]


@pytest.mark.parametrize(
    "name",
    few(FSDP, "a_gather_in_forward"),
)
def test_a_failure_changes_no_bit(name: str, jobs: Jobs) -> None:
    nproc, faults = FSDP[name]
    jobs.check("sharded.py", nproc=nproc, faults=faults)


@pytest.mark.parametrize("name", few(HSDP, "both_replicas_of_a_shard"))
def test_a_failure_among_replicas_of_shards_changes_no_bit(name: str, jobs: Jobs) -> None:
    jobs.check("sharded.py", nproc=4, args=["--replicas", "2"], faults=HSDP[name])


@pytest.mark.nightly
@pytest.mark.parametrize("way", WAYS)
def test_ways_of_training(way: str, jobs: Jobs) -> None:
    faults = [
        Fault(1, 5, "collective.before", "SIGKILL", nth=6),
        Fault(0, 9, "update.during", "SIGKILL", nth=7)
        if "accumulate" not in way
        else Fault(0, 9, "forward", "SIGKILL"),
    ]
    jobs.check("sharded.py", args=WAYS[way], faults=faults)


@pytest.mark.nightly
@pytest.mark.parametrize("root", ["", pytest.param("--bare-root", marks=pytest.mark.nightly)])
def test_evaluations_before_and_between(root: str, jobs: Jobs) -> None:
    jobs.check("sharded.py", args=["--evaluate", "--evaluate-first", *root.split()], faults=AFTER_EVALUATIONS)

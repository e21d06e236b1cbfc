"""Who keeps the data of a pipeline, and which steps cannot be made without its ends."""

from __future__ import annotations

import itertools

import pytest

from shared_core.reroute.keeping import first_without_data, keepers
from shared_core.reroute.messages import MessageKind
from shared_core.schedule.schedule import PlannedWorker, Topology

BOTH = {(1, int(MessageKind.INPUTS)), (1, int(MessageKind.LABELS))}
ENDS = [PlannedWorker(1, 0), PlannedWorker(1, 2)]


@pytest.mark.parametrize("pipelines", [2, 3, 5])
def test_all_peers_that_are_there_keep_the_data(pipelines: int) -> None:
    topology = Topology(pipelines, 3, 2)
    places = [PlannedWorker(d, 0) for d in range(pipelines)]
    for number in range(pipelines):
        for failed in itertools.combinations(places, number):
            there = {place for place in places if place not in failed and place.pipeline != 1}
            found = keepers(topology, failed, 1, 0)
            assert len(found) == len(there) and set(found) == there, failed


def test_a_pipeline_with_one_end_draws_its_data() -> None:
    topology = Topology(3, 3, 2)
    for failed in ([], ENDS[:1], ENDS[1:], [PlannedWorker(0, 0), PlannedWorker(1, 2)]):
        assert first_without_data(topology, failed, {}, 4) is None


def test_without_both_ends_kept_data_last_to_the_end_of_their_step() -> None:
    topology = Topology(3, 3, 2)
    assert first_without_data(topology, ENDS, {}, 4) == 4
    assert first_without_data(topology, ENDS, {4: BOTH}, 4) == 5
    assert first_without_data(topology, ENDS, {3: BOTH, 4: BOTH}, 4) == 5
    assert first_without_data(topology, ENDS, {4: BOTH, 5: set(list(BOTH)[:1])}, 4) == 5, "half of it is not enough"
    assert first_without_data(topology, ENDS, {5: BOTH}, 4) == 4

"""Measured times that all agree upon, and plans that lie ready."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared_core.reroute.planning import Plans, Proposal, TimesInUse
from shared_core.reroute.times import agree, from_dict, rounded, to_dict
from shared_core.schedule.problem import Variant
from shared_core.schedule.schedule import PlannedWorker, Topology
from shared_core.schedule.timing import StageTimes, Times

TOPOLOGY = Topology(3, 2, 4)
STAGES = StageTimes(0.101, 0.098, 0.103, 0.31, 0.2), StageTimes(0.05, 0.04, 0.06, 0.1, 0.16)
MEASURED = Times(STAGES, 0.001, data_apart=True)
ROOM = (3, 3)
FAILED = frozenset({PlannedWorker(1, 1)})

#: Plans are filled in by a process of their own, which imports everything first.
pytestmark = pytest.mark.timeout(400)


def plans(folder: Path, failures: int = 1) -> Plans:
    return Plans(TOPOLOGY, Variant.STAGGERED, False, folder, failures)


def test_all_agree_on_medians_and_the_least_optimizer() -> None:
    one = {"F": 1.7, "I": 2.0, "W": 3.0, "B": 5.0, "OPT": 9.0, "communication": 0.5}
    first = [
        (PlannedWorker(0, 0), one),
        (PlannedWorker(1, 0), one | {"F": 2.3, "OPT": 4.0}),
        (PlannedWorker(2, 0), one | {"F": 2.0}),
    ]
    times = agree([*first, (PlannedWorker(0, 1), one | {"F": 1.0}), (PlannedWorker(1, 1), {})], 2)
    stages = StageTimes(2.0, 2.0, 3.0, 4.0, 5.0), StageTimes(1.0, 2.0, 3.0, 9.0, 5.0)
    assert times == Times(stages, 0.5, data_apart=True)
    assert agree([(PlannedWorker(0, 0), one), (PlannedWorker(0, 1), {"F": 1.0})], 2) is None


def test_times_survive_being_told() -> None:
    assert from_dict(to_dict(MEASURED)) == MEASURED


def test_plans_are_made_for_whole_parts() -> None:
    assert rounded(MEASURED) == Times((StageTimes(8, 8, 8, 24), StageTimes(4, 3, 5, 8, 12)), 1, data_apart=True)


def test_what_lies_ready_is_what_was_planned_and_is_found_at_once(tmp_path: Path) -> None:
    first, second = plans(tmp_path), plans(tmp_path)
    for each in (first, second):
        each.adopt(TimesInUse(3, MEASURED), ROOM)
        assert not each.lies_ready(FAILED)
    try:
        first.fill(frozenset())
        second.fill(frozenset())
        assert second.facts(frozenset(), switched=True)["ready"] is False
        assert first._filling is not None and second._filling is None, "one is enough"
        first._filling.wait(300)
    finally:
        first.stop()
    assert first.lies_ready(FAILED) and first.lies_ready(FAILED) == second.lies_ready(FAILED)
    for each in (first, second):
        each.choose(FAILED, each.lies_ready(FAILED))
    assert first.plan(FAILED, 3) == second.plan(FAILED, 3)
    facts = second.facts(FAILED, switched=False)
    assert facts["ready"]
    assert facts["period_s"] == pytest.approx(second.seconds(second.plan(FAILED, 3).schedule, True))


def test_a_plan_that_is_not_there_everywhere_is_made_by_each(tmp_path: Path) -> None:
    first, second = plans(tmp_path / "a"), plans(tmp_path / "b", failures=0)
    for each in (first, second):
        each.adopt(TimesInUse(3, MEASURED), ROOM)
        each.choose(FAILED, [])
    assert first.plan(FAILED, 5) == second.plan(FAILED, 5)


@pytest.mark.nightly
def test_proposed_times_are_planned_for_while_the_old_plans_hold(tmp_path: Path) -> None:
    own = ((PlannedWorker(0, 1), StageTimes(0.3, 0.3, 0.3, 0.1)),)
    slow = Times(STAGES, 0.001, data_apart=True, own=own)
    made = plans(tmp_path)
    made.adopt(TimesInUse(3, MEASURED), ROOM)
    made.choose(FAILED, [])
    before = made.plan(FAILED, 8)
    assert made.ready_for(FAILED) == -1, "nothing is proposed"
    made.proposal = Proposal(8, slow)
    assert made.ready_for(FAILED) == -1
    try:
        made.fill(FAILED)
        assert made._filling is not None
        made._filling.wait(300)
    finally:
        made.stop()
    assert made.ready_for(FAILED) == 8 and made.plan(FAILED, 9) is before and made.lies_ready(FAILED)
    made.adopt(TimesInUse(13, slow, FAILED), ROOM)
    assert made.proposal is None and made.plan(FAILED, 12) is before
    assert PlannedWorker(0, 1) not in made.plan(FAILED, 13).route.values()
    facts = made.facts(FAILED, switched=True)
    assert facts["ready"] and facts["period_s"] < facts["period_before_s"]
    assert {tuple(each[:3]) for each in facts["drifted"]} == {(0, 1, kind) for kind in "FIW"}

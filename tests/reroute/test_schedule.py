"""Schedules as text, their checks and their times."""

from __future__ import annotations

from collections.abc import Callable

import golden
import pytest
from timelines import check_times

from benchmarks.lab.check import check
from shared_core.errors import ConfigError, InvalidSchedule
from shared_core.schedule.problem import Memory
from shared_core.schedule.schedule import Action, Kind, PlannedWorker, Schedule, Topology, one_f_one_b, parse_action
from shared_core.schedule.timing import StageTimes, Times, simulate

Row = list[Action]


def test_the_notation() -> None:
    worker = PlannedWorker(0, 2)
    for text in ("2F0", "2I11", "2W3@1", "2B0@2", "2OPT"):
        assert parse_action(text, worker).text(worker) == text
    assert parse_action("2F0", worker) == parse_action("2F0@0", worker) == Action(2, Kind.F, 0, 0)
    assert str(Action(2, Kind.F, 4, 1)) == "2F4@1"
    for text in ("F0", "2F", "2X1", "2F0@", "2OPT1", "2OPT@1", "-1F0", "2F0 "[:3] + "x"):
        with pytest.raises(InvalidSchedule, match="W0_2 is not an action; it must look like 2F0"):
            parse_action(text, worker)
    with pytest.raises(InvalidSchedule, match="'0_2' is not a worker; it must look like W1_2"):
        Schedule.from_text({"0_2": ["2F0"]})


def test_one_f_one_b() -> None:
    rows = one_f_one_b(golden.TOPOLOGY).rows
    drawn = golden.drawn().rows
    for worker in (PlannedWorker(0, 0), PlannedWorker(0, 1), PlannedWorker(1, 3), PlannedWorker(2, 1)):
        assert rows[worker][:-1] == drawn[worker], "the orders of workers that host nothing are those of 1F1B"
    assert all(row[-1].kind is Kind.OPT for row in rows.values())
    for pipelines, stages, count in ((1, 1, 1), (2, 4, 2), (3, 4, 6), (2, 7, 20)):
        topology = Topology(pipelines, stages, count)
        check(one_f_one_b(topology), topology, ordered=True)
        for staggered in (False, True):
            timeline = simulate(one_f_one_b(topology), Times(), staggered=staggered)
            assert timeline.slots == 3 * (count + stages - 1)
            if count >= stages:
                assert timeline.period == timeline.slots + 3
    with pytest.raises(ConfigError, match="stages must be a whole number of at least 1, got 0"):
        Topology(1, 0, 1)


def test_golden_schedules_replay() -> None:
    check(golden.drawn(), golden.TOPOLOGY)
    assert simulate(golden.drawn(), Times()).slots == 30  # 29 without the W that the drawing leaves out
    for variant, slots, period in (("decoupled", 29, 32), ("staggered", 29, 30)):
        rows = golden.optimum(variant)
        check_times(rows)
        schedule = golden.untimed(rows)
        check(schedule, golden.TOPOLOGY)
        timeline = simulate(schedule, Times(), staggered=variant == "staggered")
        check_times(timeline.rows)
        assert (timeline.slots, timeline.period) == (slots, period)


def test_a_stage_that_steps_on_its_own() -> None:
    """The last stage has the slow optimizer: staggered, the way to the stage and back is not added to it."""
    times = Times((StageTimes(1, 1, 1, 0), StageTimes(4, 4, 4, 10)))
    schedule = one_f_one_b(Topology(1, 2, 8))
    assert simulate(schedule, times).period == 1 + 8 * 12 + 2 + 10
    assert simulate(schedule, times, staggered=True).period == 8 * 12 + 10


def swap(row: Row, one: str, other: str, worker: PlannedWorker) -> None:
    a, b = row.index(parse_action(one, worker)), row.index(parse_action(other, worker))
    row[a], row[b] = row[b], row[a]


def change(row: Row, old: str, new: list[str], worker: PlannedWorker) -> None:
    at = row.index(parse_action(old, worker))
    row[at : at + 1] = [parse_action(text, worker) for text in new]


W0_2, W2_2, W0_3 = PlannedWorker(0, 2), PlannedWorker(2, 2), PlannedWorker(0, 3)


@pytest.mark.parametrize(
    ("worker", "damage", "message"),
    [
        (W0_2, lambda row: swap(row, "2F0@1", "2I0@1", W0_2), "2I0@1 of W0_2 comes before 2F0@1"),
        (W0_2, lambda row: swap(row, "2W0", "2I0", W0_2), "2W0 of W0_2 comes before 2I0"),
        (W0_2, lambda row: change(row, "2W4@1", [], W0_2), "2W4@1 is missing at W0_2"),
        (W0_2, lambda row: change(row, "2F3", ["2F3", "2F3"], W0_2), "2F3 of W0_2 is there twice"),
        (W0_2, lambda row: change(row, "2B1", ["2B1", "2W1"], W0_2), "2W1 of W0_2 comes before 2I1"),
        (W0_2, lambda row: change(row, "2W0", ["2B0"], W0_2), "2B0 of W0_2: 2I0 did the same already"),
        (W0_2, lambda row: change(row, "2F3", ["1F3"], W0_2), "1F3 of W0_2 is of another stage"),
        (W0_2, lambda row: change(row, "2F3", ["2F9"], W0_2), "2F9 of W0_2: there is no such micro-batch"),
        (W2_2, lambda row: change(row, "2F1@1", ["2F0@1"], W2_2), "2F0@1 of W2_2: W0_2 runs this micro-batch"),
        (W0_3, lambda row: change(row, "3F0", ["3OPT", "3F0"], W0_3), "3OPT of W0_3 must be the last action"),
        (W0_3, lambda row: row.clear(), "3F0@0 is missing"),
    ],
)
def test_what_is_refused(worker: PlannedWorker, damage: Callable[[Row], None], message: str) -> None:
    rows = {name: list(row) for name, row in golden.drawn().rows.items()}
    damage(rows[worker])
    with pytest.raises(InvalidSchedule) as error:
        check(Schedule({name: tuple(row) for name, row in rows.items()}), golden.TOPOLOGY)
    assert message in str(error.value)


def test_a_circle_is_refused() -> None:
    """Every row alone is possible, but two workers wait for each other."""
    topology = Topology(1, 2, 2)
    good = {"W0_0": ["0F0", "0F1", "0B0", "0B1"], "W0_1": ["1F0", "1B0", "1F1", "1B1"]}
    check(Schedule.from_text(good), topology)
    bad = good | {"W0_0": ["0F0", "0B0", "0F1", "0B1"], "W0_1": ["1F0", "1F1", "1B0", "1B1"]}
    with pytest.raises(
        InvalidSchedule, match=r"W0_0 cannot run 0B0: it needs 1I0@0 \(or B\), which never runs before it"
    ):
        check(Schedule.from_text(bad), topology)


def test_memory_is_counted_until_w() -> None:
    schedule = golden.untimed(golden.optimum("staggered"))
    most = 0
    for at in range(len(schedule.rows[W0_2])):
        begun = [action.kind for action in schedule.rows[W0_2][: at + 1]]
        most = max(most, begun.count(Kind.F) - begun.count(Kind.W) - begun.count(Kind.B))
    check(schedule, golden.TOPOLOGY, memory=Memory(workers={W0_2: most}))
    with pytest.raises(InvalidSchedule, match=rf"W0_2 would hold {most} micro-batches, but has room for {most - 1}\n"):
        check(schedule, golden.TOPOLOGY, memory=Memory(workers={W0_2: most - 1}))
    with pytest.raises(ConfigError, match="must be able to hold at least 1 micro-batch, got 0"):
        Memory(0)

"""Normalisation, stored plans, measured times and pictures."""

from __future__ import annotations

import itertools
import json
import os
from contextlib import suppress
from pathlib import Path

import pytest

from benchmarks.lab.draw import draw_text
from shared_core.errors import ConfigError
from shared_core.reroute.plan_cache import PlanStore, Settings
from shared_core.schedule.normalise import Move, normalise, stage_cost
from shared_core.schedule.planner import canonical, patterns, plan, rename
from shared_core.schedule.problem import Variant
from shared_core.schedule.schedule import PlannedWorker, Topology, one_f_one_b
from shared_core.schedule.timing import StageTimes, Times, simulate
from tests.harness import until

TOPOLOGY = Topology(3, 4, 6)


def places(*numbers: tuple[int, int]) -> list[PlannedWorker]:
    return [PlannedWorker(*one) for one in numbers]


def test_failures_are_spread() -> None:
    found = normalise(TOPOLOGY, places((0, 2), (1, 2)))
    assert (found.before, found.cost, found.moving) == (57, 30, 0)
    (move,) = found.moves
    assert move.target.stage == 2 and move.source.stage != 2
    assert plan(TOPOLOGY, found.failed).period == 30
    # Without staggering early stages are the cheap ones.
    late = normalise(TOPOLOGY, places((1, 3)), variant=Variant.COUPLED)
    assert late.cost == 27 and late.moves == (Move(PlannedWorker(0, 0), PlannedWorker(1, 3)),)
    assert normalise(TOPOLOGY, places((1, 3))).moves == (), "staggered, all stages cost the same"


def test_what_cannot_be_spread_is_refused() -> None:
    with pytest.raises(ConfigError, match="moving needs 1 value or one for each of 4 stages, got 2"):
        normalise(TOPOLOGY, places((0, 2), (1, 2)), moving=[1, 2])
    with pytest.raises(ConfigError, match="all 3 workers of stage 1 failed"):
        normalise(TOPOLOGY, places((0, 1), (1, 1), (2, 1)))


@pytest.mark.parametrize("variant", Variant)
@pytest.mark.parametrize(
    "failed", [[(0, 1), (1, 1)], [(0, 0), (1, 2), (2, 2)], [(0, 1), (2, 1), (0, 2), (1, 2), (2, 3)]]
)
def test_normalisation_is_the_best_choice(variant: Variant, failed: list[tuple[int, int]]) -> None:
    stages = tuple(StageTimes(1 + s / 10, 1, 1, 3) for s in range(4))
    times, moving = Times(stages), [1.0, 2.0, 3.0, 4.0]
    have = [sum(s == stage for _, stage in failed) for s in range(4)]
    best = min(
        (
            max(stage_cost(TOPOLOGY, times, variant, s, k) for s, k in enumerate(counts)),
            sum(max(0, have[s] - k) * moving[s] for s, k in enumerate(counts)),
        )
        for counts in itertools.product(range(3), repeat=4)
        if sum(counts) == len(failed)
    )
    found = normalise(TOPOLOGY, places(*failed), times=times, variant=variant, moving=moving)
    assert (found.cost, found.moving) == pytest.approx(best)
    after = set(places(*failed))
    for move in found.moves:
        assert move.target in after and move.source not in after
        after ^= {move.target, move.source}
    assert sorted(after) == list(found.failed)


def test_pipelines_are_renamed() -> None:
    pattern, names = canonical(TOPOLOGY, places((2, 1)))
    assert pattern == (PlannedWorker(0, 1),) and names == {2: 0, 0: 1, 1: 2}
    assert len(patterns(TOPOLOGY, 1)) == 4 and len(patterns(TOPOLOGY, 2)) == 4 * 3 // 2 + 4 * 5 // 2
    assert patterns(Topology(2, 2, 1), 3) == [], "a stage would have nobody left"
    first = plan(TOPOLOGY, pattern)
    back = rename(first, {new: old for old, new in names.items()})
    assert back.failed == (PlannedWorker(2, 1),) and set(back.schedule.rows) == set(TOPOLOGY.workers()) - {
        PlannedWorker(2, 1)
    }
    assert simulate(back.schedule, Times(), staggered=True).period == first.period
    assert rename(back, names) == first


@pytest.mark.timeout(300)
def test_plans_are_stored(tmp_path: Path) -> None:
    times = Times((StageTimes(1, 1, 1, 3),), 0.25, data_apart=True)
    settings = Settings(TOPOLOGY, times, Variant.DECOUPLED)
    assert Settings.from_dict(json.loads(json.dumps(settings.to_dict()))) == settings
    store = PlanStore(tmp_path, settings)
    assert store.look_up(places((1, 2))) is None
    filling = store.fill_in_background(1)
    try:
        own = os.getpriority(os.PRIO_PROCESS, 0)
        last = min(own + 19, 19)
        until(lambda: os.getpriority(os.PRIO_PROCESS, filling.pid) == last, "it does not let all others go first")
        with suppress(PermissionError):  # only root may: on a machine with much to do it would never have a turn
            os.setpriority(os.PRIO_PROCESS, filling.pid, own)
        assert filling.wait(240) == 0
    finally:
        filling.kill()
    fresh = PlanStore(tmp_path, settings)
    for worker in TOPOLOGY.workers():
        found = fresh.look_up([worker])
        assert found is not None and found.failed == (worker,) and found.topology == TOPOLOGY
    assert fresh.look_up([]) is not None and fresh.look_up(places((1, 2), (0, 2))) is None
    assert PlanStore(tmp_path, Settings(TOPOLOGY)).look_up([]) is None, "other settings, other plans"
    made = fresh.make(places((1, 2), (0, 2)))
    assert made.failed == (PlannedWorker(0, 2), PlannedWorker(1, 2)) == fresh.make(places((0, 2), (1, 2))).failed
    assert len(list(fresh.folder.glob("failed-*.json"))) == 6
    with pytest.raises(ConfigError, match="these are not a planner's settings: KeyError"):
        Settings.from_dict({})


def test_a_changed_plan_is_made_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = PlanStore(tmp_path, Settings(TOPOLOGY))
    made = store.make(places((1, 2)))
    (path,) = store.folder.glob("failed-*.json")
    whole = path.read_bytes()
    names = whole[: whole.rindex(b"}")].replace(b'"ordered": false', b'"ordered": true')
    other = store.folder / "failed-0.0.json"
    for damaged in (names + whole[whole.rindex(b"}") :], whole[:-30], b"\xff" + whole, b""):
        path.write_bytes(damaged)
        other.write_bytes(whole)  # whole, but for other failures
        fresh = PlanStore(tmp_path, store.settings)
        assert fresh.look_up(places((1, 2))) is None and fresh.look_up(places((0, 0))) is None
        assert f"the plan {path} is damaged and will be made again" in capsys.readouterr().err
        assert fresh.make(places((1, 2))) == made and path.read_bytes() == whole


def test_drawn_as_text() -> None:
    timeline = simulate(one_f_one_b(Topology(1, 2, 2)), Times())
    assert draw_text(timeline).splitlines() == [
        "W0_0  F0  F1  .   .   B0  --- .   B1  --- OPT --- ---",
        "W0_1  .   F0  B0  --- F1  B1  --- .   .   OPT --- ---",
    ]
    assert "F0@1" in draw_text(simulate(plan(Topology(2, 2, 2), places((1, 1))).schedule, Times()))
    many = simulate(one_f_one_b(Topology(1, 2, 400)), Times())
    assert max(map(len, draw_text(many).splitlines())) < 400 * 8

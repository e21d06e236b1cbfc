"""The benchmarks: form of their rows, what they read from traces, and one short real run of each."""

from __future__ import annotations

import importlib
import json
import random
from pathlib import Path

import pytest

from benchmarks import (
    common,
    overhead,
    pipeline_recovery,
    recovery,
    recovery_traces,
    total_time,
)
from benchmarks.common import FULL, QUICK, WORKERS, Row, arguments, at_least, at_most, begin, finish, table
from tests.support.namespaces import unavailable

FORM = {"case", "metric", "value", "unit", "target", "holds"}


def test_rows_and_targets() -> None:
    assert Row("a", "m", 1.0, "s") == Row("a", "m", 1.0, "s", None, None)
    assert at_most("a", "m", 1.0, "s", 1.0).holds is True
    assert at_most("a", "m", 1.01, "s", 1.0).holds is False
    assert at_least("a", "m", 8.0, "times", 8.0).holds is True
    assert at_least("a", "m", 7.9, "times", 8.0).holds is False
    assert at_most("a", "m", None, "s", 1.0).holds is False, "what could not be measured does not hold"


def test_the_table_and_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [Row("case one", "time", 0.125, "s"), at_most("two", "ratio", 1.2, "", 1.1), Row("two", "x", None, "ms")]
    assert table(rows).splitlines()[2].split() == ["case", "one", "time", "0.125", "s"]
    file = tmp_path / "deep" / "rows.json"
    options = begin(arguments("name", "What it does."), ["--json", str(file), "--full"])
    assert options.size == FULL and finish(rows, options) == 1
    assert "target missed: two, ratio" in capsys.readouterr().out
    written = json.loads(file.read_text())
    assert written["command"] == "name --full" and len(written["load"]) == 2 and written["seconds"] >= 0
    assert written["machine"]["cores"] > 0 and written["commit"] and written["date"] > "2026"
    assert all(set(row) == FORM for row in written["rows"])
    assert [row["holds"] for row in written["rows"]] == [None, False, None]
    options = begin(arguments("name", "What it does."), ["--quick"])
    assert options.size == QUICK and finish(rows[:1], options) == 0


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert common.has_torchft() is False
    assert "pip install 'swift-recovery[torchft]'" in capsys.readouterr().out


def write_traces(folder: Path, steps: dict[int, list[tuple[int, float]]], discarded: int = 0) -> recovery_traces.Traces:
    for rank in range(WORKERS):
        lines = [{"kind": "step", "step": step, "time": at, "pid": 1} for step, at in steps[rank]]
        lines += [{"kind": "discarded", "step": 1, "time": 0.0, "pid": 1}] * (discarded if rank == 0 else 0)
        (folder / f"trace{rank}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    traces = recovery_traces.Traces(folder)
    traces.refresh()
    return traces


def test_a_stall_is_the_gap_that_begins_near_the_kill(tmp_path: Path) -> None:
    # Killed at 10.0. Ranks 0 and 1 were in a collective; rank 2's step was past its last one and returned at 10.01.
    steps = {
        0: [(1, 9.8), (2, 9.9), (3, 10.5), (4, 10.6)],
        1: [(1, 9.8), (2, 9.9), (3, 10.5), (4, 10.6)],
        2: [(1, 9.8), (2, 9.9), (3, 10.01), (4, 10.6)],
        3: [(1, 9.8), (2, 9.9), (3, 10.45), (4, 10.6), (5, 20.0)],
    }
    traces = write_traces(tmp_path, steps)
    found = [recovery_traces.stalled_until(traces, rank, 10.0, 0.1) for rank in range(WORKERS)]
    assert found == [10.5, 10.5, 10.6, 10.45]


def test_steps_made_again_and_samples_lost(tmp_path: Path) -> None:
    again = [(1, 1.0), (2, 2.0), (3, 3.0), (2, 11.0), (3, 12.0), (4, 13.0)]
    traces = write_traces(tmp_path, dict.fromkeys(range(WORKERS), again))
    assert recovery_traces.repeated(traces, 0, at=10.0) == 2
    assert recovery_traces.lost_samples(traces) == 0
    left_out = {0: [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)]} | dict.fromkeys(
        (1, 2), [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)]
    )
    traces = write_traces(tmp_path / ".", left_out | {3: [(1, 1.0), (4, 4.0)]}, discarded=1)
    assert recovery_traces.lost_samples(traces) == (2 + 1) * recovery_traces.BATCH


@pytest.mark.nightly
def test_a_short_real_run_of_recovery(tmp_path: Path) -> None:
    system = recovery.System("swift, standby", "swift", (1, 1, 1))
    outcome = recovery.run(system, 2, tmp_path, random.Random(3))
    assert [kill.ranks for kill in outcome.kills] == [(3,), (0,)]
    assert outcome.lost_samples == 0
    for kill in outcome.kills:
        assert kill.recomputed == 0
        assert 0 < kill.survivors_s <= kill.stall_s <= kill.regained_s + 1e-6 and kill.user_s > 0
        assert kill.ready_s is not None and 0 < kill.ready_s < kill.stall_s
    rows = recovery.rows_of(outcome, best_other=5.0)
    named = {row.metric: row for row in rows}
    assert named["steps recomputed, maximum"].holds and named["samples lost"].holds
    assert named["stall, how many times shorter than the best other"].value == pytest.approx(
        5.0 / (named["stall, median"].value or 0)
    )


def system(name: str) -> recovery.System:
    return next(one for one in recovery.SYSTEMS if name in one.name)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["shrink", "spare"])
def test_a_short_real_run_with_other_workers(name: str, tmp_path: Path) -> None:
    if name == "spare" and unavailable():
        pytest.skip(unavailable())
    outcome = recovery.run(system(name), 2, tmp_path, random.Random(3))
    for kill in outcome.kills:
        assert 0 < kill.survivors_s <= kill.stall_s <= kill.regained_s + 1e-6 and kill.user_s > 0
        if name == "shrink":
            assert kill.recomputed <= 1 and kill.growth_s is not None and kill.growth_s > 0
        else:
            assert kill.recomputed == 0 and kill.ranks == (2, 3)
            assert kill.detected_s is not None and 1.0 < kill.detected_s < kill.stall_s
    assert outcome.lost_samples == (None if name == "shrink" else 0)


@pytest.mark.parametrize("where", [where for _, where, _ in overhead.PARTS])
def test_parts_of_a_step_are_where_the_benchmark_looks_for_them(where: str) -> None:
    module, _, path = where.partition(":")
    owner, method = path.split(".")
    assert callable(vars(getattr(importlib.import_module(module), owner))[method])


@pytest.mark.nightly
def test_a_short_real_run_of_overhead() -> None:
    with overhead.sides(["gloo", "swift"]) as ready:
        rows = overhead.measure("mlp", ready, steps=2, rounds=3)
        parts = overhead.costs("mlp", ready["swift"], 4)
    assert len(parts) == len(overhead.PARTS) and all(row.value is not None and row.value < 1e3 for row in parts)
    named = {row.metric: row for row in rows}
    ratio = named["step time, swift / gloo"]
    assert ratio.target == overhead.TARGETS["mlp"] and ratio.value is not None and 0.2 < ratio.value < 5
    assert (named["step time on gloo"].value or 0) > 0
    assert "peak memory of a worker, swift - gloo" in named


@pytest.mark.nightly
def test_a_short_real_run_of_pipeline_recovery(tmp_path: Path) -> None:
    case = pipeline_recovery.Case(2, 1, "replay", ((1,),))
    outcome = pipeline_recovery.run(case, 1, tmp_path, 4, 2)
    (kill,) = outcome.kills
    assert kill.survivors == 0 and kill.replacements >= kill.replayed * pipeline_recovery.MICRO_BATCHES > 0
    assert kill.joined_s is not None and kill.replay_s is not None and kill.logged > 0
    assert 0 < kill.joined_s + kill.replay_s < kill.regained_s
    named = {row.metric: row for row in pipeline_recovery.rows_of(outcome)}
    assert named["stage 1: replay of a step / normal step (target: bound)"].target == 0.8


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["replace", "reroute"])
def test_a_short_real_run_of_total_time(name: str, tmp_path: Path) -> None:
    assert total_time.main(["--quick", "--only", f"this, {name}", "--json", str(tmp_path / "rows.json")]) == 0
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    rows = [row for row in rows if row["case"] == f"this, {name}"]
    named = {row["metric"]: row["value"] for row in rows}
    assert named["losses"] == 1 and named["total time / without failures"] > 0.5
    assert named["final loss - without failures"] == 0 and sum(row["holds"] is True for row in rows) == 3

"""The benchmarks: form of their rows, what they read from traces, and one short real run of each."""

from __future__ import annotations

import importlib
import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import (
    common,
    overhead,
    pipeline_overhead,
    pipeline_recovery,
    recovery,
    recovery_traces,
    reroute,
    total_time,
)
from benchmarks.common import WORKERS, Row, at_least, at_most, finish, table
from shared_core.schedule.problem import Variant
from shared_core.schedule.schedule import PlannedWorker, Topology
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
    assert finish(rows, tmp_path / "deep" / "rows.json") == 1
    assert "target missed: two, ratio" in capsys.readouterr().out
    written = json.loads((tmp_path / "deep" / "rows.json").read_text())
    assert isinstance(written, list) and all(set(row) == FORM for row in written)
    assert [row["holds"] for row in written] == [None, False, None]
    assert finish(rows[:1], None) == 0


@pytest.mark.nightly
def test_every_benchmark_has_the_common_options() -> None:
    modules = ("overhead", "recovery", "pipeline_overhead", "pipeline_recovery", "planner", "traces", "total_time")
    names = (*modules, "startup", "reroute", "reroute_ddp", "checkpoint_policy", "checkpoint_stall", "record_curves")
    for module in names:
        command = [sys.executable, "-m", f"benchmarks.{module}", "--help"]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert "--json FILE" in text and "--quick" in text


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
    system = recovery.System("swift, standby", "swift", 1, 1)
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


def test_what_means_nothing_is_not_judged() -> None:
    """With another number of workers samples are not comparable; a machine is noticed after a lease."""
    kill = recovery.Kill((1,), 5.0, 0.9, 0.9, 1.0, 1, 0.4, growth_s=1.5)
    rows = recovery.rows_of(recovery.Outcome(system("shrink"), [kill], 0.1, None), best_other=5.0)
    named = {row.metric: row for row in rows}
    assert all(row.holds is None for row in rows)
    assert named["samples lost"].value is None and named["steps recomputed, mean"].value == 1
    assert named["growth, median"].value == named["growth, maximum"].value == 1.5
    kill = recovery.Kill((2, 3), 5.0, 2.5, 2.5, 2.5, 0, 0.1, detected_s=2.0, ready_s=2.1)
    rows = recovery.rows_of(recovery.Outcome(system("spare"), [kill], 0.1, 0), best_other=5.0)
    assert {row.metric for row in rows if row.holds is not None} == {"steps recomputed, maximum", "samples lost"}
    assert {row.metric: row.value for row in rows}["stall after it was noticed, median"] == 0.5


def test_a_sharded_model_is_compared_with_as_many_parameters() -> None:
    pairs = [(a.name, b.name) for a in recovery.SYSTEMS for b in recovery.SYSTEMS if a.holds_a_shard_of(b)]
    assert sorted(pairs) == [
        (f"swift, DDP, a shard of FSDP2's or ZeRO-3's {size}", f"swift, {kind}, {size}")
        for size in ("10 M", "50 M")
        for kind in ("FSDP2", "ZeRO-3")
    ]
    kill = recovery.Kill((1,), 5.0, 0.9, 0.9, 1.0, 0, 0.4, detected_s=0.1, ready_s=0.2)
    outcome = recovery.Outcome(system("swift, FSDP2, 10 M"), [kill], 0.1, 0)
    for shard, holds in ((0.5, True), (0.4, False)):
        named = {row.metric: row for row in recovery.rows_of(outcome, best_other=5.0, shard=shard)}
        ratio = named.pop("stall / that of DDP with a shard's parameters")
        assert ratio.value == pytest.approx(0.9 / shard) and ratio.holds is holds
        # Targets of another model.
        assert named["stall, median"].target is None and named["survivors ready, maximum"].target is None


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["swift, FSDP2, 10 M"])
def test_a_short_real_run_with_a_sharded_model(name: str, tmp_path: Path) -> None:
    small = replace(system(name), model=(4, 64), every=5 if system(name).every else 0)
    outcome = recovery.run(small, 2, tmp_path, random.Random(3))
    for kill in outcome.kills:
        assert 0 < kill.survivors_s <= kill.stall_s <= kill.regained_s + 1e-6
        assert kill.recomputed == 0 if small.ours else kill.recomputed < 2 * small.every + 2
    assert outcome.lost_samples == 0


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
@pytest.mark.timeout(300)
def test_a_short_real_run_of_overhead_with_a_sharded_model() -> None:
    with overhead.sides(["gloo", "swift"]) as ready:
        rows = overhead.measure("fsdp2-10M", ready, steps=1, rounds=2)
    named = {row.metric: row for row in rows}
    ratio, memory = named["step time, swift / gloo"], named["peak memory of a worker, swift - gloo"]
    assert ratio.target == 1.05 and ratio.value is not None and 0.2 < ratio.value < 5
    assert memory.target == 1.25 and memory.value is not None and 0 < memory.value < 10
    published = named["published by a worker in shared memory"].value
    assert published is not None and published > 12 * 9.9 / WORKERS  # parameters and two moments of a shard


def test_delay_and_micro_batches_made_again(tmp_path: Path) -> None:
    """A step takes 1 s. Killed at 2.5: step 3 ends at 5.0 instead of 3.0, and what follows is as late."""
    steps = [{"kind": "step", "step": step, "time": at} for step, at in ((1, 1.0), (2, 2.0), (3, 5.0), (4, 6.0))]
    forwards = [{"kind": "forward", "step": 3, "time": at} for at in (2.1, 2.3, 3.0, 3.1, 3.2, 3.3)]
    for rank, lines in enumerate((steps, [*steps, *forwards])):
        (tmp_path / f"trace{rank}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    traces = recovery_traces.Traces(tmp_path, 2)
    traces.refresh()
    assert pipeline_recovery.delay(traces, 0, 2.5, 1.0, goal=4) == pytest.approx(2.0)
    assert pipeline_recovery.computed_again(traces, 0, 2.5) == 0
    assert pipeline_recovery.MICRO_BATCHES == 4 and pipeline_recovery.computed_again(traces, 1, 2.5) == 2


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
def test_a_short_real_run_of_pipeline_overhead() -> None:
    rows = pipeline_overhead.run("real", 2, pipeline_overhead.REPLICAS, 2)
    ratio = next(row for row in rows if row.unit == "ratio")
    assert ratio.target == 1.03 and ratio.value is not None and 0.2 < ratio.value < 5
    assert next(row for row in rows if row.metric.startswith("logged in a step")).value == 0


def test_what_traces_tell_of_a_training(tmp_path: Path) -> None:
    """Step 30 is made again; rank 3 is absent from step 25, and what it does after the end does not count."""
    lines = [{"kind": "step", "step": s, "time": 0.1 * s, "shares": 4} for s in range(1, 31)]
    lines[2]["shares"] = 1  # while workers start
    lines[24]["shares"] = 3
    lines += [{"kind": "step", "step": s, "time": 0.1 * s + 0.1, "shares": 4} for s in (30, 31)]
    end = {"kind": "end", "step": 31, "time": 3.5, "loss": 0.5, "digest": "d"}
    late = {"kind": "step", "step": 22, "time": 3.4, "shares": 1}
    for rank in range(WORKERS):
        mine = [*lines, end] if rank < 3 else [*lines[:24], late]
        (tmp_path / f"trace{rank}.jsonl").write_text("".join(json.dumps(line | {"pid": 1}) + "\n" for line in mine))
    traces = recovery_traces.Traces(tmp_path)
    traces.refresh()
    run = total_time.read(total_time.REROUTE, traces, 31, losses=1)
    assert run.seconds == pytest.approx(1.2) and (run.recomputed, run.lost) == (1, recovery_traces.BATCH)
    assert (run.loss, run.digests, run.saved_s) == (0.5, {"d"}, None) and run.step_s == pytest.approx(0.1)
    other = replace(run, digests=frozenset({"d", "e"}), seconds=1.0)
    named = {row.metric: row for row in total_time.rows_of(run, other, other)}
    assert named["total time / without failures"].value == pytest.approx(1.2)
    assert named["steps recomputed"].holds is False and named["same bits as this, reroute"].holds is False
    assert all(row.holds is None for row in total_time.rows_of(replace(run, system=total_time.PLAIN), run, run))


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["replace", "reroute"])
def test_a_short_real_run_of_total_time(name: str, tmp_path: Path) -> None:
    assert total_time.main(["--quick", "--only", f"this, {name}", "--json", str(tmp_path / "rows.json")]) == 0
    rows = [row for row in json.loads((tmp_path / "rows.json").read_text()) if row["case"] == f"this, {name}"]
    named = {row["metric"]: row["value"] for row in rows}
    assert named["losses"] == 1 and named["total time / without failures"] > 0.5
    assert named["final loss - without failures"] == 0 and sum(row["holds"] is True for row in rows) == 3


@pytest.mark.nightly
def test_the_end_of_a_job_is_told_with_its_log(tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text("raise SystemExit('this job is broken')\n")
    with common.Workers("torchrun", script, [], tmp_path) as workers:
        assert workers.wait(60) == 1
        with pytest.raises(RuntimeError, match="the torchrun job has ended with status 1"):
            workers.check()
        assert "this job is broken" in workers.tail(200)
    assert not any(os.path.exists(f"/proc/{process.pid}") for process in workers.processes.values())


@pytest.mark.nightly
def test_a_short_real_run_of_reroute(tmp_path: Path) -> None:
    case = reroute.Case(Topology(2, 2, 4), Variant.STAGGERED, (PlannedWorker(1, 1),))
    run = reroute.Run(case, tmp_path, 2)
    with run.workers:
        outcome = run.measure()
    whole, one = outcome.phases
    assert 18 * 0.05 < whole.period_s < one.period_s and one.lost == case.losses
    assert whole.expected_s is not None and one.first_s is not None and one.predicted_s is not None
    assert any(row.metric == "extra, deviation" for row in reroute.rows_of(outcome))

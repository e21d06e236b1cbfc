"""Lives of a job under checkpoint policies: closed forms, research's Monte Carlo, the command and its picture."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from best_placement import waste

from benchmarks import checkpoint_policy
from benchmarks.simulate.checkpointed_runs import RunOutcomes, SimulatedRuns, simulate_runs
from benchmarks.simulate.placing import Knowledge, Recorded, SimulatedJob, places
from shared_core.checkpoint.cost import Cost
from shared_core.checkpoint.curve import Curve
from shared_core.checkpoint.history import Run, RunEnding, append
from shared_core.checkpoint.policy import Fixed, Policy, Value, Young
from shared_core.cli.swiftctl import main

CURVE = Curve(0.0, 600.0**0.7, 0.7, 599.0)


def job(abrupt: float = 0.0, **changes: object) -> SimulatedJob:
    """Case 1 of research 3.5: MTBF 240 min, ends after 120 min on average, a checkpoint takes 0.3 min."""
    values = {"ending": RunEnding.constant(1 / 7200, abrupt), "mtbf_h": 4.0, "cost": Cost(18.0), "hours": 6.0} | changes
    return SimulatedJob(CURVE, **values)  # type: ignore[arg-type]


def played(made: SimulatedJob, policy: Policy, lives: int = 3000, **known: object) -> RunOutcomes:
    where = places(made, policy, Knowledge(made.ending, **known))  # type: ignore[arg-type]
    return simulate_runs(made, where, SimulatedRuns.draw(made, lives, 3))


def test_time_agrees_with_the_closed_form() -> None:
    """Daly's expected time of equal segments, the last one without a checkpoint; restart is not counted as overhead."""
    made = job(ending=RunEnding.constant(0.0, 0.0), restart_s=0.0, mtbf_h=1.0)
    interval = 600.0
    outcome = simulate_runs(made, [interval * i for i in range(1, 36)], SimulatedRuns.draw(made, 20_000, 1))
    one = interval * (1 + waste(interval, 18.0, 1 / 3600))
    last = interval * (1 + waste(interval, 1e-9, 1 / 3600))
    error = outcome.overhead_s.std() / math.sqrt(20_000)
    assert outcome.overhead_s.mean() == pytest.approx(35 * one + last - made.horizon_s, abs=4 * error)
    assert (outcome.made >= 35).all() and outcome.lost.max() == 0, "who ends as planned lacks nothing"


def test_a_write_that_takes_long_costs_its_time_at_each_fault() -> None:
    """A checkpoint that is durable only after 300 s: every fault and every abrupt end costs so much more."""
    fast, slow = (job(1.0, cost=Cost(18.0, persist_s=lag)) for lag in (0.0, 300.0))
    where = [900.0 * i for i in range(1, 24)]
    lives = SimulatedRuns.draw(fast, 4000, 5)
    rework = [simulate_runs(made, where, lives).rework_s.mean() for made in (fast, slow)]
    faults = rework[0] / 450
    assert rework[1] - rework[0] == pytest.approx(300 * faults, rel=0.15)
    assert simulate_runs(slow, where, lives).lost.mean() > simulate_runs(fast, where, lives).lost.mean()


def test_all_policies_meet_the_same_faults_and_ends() -> None:
    made = job()
    lives = SimulatedRuns.draw(made, 2000, 9)
    assert np.array_equal(lives.ends_s, SimulatedRuns.draw(made, 2000, 9).ends_s)
    assert lives.ends_s.mean() == pytest.approx(7200, rel=0.1)
    at = SimulatedRuns.draw(job(ending=RunEnding((0.0, 1000.0, 2000.0), (0.0, 5e-4, 0.0), 1.0)), 4000, 2).ends_s
    assert np.isinf(at).mean() == pytest.approx(math.exp(-0.5), abs=0.03)
    assert at.min() >= 1000 and at[np.isfinite(at)].max() < 2000


def test_where_all_ends_are_graceful_young_is_best() -> None:
    """Research 3.5, case 1, x 1e-4: Young 67, the rule for abrupt ends 116, equal progress far above."""
    made = job()
    gain = 1e4 * (1 - CURVE.loss(made.horizon_s) / CURVE.loss(0))
    best = played(made, Young()).lost
    assert best.mean() * gain == pytest.approx(67, abs=8)
    assert np.array_equal(played(made, Value()).lost, best), "value is Young's rule"
    believes = Knowledge(RunEnding.constant(1 / 7200, 1.0))
    rule = simulate_runs(made, places(made, Value(), believes), SimulatedRuns.draw(made, 3000, 3)).lost
    assert rule.mean() * gain == pytest.approx(116, abs=10) and rule.mean() > best.mean()
    for worse in (Fixed(2400), Fixed(200)):
        assert played(made, worse).lost.mean() > best.mean()


def test_where_ends_are_abrupt_the_rule_is_best() -> None:
    """Research 3.5, case 1, x 1e-4: Young 500, the rule 238."""
    made = job(1.0)
    gain = 1e4 * (1 - CURVE.loss(made.horizon_s) / CURVE.loss(0))
    found = {name: played(made, policy).lost for name, policy in (("young", Young()), ("value", Value()))}
    assert found["young"].mean() * gain == pytest.approx(500, abs=35)
    assert found["value"].mean() * gain == pytest.approx(238, abs=20)
    difference = found["value"] - found["young"]
    assert difference.mean() < -4 * difference.std() / math.sqrt(len(difference))


def test_a_recorded_curve_is_made_monotone() -> None:
    random = np.random.default_rng(4)
    true = Curve(1.0, 3.0, 0.5)
    found = Recorded.smooth(np.array([true.loss(step) for step in range(1, 2001)]) + random.normal(0, 0.1, 2000))
    assert (np.diff(found.losses) <= 0).all() and found.loss(1e9) == found.losses[-1]
    for step in (100, 1000):
        assert found.loss(step) == pytest.approx(true.loss(step), abs=0.05)
        assert found.slope(step) == pytest.approx(true.slope(step), rel=0.6)


def test_estimates_are_worth_nearly_as_much_as_the_truth() -> None:
    """40 earlier runs and noisy losses; half of the early ends are kills."""
    made = job(0.5, mtbf_h=8.0, cost=Cost(5.0))
    lives = SimulatedRuns.draw(made, 1500, 3)
    told = checkpoint_policy.told_by(made, 1, checkpoint_policy.noisy(made), 40)
    ours, youngs = (simulate_runs(made, places(made, policy, told), lives).lost.mean() for policy in (Value(), Young()))
    truth = simulate_runs(made, places(made, Value(), Knowledge(made.ending)), lives).lost.mean()
    assert ours < 1.35 * truth and ours < 0.85 * youngs


def test_the_benchmark_judges_value_against_the_best_other() -> None:
    cell = next(cell for cell in checkpoint_policy.research_cells() if cell.ends == "abrupt")
    found = checkpoint_policy.outcomes(cell.job, SimulatedRuns.draw(cell.job, 300, 5), checkpoint_policy.Remembered())
    rows = checkpoint_policy.judge(cell, found, True)
    assert rows[0].holds and "value / best other" in rows[0].metric and len(rows) == 1 + 2 * len(found)
    exchanged = found | {"value": found["young"], "young": found["value"]}
    assert checkpoint_policy.judge(cell, exchanged, False)[0].holds is False
    assert len(list(checkpoint_policy.coci_cells(checkpoint_policy.MODELS, checkpoint_policy.MTBFS_H))) == 240
    assert set(checkpoint_policy.recorded()) == {"digits", "gpt2_constant", "gpt2_one_cycle"}


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_the_quick_benchmark_meets_its_targets(tmp_path: Path) -> None:
    assert checkpoint_policy.main(["--quick", "--json", str(tmp_path / "rows.json")]) == 0
    assert any(row["unit"] == "%" for row in json.loads((tmp_path / "rows.json").read_text()))


QUICK = ["lab", "policy", "--hours", "2", "--step-s", "5", "--lives", "200", "--policies", "value", "young", "fixed"]


def test_the_policy_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(QUICK) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:2] == ["policy", "checkpoints"] and "stall" not in lines[0] and len(lines) == 6
    assert lines[5].startswith("value follows Young's rule (")
    assert lines[2].split()[2:] == lines[3].split()[2:], "without early ends and a price value is Young's rule"
    assert main([*QUICK, "--simulate", "--end-h", "1", "--abrupt", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("utility lost %") and all("±" in line for line in lines[2:5])
    path = tmp_path / "runs.jsonl"
    for number in range(12):
        append(path, Run(str(number), "killed", 1800.0 + number, time=1.0))
    printed = []
    for _ in range(2):
        assert main([*QUICK, "--simulate", "--history", str(path), "--json"]) == 0
        printed.append(capsys.readouterr().out)
    found = json.loads(printed[0])
    assert printed[0] == printed[1] and [one["policy"] for one in found] == ["value", "young", "fixed"]
    assert found[0]["lost"]["mean"] < found[1]["lost"]["mean"]


def test_a_file_that_is_no_curve(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "curve.csv"
    for text, message in (("step,loss\n1;2\n", "must hold a header"), ("step,loss\n1,2\n", "at least 10 losses")):
        path.write_text(text)
        assert main([*QUICK, "--curve", str(path)]) == 2
        assert message in capsys.readouterr().err
    path.write_text("step,loss\n" + "".join(f"{step},{step}\n" for step in range(50)))
    assert main([*QUICK, "--curve", str(path)]) == 2
    assert "does not fall" in capsys.readouterr().err

"""``swiftctl lab plan``."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks import planner
from benchmarks.lab.check import check
from shared_core.cli import swiftctl
from shared_core.schedule.planner import IterationPlan

ROOT = Path(__file__).parents[2]
EXAMPLE = ["lab", "plan", "--dp", "3", "--pp", "4", "--micro-batches", "6"]


def as_json(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, object]:
    assert swiftctl.main([*EXAMPLE, *options, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found, dict)
    return found


def test_the_example_of_the_paper(capsys: pytest.CaptureFixture[str]) -> None:
    for variant, slots, period in (("coupled", 33, 36), ("decoupled", 29, 32), ("staggered", 29, 30)):
        found = as_json(capsys, "--failed", "1:2", "--variant", variant)
        assert (found["slots"], found["period"]) == (slots, period)
        workers = found["workers"]
        assert isinstance(workers, dict) and len(workers) == 11 and "W1_2" not in workers
        plan = IterationPlan.from_dict(found)
        check(plan.schedule, plan.topology)
    assert as_json(capsys)["slots"] == 27


def test_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert as_json(capsys, "--failed", "1:2", "--failed", "0:2")["period"] == 57
    spread = as_json(capsys, "--failed", "1:2", "--failed", "0:2", "--normalise")
    assert spread["period"] == 30 and len(spread["moves"]) == 1  # type: ignore[arg-type]
    ordered = IterationPlan.from_dict(as_json(capsys, "--failed", "1:2", "--ordered"))
    check(ordered.schedule, ordered.topology, ordered=True)
    assert len(set(ordered.route.values())) == 1
    timed = as_json(capsys, "--times", "2,2,2,6,0")
    assert timed["slots"] == 54
    assert as_json(capsys, "--failed", "1:2", "--memory", "2", "--time-limit", "0")["slots"] > 29  # type: ignore[operator]


def test_what_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "plan.txt"
    assert swiftctl.main([*EXAMPLE, "--failed", "1:2", "--draw", str(picture)]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "staggered, failed: W1_2; 29 slots, period 30 (period optimal for this route; greedy)"
    assert out[2:] == picture.read_text().splitlines() and len(out) == 13


def test_the_examples_of_the_documentation(capsys: pytest.CaptureFixture[str]) -> None:
    docs = (ROOT / "docs" / "design" / "planner.md").read_text()
    assert swiftctl.main([*EXAMPLE, "--failed", "1:2"]) == 0
    assert capsys.readouterr().out == re.findall(r"```text\n(.*?)```", docs, re.S)[0]
    exec(re.findall(r"```python\n(.*?)```", docs, re.S)[0], {})
    assert capsys.readouterr().out.split()[0] == "30.0"


@pytest.mark.nightly
def test_the_benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "INSTANCES", planner.INSTANCES[2:4])
    monkeypatch.setattr(planner, "SIZES", ((4, 4, 8),))
    monkeypatch.setattr(planner, "HELD_SIZES", planner.HELD_SIZES[:1])
    monkeypatch.setattr(planner, "LIMITS", {3: planner.LIMITS[3]})
    planner.main(["--quick", "--json", str(tmp_path / "rows.json")])
    rows = {(row["case"], row["metric"]): row for row in json.loads((tmp_path / "rows.json").read_text())}
    missed = [name for name, row in rows.items() if row["holds"] is False and row["unit"] not in ("s", "ms")]
    assert not missed, "times depend on what else the machine does, and these do not"
    assert rows["3x4x6 failed 1:3 coupled", "best plan (target: closed form)"]["value"] == 36
    assert rows["all 6 instances", "greedy / best, worst"]["value"] <= 1.05
    held = {case: row["value"] for (case, metric), row in rows.items() if metric == "micro-batches held, most"}
    assert held["3x4x6 failed 1:2 staggered, no limit"] > held["3x4x6 failed 1:2 staggered, what 1F1B holds"] == 4

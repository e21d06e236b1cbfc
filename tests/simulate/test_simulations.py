"""The command, the benchmarks and the report of simulations."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from benchmarks import traces
from benchmarks.recycle_published import LARGE, MEDIUM
from shared_core.cli.swiftctl import main


def test_deviation_from_the_published_averages() -> None:
    """Judged with a batch and micro-batches that are not published; Bamboo's is explained."""
    rows = [row for model in (LARGE, MEDIUM) for row in traces.published_rows(model)]
    judged = [row for row in rows if row.target is not None]
    assert len(judged) == 7 and all(row.holds for row in judged)
    assert {row.case.partition(": ")[2] for row in judged} == {"ReCycle", "Oobleck"}
    bamboo = [row.value or 0.0 for row in rows if ": Bamboo" in row.case and row.metric.startswith("deviation")]
    assert bamboo[0] > 5 > bamboo[1] and any("Bamboo is not judged" in text for text in traces.EXPLAINED)


def test_published_tables_without_their_numbers() -> None:
    rows = {row.case: row.value or 0.0 for row in [*traces.frequency_rows(1), *traces.large_rows(20)]}
    for hours in ("6", "2", "0.5"):
        at = f"3.35B, a failure every {hours} h, back after 2 h (assumed): "
        assert rows[at + "ReCycle, ideal"] >= rows[at + "this, reroute"] > 0
    assert rows["145.6B, 19 of 192 workers gone, layout assumed: ReCycle, ideal"] > 0.8
    assert all("assumed" in case for case in rows)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lab", "simulate", "--step-s", "90", "--fault-free", "11.34"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[0] == "system" and lines[0].endswith("samples/s") and len(lines) == 9
    assert next(line for line in lines if line.startswith("ReCycle")).split()[-2:] == ["21.7", "11.08"]
    command = [
        "lab",
        "simulate",
        "--trace",
        "weibull:2:0.7",
        "--workers",
        "64",
        "--hours",
        "200",
        "--seed",
        "4",
        "--json",
    ]
    printed = []
    for _ in range(2):
        assert main([*command, "--spares", "2", "--systems", "replace", "torchft", "horovod", "checkfreq"]) == 0
        printed.append(capsys.readouterr().out)
    found = json.loads(printed[0])
    assert printed[0] == printed[1] and [one["system"] for one in found][1] == "torchft"
    assert all(one["failures"] > 50 and 0 < one["useful"] < 1 and one["seconds"] == 720_000 for one in found)


def test_the_policy_command(capsys: pytest.CaptureFixture[str]) -> None:
    quick = "lab policy --hours 2 --step-s 5 --lives 200 --policies value young fixed".split()
    assert main(quick) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[5].startswith("value follows Young's rule (")
    assert lines[2].split()[2:] == lines[3].split()[2:], "without early ends and a price value is Young's rule"
    assert main([*quick, "--simulate", "--end-h", "1", "--abrupt", "1"]) == 0
    assert capsys.readouterr().out.splitlines()[0].endswith("utility lost %")


def test_the_example_of_the_documentation(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "design" / "simulator.md").read_text()
    assert main(["lab", "simulate"]) == 0
    assert capsys.readouterr().out == re.findall(r"```text\n(.*?)```", page, re.S)[0]


def test_the_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "trace.svg"
    assert main(["lab", "simulate", "--plot", str(path)]) == 0
    assert "<svg" in path.read_text()
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as if it were not installed
    assert main(["lab", "simulate", "--plot", str(tmp_path / "other.svg")]) == 1
    assert "pip install 'swift-recovery[all]'" in capsys.readouterr().err
    assert not (tmp_path / "other.svg").exists()

"""The command, the benchmarks and the report of simulations."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import total_time as total_time_benchmark
from benchmarks import traces
from benchmarks.recycle_published import LARGE, MEDIUM
from benchmarks.simulated_training import Training, total_time
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


def test_total_time_of_a_training() -> None:
    found = total_time(Training(), (1.0, 8.0, 48.0), days=10, seeds=2)
    by_system: dict[str, list[float]] = {}
    for one in found:
        by_system.setdefault(one.system, []).append(one.ratio)
    assert len(by_system) == 6
    for system, ratios in by_system.items():
        assert ratios == sorted(ratios, reverse=True) and ratios[-1] >= 1, system
    ours = by_system["this, replace"]
    for other in ("CheckFreq", "Elastic Horovod", "torchrun, checkpoints"):
        assert all(a < b for a, b in zip(ours, by_system[other], strict=True))
    # 30 s of start-up, half a step and 0.18 s a failure, 1 % of them while another stalls
    assert ours[0] / 1.003 == pytest.approx(1 + (30 + 0.18 + 0.8) / 3600, rel=0.001)


def test_the_simulated_part_of_the_benchmark() -> None:
    assert total_time_benchmark.main(["--simulated", "--quick"]) == 0


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


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys; from shared_core.cli.swiftctl import main; assert main(['lab', 'simulate']) == 0; "
        "print({'torch', 'numpy', 'matplotlib', 'ortools', 'deepspeed'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "set()"

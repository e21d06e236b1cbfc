"""How runs ended: the file, its corruption, and what is estimated from it."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest

from shared_core.checkpoint.history import SILENT_S, Hazard, Run, append, from_history, read
from shared_core.errors import ConfigError


def test_a_run_is_its_last_line(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    assert read(path) == [], "no file"
    append(path, Run("a", time=100.0))
    append(path, Run("b", group="other", time=100.0))
    append(path, Run("a", useful_s=50.0, worker_s=200.0, rolled_back={"storage": 1}, time=150.0))
    append(path, Run("c", "stopped", 30.0, 60.0, time=160.0))
    found = {run.name: run for run in read(path, now=200.0)}
    assert [run.end for run in found.values()] == ["running", "running", "stopped"]
    assert (found["a"].useful_s, found["a"].worker_s, found["a"].rolled_back) == (50.0, 200.0, {"storage": 1})
    assert [run.name for run in read(path, group="other", now=200.0)] == ["b"]


def test_silence_is_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    for name, end, at in (("old", "running", 0.0), ("young", "running", SILENT_S), ("done", "completed", 0.0)):
        append(path, Run(name, end, 10.0, time=at + 1.0))
    ends = {run.name: run.end for run in read(path, now=SILENT_S + 2.0)}
    assert ends == {"old": "killed", "young": "running", "done": "completed"}
    append(path, Run("old", useful_s=20.0, time=SILENT_S + 2.0))  # it was restarted
    assert {run.name: run.end for run in read(path, now=SILENT_S + 2.0)}["old"] == "running"


def test_damage_costs_only_the_damaged_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A line is truncated, changed or nonsense: the others are read, and that is said."""
    path = tmp_path / "runs.jsonl"
    for number in range(4):
        append(path, Run(f"run{number}", "stopped", 10.0 * number, time=1.0))
    whole = path.read_bytes().splitlines()
    nonsense = [b"\xff\xfe", b"{}", b"[1]", b"null", b"7", b'{"name": 3}']
    nonsense += [whole[1].replace(b'"stopped"', b'"vanished"'), whole[1].replace(b"10.0", b"NaN")]
    nonsense += [whole[1].replace(b"10.0", b"-5"), whole[1][: len(whole[1]) // 2], whole[1].replace(b"run1", b'"')]
    for damaged in nonsense:
        path.write_bytes(b"\n".join([whole[0], damaged, *whole[2:]]) + b"\n")
        found = read(path, now=2.0)
        assert [run.name for run in found] == ["run0", "run2", "run3"], damaged
        assert "1 of 4 lines cannot be read and are passed over" in capsys.readouterr().err


def test_a_wrong_end_is_refused() -> None:
    with pytest.raises(ConfigError, match="completed, stopped, killed, not 'died'"):
        Run("a", "died")


def test_ends_are_estimated() -> None:
    """500 runs that end at a rate of 1 in 1000 s, a third of them killed, planned for 2000 s."""
    draw = random.Random(8)
    runs = []
    for number in range(500):
        length = draw.expovariate(1 / 1000)
        end = "completed" if length > 2000 else "killed" if draw.random() < 1 / 3 else "stopped"
        runs.append(Run(str(number), end, min(length, 2000.0), time=1.0))
    found = from_history(runs)
    assert found is not None and len(found.rates) == 8
    for at in (100.0, 500.0, 1500.0):
        assert found.rate(at) == pytest.approx(1e-3, rel=0.4)
    assert math.exp(-found.cumulative(1000.0)) == pytest.approx(0.37, abs=0.05)
    assert found.abrupt == pytest.approx(1 / 3, abs=0.06)


def test_the_hazard_is_learned_over_scales() -> None:
    """Whatever the truth, after ten faults the estimate is near it; and before the first it falls with the exposure."""
    for mtbf_h in (2.0, 50.0, 3_000.0, 60_000.0):
        found = Hazard().seen(10, 10 * mtbf_h * 3600)
        assert found.mean(1) * mtbf_h * 3600 == pytest.approx(1.0, rel=0.2)
        assert found.mean(16) == pytest.approx(16 * found.mean(1))
    quiet = [Hazard().seen(0, hours * 3600.0).mean(1) for hours in (0, 100, 1_000, 10_000)]
    assert quiet == sorted(quiet, reverse=True) and 1 / quiet[0] / 3600 == pytest.approx(283, rel=0.02)
    sure = Hazard(prior=((1.0, 100.0),))
    assert sure.mean(1) == pytest.approx(1 / 360_000) and sure.seen(3, 0.0).mean(1) == pytest.approx(4 / 360_000)

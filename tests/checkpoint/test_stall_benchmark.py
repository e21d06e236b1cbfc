"""The benchmark of a checkpoint's stall: its arithmetic, and one save of each of our and another system."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import checkpoint_stall
from benchmarks.checkpoint_stall import Recorder, measure


def test_what_a_save_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of 1 s; a save with a stall of 2 s, and one step more that is 0.5 s longer until it is complete."""
    now = 0.0
    monkeypatch.setattr(checkpoint_stall.time, "perf_counter", lambda: now)
    recorder = Recorder(saves=2, plain=3)
    for spent in (9.0, 7.0, 1.0, 1.0, 1.0):  # the first two are not counted
        assert not recorder.due
        now += spent
        recorder.step(True)
    for _ in range(2):
        assert recorder.due and not recorder.over
        recorder.begin()
        recorder.stalled(2.0)
        now += 3.0
        recorder.step(False)
        now += 1.5
        recorder.step(True)
        for _ in range(3):
            now += 1.0
            recorder.step(True)
    assert recorder.over and not recorder.due
    expected = {"stall": 2.0, "cost": 2.5, "complete": 4.5, "steps": 2}
    assert recorder.to_dict() == {"saves": [expected, expected], "step": 1.0}


def test_a_small_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = measure("ours", 10, 1, 1, tmp_path)
    (save,) = found["saves"]
    assert 0 < save["stall"] < save["complete"] and found["step"] > 0
    assert list(tmp_path.iterdir()) == []

"""``swiftctl checkpoints``."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from checkpoint_tools import run_writer, snapshot

from shared_core.checkpoint import Spool
from shared_core.cli.swiftctl import main


@pytest.fixture
def where(tmp_path: Path) -> Path:
    """Two checkpoints, and one that was never completed."""
    spool, where = Spool(tmp_path / "job"), tmp_path / "storage"
    for step in (10, 20):
        snapshot(spool, step, where)
        assert run_writer(spool) == (0, [])
    (where / "step-0000000030").mkdir()
    (where / "step-0000000030" / "rank0").write_bytes(b"x")
    return where


def rows(text: str) -> dict[int, str]:
    """Lines of the table by step."""
    cells = [line.replace("*", " ").split() for line in text.splitlines()[2:] if line.strip()]
    return {int(row[0]): row[1] for row in cells if row[0].isdigit()}


def test_list_and_what_a_restart_takes(where: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoints", str(where)]) == 0
    out = capsys.readouterr().out
    assert rows(out) == {10: "valid", 20: "valid", 30: "incomplete"}
    assert [line.split()[1] for line in out.splitlines() if line.startswith("*")] == ["20"]
    assert "a restart goes on from step 20" in out and "it was never completed" in out


def test_damage_is_found(where: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.truncate(where / "step-0000000020" / "rank1", 7)
    assert main(["checkpoints", str(where)]) == 0
    out = capsys.readouterr().out
    assert rows(out) == {10: "valid", 20: "damaged", 30: "incomplete"}
    assert "part 'rank1'" in out and "goes on from step 10" in out
    assert main(["checkpoints", str(where), "--fast"]) == 0
    out = capsys.readouterr().out
    assert rows(out)[20] == "unchecked" and "from step 20, if its parts are whole" in out


def test_json(where: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoints", f"file://{where}", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["pick"] == 20
    assert [one["state"] for one in found["found"]] == ["valid", "valid", "incomplete"]
    assert found["found"][1]["meta"]["world_size"] == 2 and sorted(found["found"][1]["parts"]) == ["rank0", "rank1"]


def test_another_number_of_workers(where: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoints", str(where), "--world-size", "3"]) == 1
    assert "a restart begins anew" in capsys.readouterr().out


def test_nothing_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoints", str(tmp_path / "absent")]) == 1
    assert "nothing in" in capsys.readouterr().out
    assert main(["checkpoints", "nonsense://x"]) == 2
    assert "cannot read nonsense://x" in capsys.readouterr().err

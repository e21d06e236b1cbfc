"""``swiftctl checkpoints``; that its last line is what starts do is in ``tests/test_checkpoints_commands.py``."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from checkpoint_tools import run_writer, snapshot

from shared_core.checkpoint.command import Command
from shared_core.checkpoint.lineage import folder_of, mark_ended
from shared_core.checkpoint.spool import Spool
from shared_core.cli.swiftctl import main

RUN = "20260101T000000-00000a"


@pytest.fixture
def mine(tmp_path: Path) -> Command:
    return Command.of(str(tmp_path / "train.py"), ["--lr", "0.1"], "script")


@pytest.fixture
def folder(tmp_path: Path, mine: Command) -> Path:
    """Of a run with two checkpoints, and one that was never completed."""
    spool, folder = Spool(tmp_path / "job"), Path(folder_of(str(tmp_path / "storage"), mine, RUN))
    for step in (10, 20):
        snapshot(spool, step, folder, run=RUN, command=mine.key, words=mine.words)
        assert run_writer(spool) == (0, [])
    (folder / "step-0000000030").mkdir()
    (folder / "step-0000000030" / "rank0").write_bytes(b"x")
    return folder


@pytest.fixture
def where(folder: Path) -> str:
    return str(folder.parent)


def rows(text: str) -> dict[int, str]:
    """States by step."""
    lines = text.splitlines()
    header = lines[0]
    at = {name: header.index(name) for name in ("step", "time", "state", "ended")}
    table = lines[2 : lines.index("")] if "" in lines else lines[2:]
    return {
        int(line[at["step"] : at["time"]]): line[at["state"] : at["ended"]].strip()
        for line in table
        if line[at["step"] : at["time"]].strip().isdigit()
    }


def test_list_and_what_a_restart_takes(where: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoints", where]) == 0
    out = capsys.readouterr().out
    assert rows(out) == {10: "valid", 20: "valid", 30: "incomplete"}
    assert [line.split()[1:3] for line in out.splitlines() if line.startswith("*")] == [[RUN, "20"]]
    assert out.splitlines()[-1] == "the next start of 'train.py --lr 0.1' continues from step 20"
    assert "it was never completed" in out


def test_damage_is_found(folder: Path, where: str, capsys: pytest.CaptureFixture[str]) -> None:
    os.truncate(folder / "step-0000000020" / "rank1", 7)
    assert main(["checkpoints", where]) == 0
    out = capsys.readouterr().out
    assert rows(out) == {10: "valid", 20: "damaged", 30: "incomplete"}
    assert "part 'rank1'" in out and "continues from step 10" in out
    assert main(["checkpoints", where, "--fast"]) == 0
    out = capsys.readouterr().out
    assert rows(out)[20] == "unchecked" and "from step 20 (if its parts are whole" in out


def test_json(where: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoints", f"file://{where}", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["pick"] == 20 and [one["continues"] for one in found["next"]] == [True]
    assert [one["state"] for one in found["found"]] == ["valid", "valid", "incomplete"]
    assert found["found"][1]["meta"]["world_size"] == 2 and sorted(found["found"][1]["parts"]) == ["rank0", "rank1"]


def test_another_number_of_workers(where: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoints", where, "--world-size", "3"]) == 1
    assert "starts from scratch" in capsys.readouterr().out


def test_each_command_has_a_line(
    folder: Path, where: str, tmp_path: Path, mine: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    """One has ended; one was started without --resume; and one that is asked for has nothing here."""
    spool, other = Spool(tmp_path / "other"), Command.of(str(tmp_path / "train.py"), ["--lr", "0.2"], "script")
    run = "20260102T000000-00000b"
    meta = {"run": run, "command": other.key, "words": other.words, "continues": False}
    snapshot(spool, 20, folder_of(where, other, run), **meta)
    assert run_writer(spool) == (0, [])
    mark_ended(str(folder), 20)
    assert main(["checkpoints", where]) == 0
    first, second = capsys.readouterr().out.splitlines()[-2:]
    assert first == "the next start of 'train.py --lr 0.1' starts from scratch: its last run has ended"
    assert second.startswith(
        "the next start of 'train.py --lr 0.2' starts from scratch: it was started without --resume"
    )
    assert main(["checkpoints", where, "--for", str(tmp_path / "train.py"), "--lr", "0.1"]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == first
    assert main(["checkpoints", where, "--for", str(tmp_path / "train.py"), "--lr", "0.3"]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == (
        f"{where} holds step 20 of another command (train.py --lr 0.2); this run starts from scratch; "
        "--resume-from adopts it"
    )


def test_nothing_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoints", str(tmp_path)]) == 1
    assert "nothing in" in capsys.readouterr().out

"""Events, the recoveries grouped from them, and ``swiftctl events``."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from shared_core.cli import swiftctl
from shared_core.events import Event, EventLog, by_run, console, read_events
from shared_core.report.timeline import Recovery, format_recoveries, recoveries

START = 1000.0


def at(seconds: float, kind: str, rank: int = -1, generation: int = 0, **fields: object) -> Event:
    return Event(kind, START + seconds, rank, generation, dict(fields))


def one_failure(generation: int = 1, when: float = 5.0) -> list[Event]:
    """Rank 2 of three fails and is replaced."""
    g = generation
    return [
        at(when, "failed", 2, g, cause="killed by SIGKILL", detected=START + when - 0.002),
        at(when + 0.001, "generation", generation=g, failed=[2]),
        at(when + 0.003, "replacement_start", 2, g),
        at(when + 0.010, "survivor_ready", 0, g, detected=START + when, ready_s=0.011),
        at(when + 0.012, "survivor_ready", 1, g, detected=START + when, ready_s=0.014),
        at(
            when + 0.300,
            "recovered",
            0,
            g,
            stall_s=0.302,
            recomputed_steps=0,
            resolution="replica",
            bytes_moved=500_000,
        ),
        at(
            when + 0.310,
            "replacement_ready",
            2,
            g,
            joined_s=0.1,
            bytes_moved=2_000_000,
            served_operations=4,
            boundary=17,
        ),
        at(when + 0.310, "recovered", 1, g, stall_s=0.304, recomputed_steps=0, resolution="replica", bytes_moved=0),
        at(when + 0.41, "resumed", 0, g, stall_s=0.42),
        at(when + 0.41, "resumed", 1, g, stall_s=0.43),
    ]


def test_an_unknown_kind_is_refused(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    with pytest.raises(ValueError, match="unknown event kind 'explosion'; one of start, began, failed"):
        log.emit("explosion")
    assert not (tmp_path / "events.jsonl").exists()


def test_lines_of_several_processes_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    code = (
        "import sys; from shared_core.events import EventLog\n"
        "log = EventLog(sys.argv[1])\n"
        "for i in range(200): log.emit('log_memory', rank=int(sys.argv[2]), nth=i, pad='x' * 500)\n"
    )
    writers = [subprocess.Popen([sys.executable, "-c", code, str(path), str(rank)]) for rank in range(3)]
    assert [writer.wait() for writer in writers] == [0, 0, 0]
    found = list(read_events(path))
    for rank in range(3):
        assert [event.fields["nth"] for event in found if event.rank == rank] == list(range(200))


def test_a_failure_during_a_recovery_supersedes_it() -> None:
    events = [
        at(0, "start"),
        at(5.0, "failed", 2, 1, cause="killed by SIGKILL", detected=START + 5.0),
        at(5.0, "generation", generation=1, failed=[2]),
        at(5.01, "survivor_ready", 0, 1, ready_s=0.01),
        at(5.2, "failed", 1, 2, cause="exit code 17", detected=START + 5.2),
        at(5.2, "generation", generation=2, failed=[1]),
        at(5.9, "recovered", 2, 2, stall_s=0.9),
        at(5.9, "recovered", 1, 2, stall_s=0.7, recomputed_steps=0),
        at(5.9, "resumed", 0, 2, stall_s=0.9),
    ]
    first, second = recoveries(events)
    assert first.superseded_by == 2 and not first.complete and first.longest_stall_s is None
    assert second.failed == [1] and second.superseded_by is None and second.longest_stall_s == 0.9
    assert "see 2" in format_recoveries([first, second], START)


def test_the_table() -> None:
    table = format_recoveries(recoveries(one_failure()), START).splitlines()
    assert table[0].split()[:3] == ["generation", "failed", "cause"]
    for cell in ("killed by SIGKILL", "+5.00 s", "14 ms", "312 ms", "430 ms", "2.5 MB", "0 steps"):
        assert cell in table[2]
    long = [at(1, "failed", 0, 1, cause="x" * 200), at(1, "generation", generation=1, failed=[0])]
    assert "xxx..." in format_recoveries(recoveries(long), START)
    assert format_recoveries([], START) == "no worker failed"
    assert "-" in format_recoveries([Recovery(1)], 0.0)


def write(path: Path, events: list[Event]) -> Path:
    path.write_text("".join(event.to_json() + "\n" for event in events))
    return path


def test_swiftctl_events(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "events.jsonl", [at(0, "start"), *one_failure(), at(9, "end", result="failed", reason="x")])
    assert swiftctl.main(["events", str(path)]) == 0
    first = capsys.readouterr().out
    assert first.splitlines()[0].startswith("generation  failed") and "killed by SIGKILL" in first.splitlines()[2]
    assert (
        first.endswith("\n\nthe job failed after 9.00 s: x; --all prints all 12 events\n")
        and "survivor_ready" not in first
    )
    assert swiftctl.main(["events", "--all", str(path)]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[:3] == first.splitlines()[:3], "the table comes first"
    assert "rank 2   failed            killed by SIGKILL" in out
    assert "replica, stalled 302 ms, 500.0 kB moved, 0 steps recomputed" in out
    assert "from step boundary 17, 2.0 MB moved, 4 operations served\n" in out
    assert "survivors ready" in out and "\x1b[" not in out


def test_what_a_worker_says_does_not_control_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The text of an exception is the worker's; here it would clear the screen and set the title."""
    cause = "ValueError: \x1b[2J\x1b]0;title\x07 \x9b31m ü\r"
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    log.emit("failed", rank=1, cause=cause)
    log.emit("generation", generation=1)
    assert swiftctl.main(["events", "--all", str(path)]) == 0
    console(f"rank 1 fails ({cause}): a replacement takes its place")
    shown = capsys.readouterr()
    for text in (shown.out, shown.err):
        assert "\\x1b[2J\\x1b]0;title\\x07 \\x9b31m ü\\r" in text
        assert all(c.isprintable() or c == "\n" for c in text)


def test_two_jobs_in_one_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each has a rank 2 that fails in generation 1, and they write in turns."""
    path = tmp_path / "events.jsonl"

    def job(when: float, run: str) -> list[Event]:
        events = [at(when, "start"), *one_failure(when=when + 5), at(when + 9, "end")]
        return [replace(event, run=run) for event in events]

    old, first, later = job(-600, ""), job(0, "abcabcabcabc"), job(60, "beefbeefbeef")
    write(path, [*old, *(event for pair in zip(first, later, strict=True) for event in pair)])
    assert list(by_run(read_events(path))) == ["", "abcabcabcabc", "beefbeefbeef"]

    def shown(*options: str) -> list[str]:
        assert swiftctl.main(["events", "--all", str(path), *options]) == 0
        return capsys.readouterr().out.splitlines()

    lines = shown()
    assert len(lines) == len(later) + 6 and lines[2].count("430 ms") == 1 and "312 ms" in lines[2]
    assert lines[-1].startswith("run beefbeefbeef; the file holds 2 other runs: abcabcabcabc (")
    assert ", none (" in lines[-1]
    assert shown("--run", "abc")[:-1] == lines[:-1], "the same, a minute before"
    assert shown("--run", "none")[-1].startswith("run none; the file holds 2 other runs: beefbeefbeef (")
    for wanted, said in (("xyz", "--run xyz is none of the file's runs"), ("", "--run  is several")):
        assert swiftctl.main(["events", str(path), "--run", wanted]) == 2
        assert said in capsys.readouterr().err


def test_torn_lines_leave_the_rest_readable(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "events.jsonl"
    lines = [event.to_json() + "\n" for event in one_failure()]
    lines[0] = lines[0][:30] + lines[0]  # a writer was killed, and another continued in its line
    lines[3] = "\x00\x00\xff[1]\n"
    path.write_bytes("".join(lines).encode("latin-1") + b'{"kind":"resumed","ti')
    torn: list[str] = []
    assert [event.kind for event in read_events(path, torn)] == [
        event.kind for n, event in enumerate(one_failure()) if n != 3
    ]
    assert len(torn) == 3
    assert swiftctl.main(["events", str(path)]) == 0
    said = capsys.readouterr()
    assert f"3 lines of {path} cannot be read in full" in said.err and "430 ms" in said.out


@pytest.mark.parametrize("content", [None, "not json\n", "[1]\n", '{"time": 3}\n'])
def test_swiftctl_says_what_is_wrong_with_a_file(
    content: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "events.jsonl"
    if content is not None:
        path.write_text(content)
    assert swiftctl.main(["events", str(path)]) == 1
    err = capsys.readouterr().err
    assert f"cannot read {path}" in err and "events.jsonl of a job" in err


@pytest.mark.parametrize("words", [["events"], ["report", "--trace=trace.json"]], ids=lambda words: words[0])
def test_swiftctl_needs_no_more_than_python(words: list[str], tmp_path: Path) -> None:
    """It reads the events of a job on a machine where torch is not installed."""
    path = write(tmp_path / "events.jsonl", one_failure())
    (tmp_path / "torch.py").write_text("raise ImportError('torch is not here')")
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path(__file__).parent.parent)])}
    command = [sys.executable, "-m", "shared_core.cli.swiftctl", *words, str(path)]
    result = subprocess.run(command, env=env, capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "killed by SIGKILL" in result.stdout + "".join(page.read_text() for page in tmp_path.glob("*.html"))

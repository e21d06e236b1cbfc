"""Events, the recoveries grouped from them, and ``swiftctl events``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from shared_core.cli import swiftctl
from shared_core.events import Event, EventLog, by_run, console, read_events
from shared_core.report.timeline import Recovery, format_recoveries, format_timeline, recoveries

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


def test_an_event_survives_its_file(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    first = log.emit("failed", rank=3, generation=2, cause="killed by SIGKILL", detected=1.5)
    second = log.emit("end")
    assert list(read_events(tmp_path / "events.jsonl")) == [first, second]
    assert first.fields == {"cause": "killed by SIGKILL", "detected": 1.5}
    assert (second.rank, second.generation, second.fields) == (-1, 0, {})


def test_an_unknown_kind_is_refused(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    with pytest.raises(ValueError, match="unknown event kind 'explosion'; one of start, began, failed"):
        log.emit("explosion")
    assert not (tmp_path / "events.jsonl").exists()


def test_without_a_path_nothing_is_written() -> None:
    assert EventLog(None).emit("start").kind == "start"


def test_every_event_of_a_log_has_the_id_of_its_run(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl", "abc")
    assert log.emit("start").run == "abc"
    assert [event.run for event in read_events(tmp_path / "events.jsonl")] == ["abc"]
    (tmp_path / "old.jsonl").write_text('{"kind":"end","time":1.5,"rank":-1,"generation":0,"fields":{}}\n')
    assert list(read_events(tmp_path / "old.jsonl")) == [Event("end", 1.5)]


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


def test_one_recovery() -> None:
    (one,) = recoveries([at(0, "start"), *one_failure(), at(9, "end")])
    assert (one.generation, one.attempt, one.failed) == (1, 0, [2])
    assert one.failures[0].cause == "killed by SIGKILL"
    assert one.detected == pytest.approx(START + 4.998)
    assert one.survivor_ready_s == {0: 0.011, 1: 0.014}
    assert one.slowest_survivor_ready_s == 0.014
    assert one.replacement_start_s[2] == pytest.approx(0.005)
    assert one.replacement_ready_s == {2: pytest.approx(0.312)}
    assert one.user_start_s == {2: pytest.approx(0.207)}
    assert one.stall_s == {0: 0.42, 1: 0.43}
    assert one.longest_stall_s == 0.43
    assert (one.bytes_moved, one.served_operations, one.recomputed_steps, one.boundary) == (2_500_000, 4, 0, 17)
    assert one.resolution == "replica"
    assert one.complete and one.superseded_by is None


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


def test_several_failures_in_one_generation_and_repeated_ranks() -> None:
    events = [
        at(1.0, "failed", 1, 0, cause="killed by SIGKILL"),
        at(1.0, "failed", 3, 0, cause="killed by SIGSEGV"),
        at(1.0, "generation", generation=1, failed=[1, 3]),
        at(1.5, "recovered", 1, 1, stall_s=0.5),
        at(2.0, "failed", 1, 1, cause="exit code 1"),
        at(2.0, "generation", generation=2, failed=[1]),
    ]
    first, second = recoveries(events)
    assert first.failed == [1, 3]
    assert [failure.cause for failure in first.failures] == ["killed by SIGKILL", "killed by SIGSEGV"]
    assert [failure.cause for failure in second.failures] == ["exit code 1"]
    assert second.superseded_by is None and not second.complete  # the job ended before anybody continued


def test_generations_of_a_restarted_job_are_kept_apart() -> None:
    restart = at(8, "restart", generation=1, reason="nobody can serve rank 2")
    found = recoveries([*one_failure(1), restart, at(8.9, "resumed", 0, stall_s=0.9), *one_failure(1, when=9.0)])
    assert [(one.attempt, one.generation, one.answer) for one in found] == [
        (0, 1, "replace"),
        (0, 1, "restart"),
        (1, 1, "replace"),
    ]
    assert [one.longest_stall_s for one in found] == [0.43, 0.9, 0.43]


def test_a_restart_answers_the_failures_that_nothing_else_has_answered() -> None:
    failed = [at(5, "failed", rank, cause="killed by SIGKILL", detected=START + 4.9) for rank in (0, 1)]
    after = [at(5, "restart"), at(8, "start"), at(8.3, "resumed", 0, stall_s=3.4, recomputed_steps=7)]
    (one,) = recoveries([*failed, *after])
    assert (one.failed, one.answer, one.detected) == ([0, 1], "restart", START + 4.9)
    assert one.longest_stall_s == 3.4 and one.recomputed_steps == 7
    (torn,) = recoveries([*failed, at(5, "generation", generation=1, failed=[0, 1]), at(6, "restart", generation=1)])
    assert (torn.failed, torn.answer, torn.complete) == ([0, 1], "restart", False)


def test_generations_before_and_after_a_resize_are_kept_apart() -> None:
    resize = at(5.01, "resize", generation=1, workers=2, before=3, boundary=17, stay=[0, 1])
    cut = [
        at(5.0, "failed", 2, 1, cause="killed by SIGKILL", detected=START + 5.0),
        at(5.0, "generation", generation=1, failed=[2], stay=[0, 1]),
    ]
    found = recoveries([*cut, resize, at(5.3, "start"), *one_failure(1, when=9.0)])
    assert [(one.attempt, one.generation, one.failed) for one in found] == [(0, 1, [2]), (1, 1, [2])]
    # Nobody continues in the generation in which the workers hand over, and the next attempt does not take it over.
    assert not found[0].complete and found[0].superseded_by is None and found[0].survivor_ready_s == {}
    assert found[1].longest_stall_s == 0.43
    # The first of the new workers says when it trains.
    resumed = at(5.4, "resumed", 0, stall_s=0.4, recomputed_steps=1)
    shrunk, _ = recoveries([*cut, resize, resumed, *one_failure(1, when=9.0)])
    assert shrunk.answer == "3 to 2" and shrunk.longest_stall_s == 0.4 and shrunk.recomputed_steps == 1
    assert "400 ms" in format_recoveries([shrunk], START)
    assert "workers 2, before 3, boundary 17" in format_timeline([resize])
    assert "\x1b[33mresize" in format_timeline([resize], color=True)


def test_growing_has_a_row_of_its_own() -> None:
    grows = at(1, "generation", generation=1, failed=[], stay=[0, 1])
    assert recoveries([grows]) == []  # it was not carried out
    resize = at(1.1, "resize", generation=1, workers=3, before=2, boundary=20, stay=[0, 1])
    (one,) = recoveries([grows, resize, at(1.6, "start"), at(1.7, "resumed", 0, stall_s=0.6)])
    assert (one.failed, one.answer, one.longest_stall_s) == ([], "2 to 3", pytest.approx(0.6))
    assert "2 to 3" in format_recoveries([one], START)
    assert "ranks 0, 1 hand on to another number of workers" in format_timeline([grows])


def test_what_nobody_said_is_left_out() -> None:
    (one,) = recoveries([at(3, "generation", generation=4, failed=[0])])
    assert one.failed == [0] and one.failures[0].cause == "" and one.detected == START + 3
    (unannounced,) = recoveries([at(3, "survivor_ready", 1, 2, ready_s=0.01)])
    assert unannounced.failed == []
    assert recoveries([]) == [] and recoveries([at(0, "start"), at(1, "resumed", 0, 0)]) == []


def test_a_recovery_as_plain_data() -> None:
    (one,) = recoveries(one_failure())
    plain = json.loads(json.dumps(one.to_dict()))
    assert plain["stall_s"] == {"0": 0.42, "1": 0.43}
    assert plain["failures"][0]["rank"] == 2


def test_the_table() -> None:
    table = format_recoveries(recoveries(one_failure()), START).splitlines()
    assert table[0].split()[:3] == ["generation", "failed", "cause"]
    for cell in ("killed by SIGKILL", "+5.00 s", "14 ms", "312 ms", "430 ms", "2.5 MB", "0 steps"):
        assert cell in table[2]
    long = [at(1, "failed", 0, 1, cause="x" * 200), at(1, "generation", generation=1, failed=[0])]
    assert "xxx..." in format_recoveries(recoveries(long), START)
    assert format_recoveries([], START) == "no worker failed"
    assert "-" in format_recoveries([Recovery(1)], 0.0)


def test_every_kind_has_a_readable_line() -> None:
    from shared_core.events import KINDS

    lines = format_timeline([at(i, kind, i, 1, bytes=1500, wait_s=0.5) for i, kind in enumerate(KINDS)]).splitlines()
    assert len(lines) == len(KINDS)
    assert all(kind in line for kind, line in zip(KINDS, lines, strict=True))
    assert "bytes 1.5 kB" in lines[0] and "wait_s 500 ms" in lines[0]
    assert "\x1b[31m" in format_timeline([at(0, "failed", 1)], color=True)
    assert format_timeline([]) == "no events"


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


def test_swiftctl_events_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "events.jsonl", one_failure())
    assert swiftctl.main(["events", "--json", str(path)]) == 0
    (one,) = json.loads(capsys.readouterr().out)
    assert one["generation"] == 1 and one["bytes_moved"] == 2_500_000


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

"""``swiftctl report``: a job's history, its page and its trace.

After a change of the history that is meant: ``SWIFT_TESTS_GOLDEN=write pytest tests/test_report.py``.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import html_tree
import pytest
from harness import Jobs, few
from html_tree import Node

from shared_core.cli import swiftctl
from shared_core.events import Event, read_events
from shared_core.faults import Fault
from shared_core.report.history import Doing, History, LifeSpan, PartKind, history_of
from shared_core.report.page import to_page
from shared_core.report.saved import savings

GOLDEN = Path(__file__).parent / "golden"
START = 1000.0


def at(seconds: float, kind: str, rank: int = -1, generation: int = 0, **fields: object) -> Event:
    return Event(kind, START + seconds, rank, generation, dict(fields), "abc")


def start(seconds: float = 0.0, workers: int = 3, restart: int = 0, **fields: object) -> Event:
    return at(seconds, "start", world_size=workers, restart=restart, **fields)


def began(seconds: float = 3.0, boundary: int = 0) -> Event:
    return at(seconds, "began", 0, boundary=boundary, whence="step 5" if boundary else "")


def one_failure(when: float, generation: int = 1, cause: str = "killed by SIGKILL", boundaries: int = 4) -> list[Event]:
    """Rank 2 of three fails and is replaced; the others wait for 0.5 s."""
    g, detected = generation, START + when
    survivors = (0, 1)
    return [
        at(when + 0.01, "failed", 2, g, cause=cause, detected=detected, boundaries=boundaries),
        at(when + 0.01, "generation", generation=g, failed=[2]),
        *(at(when + 0.02, "survivor_ready", rank, g, detected=detected, ready_s=0.02) for rank in survivors),
        at(when + 0.03, "replacement_start", 2, g, how="standby"),
        *(at(when + 0.4, "recovered", rank, g, stall_s=0.4, exchange_s=0.1, bytes_moved=9) for rank in survivors),
        at(when + 0.41, "replacement_ready", 2, g, joined_s=0.21, boundary=boundaries),
        *(at(when + 0.5, "resumed", rank, g, stall_s=0.5) for rank in survivors),
    ]


def told(spans: tuple[LifeSpan, ...], rank: int) -> list[tuple[str, float, float]]:
    return [(span.doing.value, round(span.begin, 6), round(span.end, 6)) for span in spans if span.rank == rank]


def test_the_history_of_a_recorded_job() -> None:
    """With a torn line and one of something else in it."""
    torn: list[str] = []
    plain = asdict(history_of(list(read_events(GOLDEN / "recorded.jsonl", torn))))
    assert len(torn) == 2

    def rounded(value: Any) -> Any:
        if isinstance(value, dict):
            return {str(key): rounded(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [rounded(each) for each in value]
        if isinstance(value, Doing | PartKind):
            return value.value
        return round(value, 4) if isinstance(value, float) else value

    text = json.dumps(rounded(plain), indent=1) + "\n"
    if os.environ.get("SWIFT_TESTS_GOLDEN") == "write":
        (GOLDEN / "history.json").write_text(text)
    assert text == (GOLDEN / "history.json").read_text()


def test_a_job_that_continues_without_the_failed_worker() -> None:
    """``reroute``: the survivor's first lines come before the failure is told, and still count generation 0."""
    events = [
        start(workers=2),
        began(),
        at(5.02, "survivor_ready", 0, 1, detected=START + 5, ready_s=0.02),
        at(5.05, "resumed", 0, 0, stall_s=0.05),
        at(5.06, "failed", 1, 1, cause="killed by SIGKILL", detected=START + 5, boundaries=3),
        at(5.06, "generation", generation=1, failed=[1], absent=[1]),
        at(5.1, "replacement_start", 1, 1),
        at(6.0, "admitted", 1, 1, boundary=9, stall_s=0.2),
        at(6.01, "replacement_ready", 1, 1, boundary=9),
        at(8, "end", result="succeeded"),
    ]
    found = history_of(events)
    waits = [("waiting", 5.0, 5.05), ("training", 5.05, 5.8), ("waiting", 5.8, 6.0), ("training", 6.0, 8.0)]
    assert told(found.spans, 0)[1:] == [("training", 3.0, 5.0), *waits]
    assert told(found.spans, 1)[2:] == [("failed", 5.0, 5.1), ("starting", 5.1, 6.0), ("training", 6.0, 8.0)]
    (answer,) = found.answers
    assert [part.kind for part in answer.parts] == [PartKind.AGREEMENT, PartKind.BATCH, PartKind.ADMITTING]
    assert answer.recovery.longest_stall_s == 0.05
    (saving,) = savings(found).each
    assert saving.took_s == pytest.approx(0.25)


def test_restarts_and_other_numbers_of_workers() -> None:
    events = [
        start(workers=2),
        began(),
        at(5, "failed", 1, cause="exit code 1", detected=START + 5, boundaries=4),
        at(5.1, "restart", reason="on_failure is restart"),
        start(5.4, workers=2, restart=1),
        began(5.8, boundary=2),
        at(6, "resumed", 0, stall_s=1.0, recomputed_steps=2, boundary=2),
        at(8, "resize", workers=1, before=2, boundary=9, stay=[0]),
        start(8.2, workers=1, restart=2),
        at(8.5, "resumed", 0, stall_s=0.5, boundary=9),
        at(10, "end", result="succeeded"),
    ]
    found = history_of(events)
    begins = [("starting", 0.0, 3.0), ("training", 3.0, 5.0)]
    again = [("starting", 5.1, 5.8), ("catching up", 5.8, 6.0), ("training", 6.0, 8.0)]
    ends = [("starting", 8.0, 8.5), ("training", 8.5, 10.0)]
    assert told(found.spans, 0) == [begins[0], ("training", 3.0, 5.1), *again, *ends]
    assert told(found.spans, 1) == [*begins, ("failed", 5.0, 5.1), *again]
    assert [(mark.at, mark.what) for mark in found.turns] == [
        (pytest.approx(5.1), "all workers start again: on_failure is restart"),
        (8.0, "2 to 1 workers"),
    ]
    assert [number for _, number in found.workers] == [2, 1]
    restart, resize = found.answers
    assert [part.kind for part in restart.parts] == [
        PartKind.END,
        PartKind.PROCESS,
        PartKind.SCRIPT,
        PartKind.BATCH,
    ]
    assert (restart.parts[-1].end, resize.recovery.answer) == (1.0, "2 to 1")


def test_what_was_saved() -> None:
    """A step takes a second; a restart begins at the checkpoint, and takes as long as the first start."""
    before = [start(), began(), at(13, "checkpoint", 0, boundary=8, version=8)]
    found = history_of([*before, *one_failure(22, boundaries=20), at(30, "end", result="succeeded")])
    assert (found.step_s, found.measured_steps) == (1.0, 19)
    result = savings(found)
    (one,) = result.each
    assert (one.failed, one.took_s, one.steps, one.restart_s) == ((2,), 0.5, 12, 15.0)
    assert one.saved_s == result.saved_s == 14.5
    assert "3.00 s" in result.assumptions[2] and "19 steps" in result.assumptions[3]
    assert "name no checkpoint" not in result.assumptions[0]
    # Against no checkpoints at all nothing is compared; the reader may set an interval.
    bare = history_of([start(), began(), *one_failure(22, boundaries=20), at(30, "end", result="succeeded")])
    (one,) = savings(bare).each
    assert one.steps is None and savings(bare).saved_s is None
    assert "--checkpoint-every STEPS sets an interval" in savings(bare).assumptions[0]
    cards = next(html_tree.read(to_page(bare)).all("dl", "cards"))
    assert "saved, estimated" not in [node.text for node in cards.all("dt")]
    (one,) = savings(bare, every=8).each
    assert (one.steps, one.restart_s) == (4, 7.0) and "every 8 steps" in savings(bare, every=8).assumptions[0]
    # What the events do not say is not guessed.
    unknown = savings(history_of([start(), at(1, "checkpoint", 0, boundary=0), *one_failure(23, boundaries=20)]))
    assert unknown.each[0].steps == 20 and unknown.saved_s is None


HOSTILE = "</style></title><script>alert(1)</script><img src=x onerror=alert(2)>\"' onload='x' &lt; \x1b[2J \ud800 \x00"


def test_what_events_say_is_text_on_the_page(tmp_path: Path) -> None:
    events = [
        start(script=HOSTILE, host=HOSTILE),
        *one_failure(10, cause=HOSTILE),
        at(15, "warning", message=HOSTILE),
        at(16, "restart", reason=HOSTILE),
        at(20, "end", result=HOSTILE),
    ]
    path = tmp_path / "events.jsonl"
    path.write_text("".join(event.to_json() + "\n" for event in events))
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 4, HOSTILE[:40]: 1.0}) + "\n")
    files = [str(tmp_path / name) for name in ("report.html", "metrics.jsonl", "trace.json")]
    options = ["--out", files[0], "--metrics", files[1], "--metric", HOSTILE[:40], "--trace", files[2]]
    assert swiftctl.main(["report", str(path), *options]) == 0
    page = html_tree.read(Path(files[0]).read_text())
    nodes = list(page.all())
    assert not {"script", "img", "iframe", "link", "object"} & {node.tag for node in nodes}
    attributes = {name for node in nodes for name in node.attributes}
    assert not [name for name in attributes if name.startswith("on")] and not attributes & {"href", "src", "style"}
    (facts,) = page.all("dl", "facts")
    shown = "<script>alert(1)</script><img src=x onerror=alert(2)>\"' onload='x' &lt; \\x1b[2J \\ud800 \\x00"
    assert shown in facts.words() and all(ord(c) >= 32 or c in "\n\t" for c in page.words())
    assert json.loads(Path(files[2]).read_text())["otherData"]["result"].endswith("\\x00")


def spans_of(page: Node, rank: int) -> list[str]:
    """What a rank's row of the timeline says, in order of time."""
    timeline = next(svg for svg in page.all("svg") if svg.attributes.get("role") == "img")
    boxes = [(float(box.attributes["x"]), next(box.all("title")).text) for box in timeline.all("rect")]
    return [text.split(": ")[1].split(" (")[0].split(",")[0] for _, text in sorted(boxes) if f"rank {rank}:" in text]


def check_trace(raw: Any, found: History) -> dict[str, list[dict[str, Any]]]:
    """That the fields are those that the format documents; the slices of each named track, in order."""
    assert set(raw) == {"traceEvents", "displayTimeUnit", "otherData"} and raw["displayTimeUnit"] in ("ms", "ns")
    tracks: dict[str, list[dict[str, Any]]] = defaultdict(list)
    names = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in raw["traceEvents"]
        if event["ph"] == "M" and event["name"] == "thread_name"
    }
    for event in raw["traceEvents"]:
        common = {"name", "ph", "pid", "tid", "args"}
        assert set(event) - common == {"X": {"cat", "ts", "dur"}, "i": {"cat", "ts", "s"}, "M": set()}[event["ph"]]
        assert type(event["pid"]) is type(event["tid"]) is int
        if event["ph"] == "X":
            assert type(event["ts"]) is type(event["dur"]) is int and event["dur"] >= 0
            tracks[names[event["pid"], event["tid"]]].append(event)
        elif event["ph"] == "i":
            assert event["s"] in ("g", "p", "t") and event["ts"] >= 0
        else:
            assert event["name"] in ("process_name", "thread_name", "thread_sort_index")
    for slices in tracks.values():
        assert all(one["ts"] + one["dur"] <= later["ts"] for one, later in pairwise(slices)), "they do not overlap"
    assert {f"rank {rank}" for rank in found.ranks} <= set(tracks)
    return tracks


CASES = {
    "a SIGKILL": {"nproc": 3, "faults": [Fault(1, 4, "bucket", "SIGKILL")]},
    "a restart": {
        "faults": [Fault(1, 7, "bucket", "SIGKILL")],
        "launcher_args": ["--on-failure=restart", "--checkpoint-dir=checkpoints"],
        "env": {"SWIFT_RECOVERY_CHECKPOINT_EVERY_STEPS": "4"},
    },
}


@pytest.mark.parametrize("case", few(CASES, "a SIGKILL"))
def test_report_and_trace_of_a_job(jobs: Jobs, case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = jobs.run("plain_ddp.py", **CASES[case])  # type: ignore[arg-type]
    assert result.status == 0, result.tail()
    metrics = tmp_path / "metrics.csv"
    metrics.write_text("epoch,step,train_loss\n" + "".join(f"0,{step},{9 - step}\n" for step in range(10)))
    page_file, trace_file = tmp_path / "report.html", tmp_path / "trace.json"
    options = ["--out", str(page_file), "--trace", str(trace_file), "--metrics", str(metrics)]
    assert swiftctl.main(["report", str(result.out / "events.jsonl"), *options]) == 0
    other = tmp_path / "log.txt"
    other.write_text("no steps\n")
    bare = ["--out", str(tmp_path / "other.html"), "--metrics", str(other)]
    assert swiftctl.main(["report", str(result.out / "events.jsonl"), *bare]) == 0
    assert not list(html_tree.read((tmp_path / "other.html").read_text()).all("polyline", "curve"))
    assert "no column of steps" in capsys.readouterr().err
    found = history_of(result.events)
    page = html_tree.read(page_file.read_text())
    assert [node.text for node in page.all("span", "result")] == ["succeeded"]
    assert next(page.all("h1")).text == "plain_ddp.py"
    titles = [node.text for node in page.all("h2")]
    (row,) = next(page.all("table")).rows()
    assert row["who"] == "rank 1" and row["cause"] == "killed by SIGKILL"
    crosses = list(page.all("path", "cross"))
    assert len(crosses) == 2, "one in the timeline, one at the curve"
    assert len(list(page.all("polyline", "curve"))) == 1
    terms = next(page.all("dl", "facts"))
    facts = dict(zip((node.text for node in terms.all("dt")), (node.text for node in terms.all("dd")), strict=True))
    assert {"script", "host", "cpus", "python", "torch"} <= set(facts)
    tracks = check_trace(json.loads(trace_file.read_text()), found)
    doing = [each["name"] for each in tracks["rank 1"]]
    assert doing == spans_of(page, 1)
    waits = found.answers[0].parts
    assert sum(part.seconds for part in waits if part.begin >= 0) == pytest.approx(
        found.answers[0].recovery.longest_stall_s, abs=1e-5
    )
    assert [each["name"] for each in tracks["parts 1"]] == [part.kind.value for part in waits]
    if case == "a SIGKILL":
        assert doing == ["starting", "training", "failed", "starting", "catching up", "training"]
        assert [each["name"] for each in tracks["rank 0"]][-4:] == ["training", "waiting", "catching up", "training"]
        assert PartKind.STATE in [part.kind for part in waits] and row["answer"] == "replace"
        assert "Against a restart" in titles
    else:
        assert doing == ["starting", "training", "failed", "starting", "catching up", "training"]
        assert [node.text for node in page.all("text", "label")].count("restart") == 1
        assert len(list(page.all("path", "turn"))) == 1 and row["answer"] == "restart"
        assert "Against a restart" not in titles

"""The view of a job, from its events and from what one look at the machine finds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shared_core.events import Event, EventLog
from shared_core.protocol.progress_file import Pace, ProgressFile, read_pace
from shared_core.system.jobdir import Card, JobDir, is_held, jobs_here
from shared_core.watch.follower import Follower
from shared_core.watch.view import JobView, Live, view_of

BEGUN = 1000.0
CARD = Card("aaaa", "mine", "/home/me/train.py", "node1", 10, BEGUN, "events.jsonl")
START = {"agent": 10, "host": "node1", "world_size": 3, "pids": {"0": 100, "1": 101, "2": 102}}


def at(after: float, kind: str, rank: int = -1, generation: int = 0, **fields: Any) -> Event:
    return Event(kind, BEGUN + after, rank, generation, fields, "aaaa")


#: Rank 1 of three fails, and is replaced.
FAILURE = [
    at(0.0, "start", **START),
    at(3.0, "checkpoint", 0, boundary=40, version=40, seconds=0.2, bytes=1000),
    at(5.0, "failed", 1, cause="killed by SIGKILL", detected=BEGUN + 5.0, pid=101),
    at(5.0, "generation", generation=1, failed=[1]),
    at(5.1, "replacement_start", 1, 1, pid=201, agent=10, host="node1"),
    at(5.4, "recovered", 0, 1, stall_s=0.4),
    at(5.4, "recovered", 2, 1, stall_s=0.4),
    at(5.5, "replacement_ready", 1, 1),
    at(5.6, "resumed", 0, 1, stall_s=0.6),
    at(5.6, "resumed", 2, 1, stall_s=0.5),
]


def live(seconds: float, *, alive: bool = True, boundaries: int = 50, **states: str | None) -> Live:
    """All processes run, but those that are named (``p101="T"``); all workers have passed so many step boundaries."""
    now = BEGUN + seconds
    paces = (
        {rank: Pace(boundaries, False, now, boundaries - 20, now - 2.0, now, 500) for rank in range(3)}
        if boundaries
        else {}
    )
    seen = dict.fromkeys((100, 101, 102, 201), "S") | {int(name[1:]): state for name, state in states.items()}
    return Live(now, alive, CARD, paces, seen)


def phases(view: JobView) -> list[str]:
    return [one.phase for one in view.workers]


@pytest.mark.parametrize(
    "many, now, state, expected",
    [
        (1, 0.1, "starting", "starting starting starting"),
        (2, 4.0, "running", "training training training"),
        (4, 5.0, "recovering", "stalled failed stalled"),
        (5, 5.2, "recovering", "stalled joining stalled"),
        (7, 5.4, "running", "training joining training"),
        (10, 9.0, "running", "training training training"),
    ],
)
def test_a_failure_step_by_step(many: int, now: float, state: str, expected: str) -> None:
    view = view_of(FAILURE[:many], live(now, boundaries=0 if many == 1 else 50))
    assert (view.state, phases(view)) == (state, expected.split())
    assert view.present == 3 - expected.count("failed")
    assert view.stalled_s == pytest.approx(now - 5.0 if state == "recovering" else 0.0)


def test_what_only_the_machine_shows() -> None:
    assert phases(view_of(FAILURE[:1], live(4.0, p101="T", p102=None))) == ["training", "stopped", "gone"]
    waits = live(4.0)
    waits = Live(waits.now, True, CARD, {0: Pace(5, True, waits.now - 3.0, 1, BEGUN, BEGUN + 1, 0)}, waits.states)
    assert phases(view_of(FAILURE[:1], waits)) == ["waiting", "starting", "starting"]
    killed = view_of(FAILURE, live(9.0, alive=False, p100=None, p201=None, p102=None))
    assert (killed.state, phases(killed), killed.over) == ("gone", ["gone"] * 3, True)


def test_a_stall_of_those_that_continue_without() -> None:
    """Their survivor groups have no generation."""
    rerouted = [
        *FAILURE[:3],
        at(5.0, "generation", generation=1, failed=[1], absent=[1]),
        *(at(5.05, "survivor_ready", rank, generation=1) for rank in (0, 2)),
        at(5.1, "resumed", 0, stall_s=0.1),
    ]
    view = view_of([*rerouted, at(5.2, "resumed", 2, stall_s=0.2)], live(5.3))
    assert (view.state, phases(view)) == ("running", ["training", "failed", "training"])
    assert (view.recoveries, view.stall_s) == ({"reroute": 1}, 0.2)


def test_the_pace_of_a_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [BEGUN]
    monkeypatch.setattr("time.time", lambda: now[0])
    file = ProgressFile(tmp_path / "progress")
    file.boundary(0)
    before = read_pace(tmp_path / "progress")
    assert before is not None and (before.expected, before.loss) == (0, None)
    file.expect(120)
    file.loss(0.5)
    ProgressFile(tmp_path / "progress")  # of a replacement, which does not know them yet
    for boundary in range(1, 101):
        now[0] += 0.5 if boundary <= 60 else 0.25
        file.boundary(boundary, 7 * boundary)
    pace = read_pace(tmp_path / "progress")
    assert pace is not None and (pace.boundaries, pace.log_bytes) == (100, 700)
    assert (pace.expected, pace.loss) == (120, 0.5)
    assert pace.steps_per_s(now[0]) == pytest.approx(4.0, rel=0.5)  # over 10 to 20 s
    assert pace.steps_per_s(now[0] + 1000.0) < 0.1  # it stands still
    (tmp_path / "short").write_bytes(b"x" * 30)
    assert read_pace(tmp_path / "short") is read_pace(tmp_path / "absent") is None


def test_jobs_that_run_here(tmp_path: Path) -> None:
    job = JobDir(logging=False)
    try:
        assert job.path not in dict(jobs_here())
        events = tmp_path / "events.jsonl"
        EventLog(events, "bbbb").emit("start", pids={"0": 1})  # of another run, before this one
        card = Card("aaaa", "mine", "train.py", "node1", 10, BEGUN, str(events), events.stat().st_size)
        card.write(job.path)
        job.clear()
        assert dict(jobs_here())[job.path] == card and is_held(job.path)
        EventLog(events, "aaaa").emit("start", **START)
        follower = Follower(job.path)
        assert follower.view().run == "aaaa" and follower.view().world_size == 3
        (job.path / "card.json").write_text('{"run": 3}')
        assert job.path not in dict(jobs_here())
    finally:
        job.remove()
    assert follower.view().run == "aaaa" and not is_held(job.path)

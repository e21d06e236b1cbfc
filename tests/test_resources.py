"""What the system refuses: when it is tried again, what is said, and what is written elsewhere."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from shared_core.events import EventLog, read_events
from shared_core.protocol.frontier import StepBoundary
from shared_core.resources import LONGEST_S, Retries


class Clock:
    """A clock that a test moves."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def refusal(number: int) -> OSError:
    return OSError(number, os.strerror(number))


def fill(folder: Path) -> Path:
    """Leave no room in the file system of a folder."""
    filler = folder / "filler"
    with open(filler, "ab", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue
    return filler


def test_one_line_until_it_works_again_and_longer_and_longer_waits() -> None:
    said: list[str] = []
    clock = Clock()
    retries, waits = Retries(said.append, clock), []
    for _ in range(8):
        begin = clock.now
        retries.refused("no process can be started", refusal(errno.EAGAIN))
        while not retries.due:
            clock.now += 0.05
        waits.append(clock.now - begin)
    assert said == [
        "no process can be started (Resource temporarily unavailable): raise the limit of processes and threads "
        "(ulimit -u, in a container --pids-limit); it is tried again"
    ]
    assert waits == sorted(waits) and waits[0] < 0.2 and LONGEST_S <= waits[-1] < LONGEST_S + 0.1
    retries.worked()
    retries.refused("no process can be started", refusal(errno.ENOMEM))
    assert len(said) == 2 and "free memory" in said[1]


def boundary(index: int) -> StepBoundary:
    return StepBoundary(index, index, 0, "batch", {}, {}, {}, {}, [])


def test_events_are_lost_while_the_disk_is_full(small_device: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path, job = small_device / "events.jsonl", small_device / "job"
    job.mkdir()
    logs = [EventLog(path, "run", job) for _ in range(2)]
    logs[0].emit("start")
    filler = fill(small_device)
    for _ in range(40):  # the last page of the file has some room
        for log in logs:
            log.emit("warning", message="x" * 100)
    filler.unlink()
    logs[1].emit("end")
    said = capfd.readouterr().err
    assert said.count("events are lost") == said.count("\n") == 1 and str(path) in said and "make room" in said
    torn: list[str] = []
    kinds = [event.kind for event in read_events(path, torn)]
    assert kinds[0] == "start" and kinds[-1] == "end" and 1 < len(kinds) < 82 and len(torn) <= 1

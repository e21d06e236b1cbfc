"""``log.budget_bytes`` bounds what the logs of all ranks take on disk, as seen by who looks at the folder."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from harness import Jobs
from pipelines import logging, resolutions, run, starts

from shared_core.faults import Fault


class Watched:
    """The size of all logs below a folder, looked at all the time.

    Files are only appended to and deleted, and no name is used again. So what the first of two looks saw of the files
    that the second still finds was all there between the two: no more than what there really was at that moment.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.peak = self.looks = 0
        self.names: set[Path] = set()

    def look(self) -> None:
        first = self._sizes()
        second = self._sizes()
        self.peak = max(self.peak, sum(size for path, size in first.items() if path in second))
        self.names |= set(second)
        self.looks += 1

    def _sizes(self) -> dict[Path, int]:
        found = {}
        for folder, _, names in os.walk(self._folder):  # passes over what is deleted meanwhile
            for name in names:
                if name.endswith(".log"):
                    with suppress(FileNotFoundError):
                        found[Path(folder, name)] = os.stat(f"{folder}/{name}").st_size
        return found


@contextmanager
def watched(folder: Path) -> Iterator[Watched]:
    watch, done = Watched(folder), threading.Event()

    def looks() -> None:
        while not done.wait(0.01):
            watch.look()

    thread = threading.Thread(target=looks)
    thread.start()
    try:
        yield watch
    finally:
        done.set()
        thread.join()


#: A batch logs 2 boundaries x 4 micro-batches x 2 x 64 rows x 32 numbers x 4 bytes = 131 kB, and headers.
BASE = ("--stages", "3", "--steps", "40", "--rows", "64")
BATCH = 131072


@pytest.mark.nightly
def test_logs_never_take_more(jobs: Jobs, tmp_path: Path) -> None:
    """The user's checkpoints are too rare: those that the budget needs are made, and a failure is replayed from one."""
    budget = 20 * BATCH
    options = logging(tmp_path, 1000, **{"log.budget_bytes": budget})
    failed = [Fault(1, 36, "pipe.forward", "SIGKILL", 2)]
    with watched(tmp_path) as watch:
        result = run(jobs, failed, BASE, nproc=3, env=options)
    print(f"peak {watch.peak} of {budget} bytes, {len(watch.names)} files, {watch.looks} looks")
    assert budget // 2 < watch.peak <= budget and len(watch.names) > 20
    assert resolutions(result) == {"replay"} and starts(result)[0][1] >= 20, starts(result)
    assert result.stderr.count("checkpoints are made more often") == 1 and "no longer logged" not in result.stderr


@pytest.mark.nightly
def test_a_budget_that_holds_no_interval(jobs: Jobs, tmp_path: Path) -> None:
    """It is kept all the same: logging stops, which is said with the budget that would do."""
    budget = 4 * BATCH
    options = logging(tmp_path, 20, **{"log.budget_bytes": budget, "log.ring_bytes": BATCH})
    with watched(tmp_path) as watch:
        result = run(jobs, [], BASE, nproc=3, env=options)
    print(f"peak {watch.peak} of {budget} bytes, {len(watch.names)} files, {watch.looks} looks")
    assert budget // 4 < watch.peak <= budget
    assert "log.budget_bytes=524288 is too small" in result.stderr, result.tail()
    assert "messages are no longer logged" in result.stderr and "are used up" in result.stderr, result.tail()


@pytest.mark.nightly
def test_wider_groups_instead_of_checkpoints(jobs: Jobs, tmp_path: Path) -> None:
    """With ``log.groups="plan"`` groups grow until the user's interval of 12 batches fits."""
    budget = 3 * 14 * BATCH // 2
    options = logging(tmp_path, 12, **{"log.budget_bytes": budget, "log.groups": "plan"})
    with watched(tmp_path) as watch:
        result = run(jobs, [], BASE, nproc=3, env=options)
    assert watch.peak <= budget
    assert any(len(group) > 1 for event in result.kinds("groups") for group in event.fields["groups"]), result.tail()

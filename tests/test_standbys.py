"""Standbys that die while they import: killed from outside they are made again, ended by their imports they are not."""

from __future__ import annotations

import os
import selectors
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from harness import until

from shared_core.launcher.standby import Preload, clean_env
from shared_core.launcher.workers import GIVE_UP_AFTER, WorkerPool
from shared_core.system import process


@contextmanager
def worker_pool(folder: Path, module: str, said: list[str]) -> Iterator[WorkerPool]:
    """One that keeps a standby which imports a module with this text."""
    (folder / "imported_by_standbys.py").write_text(module)
    env = clean_env(os.environ) | {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}
    with selectors.DefaultSelector() as selector:
        found = WorkerPool(selector, 1, env, Preload(("imported_by_standbys",)), said.append)
        try:
            yield found
        finally:
            found.close()


def look(found: WorkerPool) -> None:
    found.reap()
    found.look_after_standbys()
    found.started()


def test_killed_ones_are_made_again(tmp_path: Path) -> None:
    held, said, before = tmp_path / "held", list[str](), set(process.children())
    os.mkfifo(held)

    def importing() -> int | None:
        """The end of a pipe that the import of a standby reads from; the import waits until it is closed."""
        look(found)
        try:
            return os.open(held, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:
            return None

    with worker_pool(tmp_path, f"open({str(held)!r}).read()", said) as found:
        found.fill_standbys()
        for _ in range(GIVE_UP_AFTER + 2):
            pipe = until(importing, "a standby that imports")
            [pid] = set(process.children()) - before
            os.kill(pid, signal.SIGKILL)
            os.close(pipe)
            until(lambda pid=pid: look(found) or pid not in process.children(), "its end")  # type: ignore[misc,func-returns-value]
        os.close(until(importing, "one more"))
        until(lambda: look(found) or found.can_start, "a standby that is ready")  # type: ignore[func-returns-value]
    assert len([line for line in said if "a standby died" in line]) == GIVE_UP_AFTER - 1, said
    assert len([line for line in said if "standbys are killed while they import" in line]) == 1, said


@pytest.mark.parametrize("module", ["raise SystemExit(3)"])
def test_those_that_their_imports_end_are_not(module: str, tmp_path: Path) -> None:
    said = list[str]()
    with worker_pool(tmp_path, module, said) as found:
        found.fill_standbys()
        until(lambda: look(found) or found.can_start, "no standby to be wanted")  # type: ignore[func-returns-value]
    assert "standbys die while they import; continuing without them" in said[-1], said

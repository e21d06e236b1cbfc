"""Jobs with checkpoints that are stopped from outside while they train."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import SCRIPTS, Jobs

from shared_core.checkpoint import lineage
from shared_core.checkpoint.spool import FOLDER, Spool
from shared_core.checkpoint.store import Checkpoint
from shared_core.config import variable_of
from shared_core.events import read_events
from shared_core.protocol import progress_file
from shared_core.system import jobdir
from tests.support.report import OUT
from tests.support.runner import JobResult, check_clean, collect

ROOT = Path(__file__).resolve().parents[1]


def options(folder: Path, every: int = 0, **more: Any) -> dict[str, str]:
    """Environment of a job with checkpoints in ``folder``; ``more`` are options by name."""
    named = {"checkpoint.dir": folder, **more} | ({"checkpoint.every_steps": every} if every else {})
    return {variable_of(name): str(value) for name, value in named.items()}


class Running:
    """A job on this machine that continues while the test looks.

    Args:
        jobs: starts it.
        script: in ``tests/scripts``.
        args: of the script.
        env: more environment.
        launcher_args: of ``swiftrun``.
        nproc: workers.
    """

    def __init__(
        self,
        jobs: Jobs,
        script: str,
        args: Sequence[str] = (),
        *,
        env: Mapping[str, str] | None = None,
        launcher_args: Sequence[str] = (),
        nproc: int = 2,
    ) -> None:
        self._warm = jobs.warm
        self.out = jobs.folder(Path(script).stem)
        self._begin = time.monotonic()
        self._ended = False
        full = {name: value for name, value in os.environ.items() if not name.startswith("SWIFT_")}
        full |= {OUT: str(self.out), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **(env or {})}
        self._argv = [f"--nproc-per-node={nproc}", f"--events={self.out / 'events.jsonl'}", *launcher_args]
        self._argv += [str(SCRIPTS / script), *args]
        self._warm.start(
            self._argv,
            env=full,
            cwd=str(self.out),
            stdout=str(self.out / "stdout.txt"),
            stderr=str(self.out / "stderr.txt"),
        )
        self.pid = self._warm.pid

    @property
    def folder(self) -> Path | None:
        """Private folder of the job, once it has begun."""
        path = self.out / "events.jsonl"
        for event in read_events(path) if path.exists() else ():
            if event.kind == "start":
                return Path(event.fields["job_dir"])
        return None

    def workers(self) -> list[dict[str, Any]]:
        """Processes that have run the script."""
        return [json.loads(line) for line in self._said("workers.jsonl").splitlines()]

    @property
    def spool(self) -> Spool | None:
        """What its writer and its workers share."""
        return Spool(self.folder / FOLDER) if self.folder is not None else None

    def boundaries(self, rank: int = 0) -> int:
        """Step boundaries that a rank has passed."""
        folder = self.folder
        progress = progress_file.read_progress(folder / f"rank{rank}" / "progress") if folder is not None else None
        return progress[0] if progress is not None else 0

    def until(self, what: Callable[[], bool], timeout_s: float = 30.0) -> None:
        """Wait for something.

        Raises:
            AssertionError: if it does not come.
        """
        deadline = time.monotonic() + timeout_s
        while not what():
            if time.monotonic() > deadline:
                self.kill()
                raise AssertionError(f"it did not come within {timeout_s} s\n{self._result(124, []).tail()}")
            time.sleep(0.002)

    def kill(self) -> None:
        """SIGKILL to the whole job: agent, workers, standbys and the writer."""
        kill_all(self.pid)

    def end(self, timeout_s: float = 60.0) -> JobResult:
        """Wait for its end."""
        ended = self._warm.wait(timeout_s)
        if ended is None:
            self.kill()
            ended = self._warm.wait(30.0) or (124, [])
            ended = (124, ended[1])
        self._ended = True
        jobdir.sweep(Path("/dev/shm"))
        return self._result(*ended)

    def close(self) -> None:
        """Kill what is left."""
        if not self._ended:
            self.kill()
            self.end()

    def _result(self, status: int, orphans: list[str]) -> JobResult:
        result = JobResult(
            ["swiftrun", *self._argv],
            status,
            self._said("stdout.txt"),
            self._said("stderr.txt"),
            self.out,
            time.monotonic() - self._begin,
            orphans=orphans,
        )
        collect(result)
        return result

    def _said(self, name: str) -> str:
        path = self.out / name
        return path.read_text(errors="replace") if path.exists() else ""


@contextlib.contextmanager
def running(jobs: Jobs, script: str, args: Sequence[str] = (), **more: Any) -> Iterator[Running]:
    """A job that is killed at the end if it still runs."""
    job = Running(jobs, script, args, **more)
    try:
        yield job
    finally:
        job.close()


def finished(job: Running) -> JobResult:
    """Wait for the end of a job that is to end well."""
    result = job.end()
    check_clean(result)
    assert result.status == 0, result.tail()
    return result


def kill_all(pid: int) -> None:
    """SIGKILL to a process and all that come from it, in one go."""
    for each in reversed(descendants(pid)):  # an agent last, or its children would be told
        with contextlib.suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)


def descendants(pid: int) -> list[int]:
    """A process and all that come from it, parents first."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found = [pid]
    for each in found:
        found += children.get(each, [])
    return found


def saved(folder: Path) -> list[Checkpoint]:
    """Committed checkpoints in a folder, the oldest run first."""
    found = lineage.contents(folder).saved
    return sorted(found, key=lambda each: (lineage.age_key(each.run), each.step))


def committed(folder: Path, world_size: int = 2) -> list[int]:
    """Step boundaries of the checkpoints in a folder, oldest first."""
    return [each.step for each in saved(folder) if each.meta["world_size"] == world_size]


def continued_from(result: JobResult) -> set[int]:
    """Step boundaries from which ranks say that they continued."""
    marker = "continues from the checkpoint at step boundary "
    return {int(line.split(marker)[1].split()[0]) for line in result.stderr.splitlines() if marker in line}

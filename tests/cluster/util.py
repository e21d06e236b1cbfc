"""Runs ``swiftrun`` on small scripts and looks at what is left afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from shared_core.events import Event, read_events
from tests.support.warm import WarmLauncher

TAG = "SWIFT_TEST_TAG"
ROOT = Path(__file__).resolve().parents[2]
#: Lists where the processes of the job listen: agent, workers, standby, writer.
LISTENERS = """
import json, os
from pathlib import Path
tag = os.environ["SWIFT_TEST_TAG"].encode()
def listeners():
    tables = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            columns = line.split()
            if columns[3] == "0A":
                tables[columns[9]] = columns[1].partition(":")[0]
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and tag in (entry / "environ").read_bytes():
                own = []
                for fd in os.listdir(entry / "fd"):
                    try:
                        own.append(tables[os.readlink(entry / "fd" / fd)[8:-1]])
                    except (KeyError, FileNotFoundError):
                        pass  # something else, or closed meanwhile
                found.append({"name": (entry / "comm").read_text().strip(), "at": own})
        except OSError:
            continue
    os.write(1, (json.dumps(found) + "\\n").encode())
"""


@dataclass
class Job:
    """A running or finished ``swiftrun``."""

    process: subprocess.Popen[str] | None
    tag: str
    events_file: Path
    stdout: str = ""
    stderr: str = ""
    status: int | None = None

    def finish(self, timeout: float = 60.0) -> Job:
        """Wait for the end; kill everything if it does not come."""
        assert self.process is not None
        try:
            self.stdout, self.stderr = self.process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            for pid in tagged(self.tag):
                os.kill(pid, 9)
            self.stdout, self.stderr = self.process.communicate()
            raise AssertionError(f"no end within {timeout} s\n{self.stdout}\n{self.stderr}") from None
        return self

    @property
    def code(self) -> int:
        """Exit code."""
        return int(self.process.returncode) if self.process is not None else self.status or 0

    @property
    def events(self) -> list[Event]:
        """All events so far."""
        return list(read_events(self.events_file))

    def of(self, kind: str) -> list[Event]:
        """Events of one kind."""
        return [event for event in self.events if event.kind == kind]

    def check_nothing_left(self) -> None:
        """No process of the job lives, its private folder is gone."""
        assert tagged(self.tag) == []
        for event in self.of("start"):
            assert not Path(event.fields["job_dir"]).exists()


def tagged(tag: str) -> list[int]:
    """Processes that inherited the tag of a job."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if tag.encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def start(
    folder: Path,
    script: str,
    *args: str,
    options: Sequence[str] = (),
    env: dict[str, str] | None = None,
    nproc: int = 2,
) -> Job:
    """Write ``script`` to ``folder`` and start it under ``swiftrun``."""
    path = folder / "script.py"
    path.write_text(textwrap.dedent(script))
    return start_command(
        folder,
        [sys.executable, "-m", "shared_core.cli.swiftrun", *_common(folder, nproc), *options, str(path), *args],
        env,
    )


def _common(folder: Path, nproc: int) -> list[str]:
    return ["--nproc-per-node", str(nproc), "--events", str(folder / "events.jsonl")]


def start_command(
    folder: Path, command: Sequence[str], env: dict[str, str] | None = None, stderr: IO[bytes] | int = subprocess.PIPE
) -> Job:
    """Start any command with the tag of a job."""
    environ = _environ(env)
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        env=environ,
        cwd=folder,
        start_new_session=True,
    )
    return Job(process, environ[TAG], folder / "events.jsonl")


def _environ(env: dict[str, str] | None) -> dict[str, str]:
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("SWIFT_", "PET_", "TORCHELASTIC"))
    }
    return kept | {"OMP_NUM_THREADS": "1", TAG: uuid.uuid4().hex, "PYTHONPATH": str(ROOT)} | (env or {})


def run_forked(
    folder: Path,
    script: str,
    *args: str,
    options: Sequence[str] = (),
    env: dict[str, str] | None = None,
    nproc: int = 2,
    timeout: float = 60.0,
) -> Job:
    """As :func:`run`, but launcher and zygotes are forked from a process that has imported everything: seconds less.
    ``/proc`` does not show the job's own environment.
    """
    path, said = folder / "script.py", [folder / name for name in ("stdout", "stderr")]
    path.write_text(textwrap.dedent(script))
    environ = _environ(env)
    with WarmLauncher() as launcher:
        stdout, stderr = map(str, said)
        argv = [*_common(folder, nproc), *options, str(path), *args]
        launcher.start(argv, env=environ, cwd=str(folder), stdout=stdout, stderr=stderr)
        ended = launcher.wait(timeout)
        if ended is None:
            os.kill(launcher.pid, 9)
            launcher.wait(timeout)
    job = Job(None, environ[TAG], folder / "events.jsonl", *(each.read_text() for each in said))
    assert ended is not None, f"no end within {timeout} s\n{job.stdout}\n{job.stderr}"
    job.status, left = ended
    assert not left, left
    job.check_nothing_left()
    return job


def run(folder: Path, script: str, *args: str, timeout: float = 60.0, **kwargs: object) -> Job:
    """:func:`start` and wait; afterwards nothing may be left."""
    job = start(folder, script, *args, **kwargs).finish(timeout)  # type: ignore[arg-type]
    job.check_nothing_left()
    return job

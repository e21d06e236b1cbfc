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

    process: subprocess.Popen[str]
    tag: str
    events_file: Path
    stdout: str = ""
    stderr: str = ""

    def finish(self, timeout: float = 60.0) -> Job:
        """Wait for the end; kill everything if it does not come."""
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
        return int(self.process.returncode)

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
    tag = uuid.uuid4().hex
    environ = {
        name: value for name, value in os.environ.items() if not name.startswith(("SWIFT_", "PET_", "TORCHELASTIC"))
    }
    environ |= {"OMP_NUM_THREADS": "1", TAG: tag, "PYTHONPATH": str(ROOT)} | (env or {})
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        env=environ,
        cwd=folder,
        start_new_session=True,
    )
    return Job(process, tag, folder / "events.jsonl")


def run(folder: Path, script: str, *args: str, timeout: float = 60.0, **kwargs: object) -> Job:
    """:func:`start` and wait; afterwards nothing may be left."""
    job = start(folder, script, *args, **kwargs).finish(timeout)  # type: ignore[arg-type]
    job.check_nothing_left()
    return job

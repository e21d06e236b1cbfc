"""The job-history file: how runs ended, one JSON line for each event of a run.

A run that is killed cannot write that it was. So each run writes when it begins, from time to time how far it is, and
at a proper end how it ended; one that has fallen silent without an end was killed. A run that continues after a restart
keeps its name, and with it its place in the file.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from shared_core.errors import ConfigError
from shared_core.events import console
from shared_core.kinds import open_fd, open_regular
from shared_core.plain_json import parse

#: ``running`` while it lasts; ``completed`` as planned; ``stopped`` early with its state saved; ``killed`` without.
ENDS = ("running", "completed", "stopped", "killed")
#: A run that has written nothing for so many seconds was killed.
SILENT_S = 6 * 3600.0
_APPEND = os.O_RDWR | os.O_APPEND | os.O_CREAT


@dataclass(frozen=True)
class Run:
    """What is known of a run; also a line of the file.

    Attributes:
        name: unique, and kept over restarts.
        end: one of :data:`ENDS`.
        useful_s: useful seconds that it has trained.
        worker_s: seconds that its workers were at work, added up.
        rolled_back: by tier, how often it went back to a checkpoint.
        group: equal in runs that resemble each other, such as a project's name.
        time: when this was written, seconds since the epoch.
    """

    name: str
    end: str = "running"
    useful_s: float = 0.0
    worker_s: float = 0.0
    rolled_back: Mapping[str, int] = field(default_factory=dict)
    group: str = ""
    time: float = 0.0

    def __post_init__(self) -> None:
        if self.end not in ENDS:
            raise ConfigError(f"end must be one of {', '.join(ENDS)}, not {self.end!r}")


@dataclass(frozen=True)
class LossHistory:
    """The runs of a file, in the order in which they were first named; ``skipped`` lines could not be read."""

    runs: tuple[Run, ...] = ()
    skipped: int = 0


def append(path: str | os.PathLike[str], run: Run) -> None:
    """Add a line, in one write, so that lines of several jobs never mix. A torn line before it is ended first.

    While another job writes, the file may seem to end in the middle of that job's line (its size grows page by page):
    then an empty line follows it, which is no damage. Raises OSError if the file cannot be written.
    """
    line = json.dumps(asdict(run) | {"time": run.time or time.time()}, separators=(",", ":")).encode() + b"\n"
    fd = open_fd(path, _APPEND, 0o644)
    try:
        size = os.fstat(fd).st_size
        if size and os.pread(fd, 1, size - 1) != b"\n":
            line = b"\n" + line
        written = os.write(fd, line)
        if written != len(line):
            raise OSError(
                f"only {written} of {len(line)} bytes were written to the job history {path}; is the disk full?"
            )
    finally:
        os.close(fd)


def read(path: str | os.PathLike[str], *, group: str | None = None, now: float | None = None) -> LossHistory:
    """The runs of a file (of one group); none if there is no file. Lines that cannot be read are skipped, and the user
    is told. ``now`` is in seconds since the epoch. Raises OSError.
    """
    now = time.time() if now is None else now
    last: dict[str, Run] = {}
    skipped = 0
    try:
        with open_regular(path) as file:
            lines = file.read().split(b"\n")
    except FileNotFoundError:
        return LossHistory()
    for line in filter(None, lines):
        try:
            run = _parse(parse(line))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
            skipped += 1
            continue
        last[run.name] = run
    if skipped:
        console(f"job history {path}: {skipped} of {sum(map(bool, lines))} lines cannot be read and are passed over")
    runs = []
    for run in last.values():
        if group is not None and run.group != group:
            continue
        silent = run.end == "running" and now - run.time > SILENT_S
        runs.append(Run(**(asdict(run) | {"end": "killed"})) if silent else run)
    return LossHistory(tuple(runs), skipped)


def _parse(raw: Any) -> Run:
    rolled_back = {str(tier): int(count) for tier, count in raw["rolled_back"].items()}
    seconds = [float(raw[name]) for name in ("useful_s", "worker_s", "time")]
    if not all(0 <= each < float("inf") for each in seconds) or min(rolled_back.values(), default=0) < 0:
        raise ValueError("a duration or a count is out of range")
    name, end, group = (raw[key] for key in ("name", "end", "group"))
    if not all(isinstance(each, str) for each in (name, end, group)):
        raise ValueError("a name is not text")
    return Run(name, end, seconds[0], seconds[1], rolled_back, group, seconds[2])

"""What a worker of a test job reports: who it is, what it computed how often, and digests of its final state.

A job writes into the folder named by ``SWIFT_TEST_OUT``: ``workers.jsonl`` has one line for each process that started,
``rank{r}.json`` the final report of each rank.
"""

from __future__ import annotations

import io
import json
import os
import random
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from shared_core.events import read_events
from tests.support.digest import digest

OUT = "SWIFT_TEST_OUT"
#: Number of a forward pass of a worker -> how many hot standbys it waits for there, and of how many it must have
#: been said before that they failed; as JSON.
AWAIT = "SWIFT_TEST_AWAIT"
_AWAIT_S = 60.0
#: Number of a forward pass of a rank's first worker, as ``RANK:NUMBER`` -> whom it has leave there; as JSON.
DRAIN = "SWIFT_TEST_DRAIN"
#: Seconds that the script's start takes.
STARTUP = "SWIFT_TEST_STARTUP"


def start_time(pid: int | str = "self") -> int:
    """Start of a process in clock ticks since boot; with the pid it identifies a process for good."""
    text = Path(f"/proc/{pid}/stat").read_text()
    return int(text.rpartition(")")[2].split()[19])  # field 22; the name, in parentheses, may hold blanks


def generators_digest() -> str:
    """Hash of the states of the generators of torch, NumPy and ``random``."""
    numpy_state = np.random.get_state(legacy=False)
    return digest([torch.get_rng_state(), numpy_state, random.getstate()])


def end_group() -> Any:
    """Wait for all ranks and end the default group; it is returned to be let go of after the model.

    Whoever lets go of a gloo group last waits for its threads. DDP does so with the interpreter's lock, which those
    threads may need for the last tensor; a reference from Python does so without.
    """
    group = dist.group.WORLD
    dist.barrier()
    dist.destroy_process_group()
    return group


class Report(io.IOBase):
    """The report of one worker.

    As a file is, it is left to its process: a replacement reports about itself, not what the failed worker had counted.

    Args:
        out: folder of the job; ``SWIFT_TEST_OUT`` by default.
    """

    def __init__(self, out: str | os.PathLike[str] | None = None) -> None:
        self.out = Path(out if out is not None else os.environ[OUT])
        self.counts: Counter[str] = Counter()
        self._awaited: dict[str, tuple[int, int]] = json.loads(os.environ.get(AWAIT, "{}"))
        self._drained: dict[str, str] = json.loads(os.environ.get(DRAIN, "{}"))
        self.who = {
            "rank": int(os.environ["RANK"]),
            "pid": os.getpid(),
            "start": start_time(),
            "incarnation": int(os.environ.get("SWIFT_RECOVERY_INCARNATION", "0")),
            "restart": int(os.environ.get("SWIFT_RECOVERY_RESTART", "0")),
            "job_dir": os.environ.get("SWIFT_RECOVERY_JOB_DIR"),
        }
        fd = os.open(self.out / "workers.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(fd, (json.dumps(self.who) + "\n").encode())
        finally:
            os.close(fd)
        time.sleep(float(os.environ.get(STARTUP, "0")))

    def count(self, key: str) -> None:
        """Count one forward pass of a batch; ``key`` names the entry, epoch and batch."""
        self.counts[key] += 1
        events = os.environ.get("SWIFT_RECOVERY_EVENTS")
        if events and (awaited := self._awaited.get(str(self.counts.total()))):
            _wait_prepared(events, *awaited)
        who = self._drained.get(f"{self.who['rank']}:{self.counts.total()}")
        if events and who is not None and not self.who["incarnation"]:
            from shared_core.cli.swiftctl import main

            main(["drain", who, os.environ["SWIFT_RECOVERY_RUN"]])

    def finish(self, digests: Mapping[str, str], **extra: Any) -> None:
        """Write the final report, whole or not at all.

        Args:
            digests: hash of each part of the state.
            extra: more plain data for the test.
        """
        final = self.who | {"digests": dict(digests), "counts": dict(self.counts), "extra": extra}
        path = self.out / f"rank{self.who['rank']}.json"
        partial = path.with_name(f"{path.name}.{os.getpid()}")
        partial.write_text(json.dumps(final))
        partial.replace(path)


def _wait_prepared(events: str, number: int, failed: int) -> None:
    """Return when so many standbys were prepared in this job, after so many failed.

    Raises:
        TimeoutError: they were not.
    """
    deadline = time.monotonic() + _AWAIT_S
    while _prepared_after(events, failed) < number:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{number} standbys were not prepared in {_AWAIT_S:g} s")
        time.sleep(0.02)


def _prepared_after(events: str, failed: int) -> int:
    found = 0
    for event in read_events(events):
        failed -= event.kind == "warning" and "the hot standby" in event.fields["message"]
        found += event.kind == "prepared" and failed <= 0
    return found

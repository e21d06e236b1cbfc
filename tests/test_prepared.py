"""A prepared standby takes a lost rank's place: the bits are those of the run without a loss, and it has really served."""

from __future__ import annotations

import json

import pytest
from harness import Jobs

from shared_core.faults import ANY_STEP, Fault
from shared_core.testing.report import AWAIT
from shared_core.testing.runner import JobResult

NORM = ["--norm"]
KILLED = [Fault(1, 5, "bucket", "SIGKILL")]


def _env(prepared: int, **awaited: int) -> dict[str, str]:
    """Workers wait in a batch until so many standbys have been prepared (``batch_4=1``)."""
    waits = {name.replace("_", " "): number for name, number in awaited.items()}
    return {"SWIFT_RECOVERY_STANDBY_PREPARED": str(prepared), AWAIT: json.dumps(waits)}


def _served(result: JobResult) -> list[tuple[int, str]]:
    """Rank of each newcomer, and where its process came from."""
    return [(event.rank, event.fields["how"]) for event in result.kinds("newcomer_start")]


def test_it_serves(jobs: Jobs) -> None:
    result = jobs.check("plain_ddp.py", faults=KILLED, args=NORM, env=_env(1, batch_4=1))
    assert _served(result) == [(1, "prepared")], result.tail()

"""Stages in bf16 and with ZeRO-1, whose optimizer no replica holds whole: masters and moments come back bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import Jobs

from shared_core.faults import Fault
from tests.support.runner import JobResult

#: Ranks 0 and 1 are the first stage, ranks 2 and 3 the last.
MODES = {
    "bf16": ["--bf16"],
    "zero": ["--zero", "1"],
    "both": ["--bf16", "--zero", "1", "--tied", "--clip", "0.1", "--schedule"],
}
PLACES = {
    "backward": ("pipe.backward", 2),
    "in the update": ("update.during", 20),
    "after the update": ("update.after", 1),
    "gathering parameters": ("collective.before", 2),
    "next batch": ("pipe.load", 1),
}


def _resolutions(result: JobResult) -> set[str]:
    return {event.fields["resolution"] for event in result.events if event.kind == "recovered"}


@pytest.mark.nightly
@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("mode", MODES)
def test_at_any_place(jobs: Jobs, mode: str, place: str, rank: int) -> None:
    point, nth = PLACES[place]
    fault = Fault(rank, 4, point, "SIGKILL", nth)
    assert _resolutions(jobs.check("pipe.py", nproc=4, faults=[fault], args=MODES[mode])) == {"replica"}


@pytest.mark.nightly
def test_a_replacement_fails_too(jobs: Jobs) -> None:
    faults = [
        Fault(2, 3, "update.during", "SIGKILL", 20),
        Fault(2, 3, "update.during", "SIGKILL", 10, incarnation=1),
        Fault(3, 4, "update.after", "SIGKILL"),
    ]
    jobs.check("pipe.py", nproc=4, faults=faults, args=MODES["both"])


@pytest.mark.nightly
def test_without_a_replica_from_the_checkpoint(jobs: Jobs, tmp_path: Path) -> None:
    env = {"SWIFT_RECOVERY_CHECKPOINT_DIR": str(tmp_path), "SWIFT_RECOVERY_CHECKPOINT_EVERY_STEPS": "2"}
    fault = Fault(1, 5, "update.during", "SIGKILL", 20)
    result = jobs.check("pipe.py", nproc=2, faults=[fault], env=env, args=MODES["both"])
    assert _resolutions(result) == {"replay"}
    (ready,) = (event for event in result.events if event.kind == "replacement_ready")
    assert ready.fields["boundary"] in (2, 4)

"""The simulated device itself: it computes as the CPU does, and does not forgive what a GPU does not forgive."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

pytestmark = [pytest.mark.usefixtures("simulated"), pytest.mark.timeout(600)]  # the first one compiles


def on_device(what: str, **env: str) -> tuple[int, list[dict[str, Any]], str]:
    """Exit status, lines of JSON and errors of ``on_simdev.py``; this process keeps the accelerator it has."""
    path = os.pathsep.join([str(ROOT), str(HERE), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(HERE / "on_simdev.py"), what],
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | env,
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()], done.stderr[-2000:]


def answer(what: str) -> dict[str, Any]:
    status, [said], errors = on_device(what)
    assert status == 0, errors
    return said


@pytest.mark.nightly
def test_a_small_gpt_is_trained_as_on_the_cpu() -> None:
    """With dropout, clipping and AdamW: parameters, optimizer state, losses and what dropout drew, bit for bit."""
    said = answer("gpt")
    assert said["sim"] == said["cpu"]
    assert said["queued"] > 10 * said["at_once"], said
    assert not said["host_moved"], "dropout on the device drew from the generator of the host"


def test_a_host_that_reads_device_memory_dies() -> None:
    status, said, errors = on_device("reads")
    assert said == [{"before": [1.0] * 4}], errors
    assert status == -11, errors


@pytest.mark.nightly
def test_its_generator_is_its_own() -> None:
    assert answer("generator") == {"host_stays": True, "device_stays": True, "device_moved": True, "again": True}


@pytest.mark.nightly
def test_it_is_late_and_fresh_memory_is_not_zero() -> None:
    assert answer("late") == {"fresh": True, "before": False, "waits": True, "after": True, "read": [6.0]}


@pytest.mark.nightly
def test_a_fork_of_a_process_that_has_used_it_cannot() -> None:
    assert answer("fork") == {"loaded": True, "used": False}

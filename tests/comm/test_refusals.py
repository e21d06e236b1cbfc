"""What is refused, what is found out, and that a cut is quick."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from harness import Jobs

from shared_core.faults import Fault
from tests.support.runner import ROOT

SCRIPTS = Path(__file__).parent / "scripts"
NCCL = "Unsupported: a process group of backend nccl is made, and a failed worker is replaced on the CPU only"
REFUSED = {
    "init nccl": NCCL,
    "new_group nccl": NCCL,
    "no memory": "NotImplementedError: Cannot copy out of meta tensor; no data!",
    "sparse all_reduce": "Unsupported: all_reduce of sparse tensors takes one tensor and SUM, as in gloo",
    "sparse reduce": "Unsupported: reduce of a sparse tensor: use dense gradients",
    "two tensors": "Unsupported: send and recv take one tensor, got 2",
}


def test_what_cannot_be_recovered_is_refused_and_says_why(jobs: Jobs) -> None:
    result = jobs.run(str(SCRIPTS / "refused.py"), nproc=1)
    assert result.status == 0, result.tail()
    said = result.reports[0]["extra"]["said"]
    assert said.keys() == REFUSED.keys()
    assert {name: text for name, text in said.items() if not text.startswith(REFUSED[name])} == {}


#: What the replacement does instead, and what the message names: its own call first, then the failed worker's.
DIVERGENCES = {
    "operation": (r"all_gather_single\(float32\[4, 3\]\)", r"all_reduce\(float32\[4, 3\]\)"),
    "shape": (r"all_reduce\(float32\[3, 3\]\)", r"all_reduce\(float32\[4, 3\]\)"),
    "root": (r"broadcast\(float32\[4, 3\]\)", r"broadcast\(float32\[4, 3\]\)"),
    "input": (r"another value than the failed worker", r"checksum \w{8}, and \w{8} before"),
}


@pytest.mark.parametrize(
    "how", ["operation", "input", *(pytest.param(how, marks=pytest.mark.nightly) for how in ("shape", "root"))]
)
def test_a_replacement_that_does_something_else_is_found_out(how: str, jobs: Jobs) -> None:
    fault = Fault(1, 3, "collective.after", "SIGKILL", nth=2)
    result = jobs.run(str(SCRIPTS / "diverge.py"), faults=[fault], args=[how])
    assert result.status == 1, result.tail()
    own, failed_worker = DIVERGENCES[how]
    pattern = rf"ReplayDivergence: at .*, the replacement of rank 1 .*{own}.*{failed_worker}"
    assert re.search(pattern, result.stderr), result.tail()
    assert not result.reports


def test_the_log_holds_at_most_two_gradients(jobs: Jobs) -> None:
    result = jobs.run(str(SCRIPTS / "memory.py"))
    assert result.status == 0, result.tail()
    for report in result.reports.values():
        extra = report["extra"]
        # Small results and uneven buckets come on top.
        assert max(extra["held"]) <= 2.05 and extra["peak"] <= 2.05, extra
        assert max(h + f for h, f in zip(extra["held"], extra["free"], strict=True)) <= 2.05, extra


def test_a_cut_does_not_wait_for_a_silent_peer() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / "silent.py")],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "all_reduce ended" in done.stdout and "recv ended" in done.stdout, done.stdout
    found = re.search(r"cut True seconds ([\d.]+)", done.stdout)
    assert found and float(found[1]) < 2.0, done.stdout


def test_a_cut_wakes_who_sends_a_long_message() -> None:
    """Without a thread of its own for the wait, about every third sender stays asleep."""
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / "cut_message.py")],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 0 and done.stdout.endswith("done\n"), done.stderr
    assert "stuck" not in done.stdout and done.stdout.count(" cut\n") >= 5, done.stdout

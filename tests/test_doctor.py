"""``swiftctl doctor`` says whether training can survive a failure here, and what to do where it cannot."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
COMMAND = [sys.executable, "-m", "shared_core.cli.swiftctl", "doctor"]


def doctor(*words: str, limits: str = "", **env: str) -> tuple[int, str]:
    """Its status and what it printed, in a shell with these limits."""
    shell = ["sh", "-c", f'{limits}exec "$@"', "sh", *COMMAND, *words]
    variables = os.environ | {"PYTHONPATH": str(ROOT)} | env
    done = subprocess.run(shell, env=variables, capture_output=True, text=True, timeout=100)
    assert not done.stderr, done.stderr
    return done.returncode, done.stdout


def test_this_machine_can_and_what_is_there_is_said() -> None:
    status, said = doctor("--json")
    found: dict[str, dict[str, Any]] = {each["what"]: each for each in json.loads(said)}
    assert status == 0, said
    assert {"system", "Python", "torch", "gloo", "GPUs", "lightning", "/dev/shm", "open files", "clock"} <= found.keys()
    assert all(each["remedy"] for each in found.values() if each["verdict"] == "bad")


@pytest.mark.nightly
@pytest.mark.parametrize(("at_most", "verdict", "status"), [(64, "bad", 1), (512, "warning", 0)])
def test_a_limit_that_is_too_low_has_a_remedy(at_most: int, verdict: str, status: int) -> None:
    found, said = doctor(limits=f"ulimit -S -n {at_most} && ")
    line, remedy = said.partition(f"{verdict:<8} open files")[2].splitlines()[:2]
    assert found == status and line.endswith(f"at most {at_most}") and "-> ulimit -n " in remedy, said


def test_a_torch_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch.so: wrong ELF class')")
    status, said = doctor(PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert status == 1 and "bad      torch          cannot be imported: libtorch.so: wrong ELF class" in said, said

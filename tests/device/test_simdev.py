"""The simulated device itself: it computes as the CPU does, and does not forgive what a GPU does not forgive."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import simdev_build

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


def test_it_is_late_and_fresh_memory_is_not_zero() -> None:
    assert answer("late") == {"fresh": True, "before": False, "waits": True, "after": True, "read": [6.0]}


@pytest.mark.nightly
def test_a_fork_of_a_process_that_has_used_it_cannot() -> None:
    assert answer("fork") == {"loaded": True, "used": False}


@pytest.mark.nightly
def test_several_processes_build_it_at_once(tmp_path: Path) -> None:
    """The compiler here copies what was built before; it is run once, and a process that is killed stops nobody."""
    compiler, ran = tmp_path / "compiler", tmp_path / "ran"
    built = simdev_build.library()
    compiler.write_text(
        f'#!/bin/sh\necho $$ >> {ran}\nwhile [ "$1" != -o ]; do shift; done\n'
        f'[ -e {tmp_path}/killed ] || {{ touch {tmp_path}/killed; kill -9 $PPID; exit 1; }}\ncp {built} "$2"\n'
    )
    compiler.chmod(0o700)
    env = os.environ | {
        simdev_build.BUILD: str(tmp_path / "builds"),
        "CXX": str(compiler),
        "PYTHONPATH": f"{ROOT}{os.pathsep}{HERE}",
    }
    command = [sys.executable, "-c", "import simdev_build; print(simdev_build.library())"]
    processes = [subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    said = [(process.communicate(timeout=300)[0], process.returncode) for process in processes]
    assert sorted(status for _, status in said) == [-9, 0, 0, 0]
    [path] = {text.strip() for text, status in said if status == 0}
    assert Path(path).read_bytes() == built.read_bytes()
    assert len(ran.read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("compiler", "said"),
    [("/nowhere/g++", "needs a C\\+\\+ compiler"), ("/bin/false", "does not compile with torch")],
)
def test_what_cannot_be_built_is_said_in_one_line(
    compiler: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(simdev_build.BUILD, str(tmp_path))
    monkeypatch.setenv("CXX", compiler)
    with pytest.raises(simdev_build.CannotBuild, match=said) as raised:
        simdev_build.library()
    assert "\n" not in str(raised.value)

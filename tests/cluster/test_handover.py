"""``python train.py`` becomes ``swiftrun``; where it cannot, it says so."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from util import start_command

from shared_core import handover
from shared_core.errors import SwiftError

SCRIPT = """
import json, os, sys
from shared_core import handover
print("before", end=" ")
if not handover.launched_by_swiftrun():
    handover.hand_over(2, standbys=0)
from shared_core.protocol import worker_env
said = {"rank": worker_env.env().rank, "args": sys.argv[1:], "argv0": sys.argv[0], "dev": sys.flags.dev_mode}
print(json.dumps(said), flush=True)
"""


@pytest.fixture(autouse=True)
def as_a_script(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process runs a script, also where it is a worker of ``pytest -n``."""
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "train.py", raising=False)


@pytest.mark.nightly
@pytest.mark.parametrize("how", [["script.py"], ["-X", "dev", "-m", "script"]], ids=["script", "module"])
def test_script_arguments_and_flags_are_handed_over(tmp_path: Path, how: list[str]) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    job = start_command(tmp_path, [sys.executable, "-W", "ignore", *how, "--lr", "0.1", "a b"]).finish()
    assert job.code == 0, job.stderr
    assert job.stdout.startswith("before ")  # what was printed before is not lost
    seen = [json.loads(line[line.index("{") :]) for line in job.stdout.splitlines() if "{" in line]
    assert sorted(one["rank"] for one in seen) == [0, 1]
    assert all(one["args"] == ["--lr", "0.1", "a b"] and one["argv0"].endswith("script.py") for one in seen)
    assert all(one["dev"] == ("dev" in how) for one in seen)
    job.check_nothing_left()


@pytest.mark.nightly
def test_a_debugger_is_left_behind(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    job = start_command(tmp_path, [sys.executable, "-m", "pdb", "-c", "continue", "script.py"]).finish()
    assert job.code == 0 and job.stderr.count("the debugger (pdb) is left behind") == 1, job.stderr
    assert job.stdout.count('"rank"') == 2, "the script has run in both workers"


@pytest.mark.parametrize(
    ("before", "found"),
    [
        ("import bdb; bdb.Bdb().set_trace()", "bdb"),  # as at a breakpoint
        ("sys.modules['pydevd'] = sys.modules['debugpy'] = sys", "debugpy"),  # as in an editor
        ("sys.settrace(lambda *_: None)", ""),  # as where coverage is measured
    ],
)
def test_which_debugger_there_is(before: str, found: str) -> None:
    code = f"import sys; from shared_core.handover import _debugger\n{before}; found = _debugger()\n"
    command = [sys.executable, "-c", code + "sys.settrace(None); print([found])"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout == f"[{found!r}]\n", done.stderr


def test_no_script_no_hand_over() -> None:
    code = "from shared_core.handover import hand_over; hand_over(2)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert "notebook or an interactive session" in done.stderr and "swiftrun --nproc-per-node N SCRIPT" in done.stderr


def test_a_process_group_is_too_late() -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(SwiftError, match="a process group exists already"):
            handover.hand_over(2)
    finally:
        dist.destroy_process_group()


def test_other_launchers_are_not_left(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(handover, "_warned", False)  # other tests warn, too
    assert not handover.under_plain_torchrun()
    handover.warn_plain_torchrun_once()
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    assert handover.under_plain_torchrun()
    handover.warn_plain_torchrun_once()
    handover.warn_plain_torchrun_once()
    assert capsys.readouterr().err.count("survivors cannot be kept alive") == 1
    with pytest.raises(SwiftError, match="another launcher has started this process"):
        handover.hand_over(2)
    monkeypatch.setenv("SWIFT_RECOVERY_JOB_DIR", "/x")
    assert handover.launched_by_swiftrun() and not handover.under_plain_torchrun()
    with pytest.raises(SwiftError, match="already one of its workers"):
        handover.hand_over(2)
    with pytest.raises(SwiftError, match="at least 1"):
        handover.hand_over(0)


def test_tasks_of_srun(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """SLURM's variables are set by hand here; ``tests/test_slurm.py`` has them from SLURM itself."""
    monkeypatch.setattr(handover, "_warned", False)
    monkeypatch.setenv("SLURM_NTASKS", "2")  # of a batch script: nothing has been started yet
    monkeypatch.setenv("SLURM_PROCID", "0")
    handover.warn_srun_once()
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    handover.warn_srun_once()
    assert handover.srun_tasks() == 1 and capsys.readouterr().err == ""
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    handover.warn_srun_once(alone=True)
    handover.warn_srun_once(alone=True)
    said = capsys.readouterr().err
    assert said.count("survivors cannot be kept alive") == said.count("each task trains alone") == 1
    with pytest.raises(SwiftError, match="srun has started 2 tasks of this script"):
        handover.hand_over(2)
    monkeypatch.setattr(handover, "_warned", False)
    monkeypatch.setenv("SLURM_PROCID", "1")
    handover.warn_srun_once()
    monkeypatch.setattr(handover, "_warned", False)
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SWIFT_RECOVERY_JOB_DIR", "/x")
    handover.warn_srun_once()
    assert capsys.readouterr().err == ""

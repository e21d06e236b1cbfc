"""Resuming in the middle of an epoch, without ``swiftrun`` in the command: what users of the frameworks ask for.

All processes are killed in the middle of the second epoch, and the same command is run again.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from checkpointed import committed, descendants, kill_all
from harness import SCRIPTS, until

from shared_core.system import jobdir
from tests.support.report import OUT

ROOT = Path(__file__).resolve().parents[1]
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone")
ACCELERATE = ("-m", "accelerate.commands.launch", "--cpu", "--num_processes=2", "--mixed_precision=no")
#: Case of the script -> how it is started, number of workers.
CASES: dict[str, tuple[tuple[str, ...], int]] = {
    "lightning_19764": (TORCHRUN, 2),
    "lightning_20550": ((), 1),
    "accelerate_2823": (ACCELERATE, 2),
    "accelerate_4195": (TORCHRUN, 2),
    "transformers": (TORCHRUN, 2),
    "alone": ((), 1),
}
#: Step boundary of the newest checkpoint, in the second epoch of eight batches, and the batch at which all are killed.
NEWEST, STOP = 10, 13
LIMIT_S = 240.0


def start(folder: Path, case: str, *args: str, launcher: tuple[str, ...], **env: str) -> subprocess.Popen[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SWIFT_", "ACCELERATE_"))}
    kept |= {"PYTHONPATH": f"{ROOT}:{SCRIPTS}", "OMP_NUM_THREADS": "1", OUT: str(folder), **env}
    (folder / "out").mkdir(exist_ok=True)
    command = [sys.executable, *launcher, str(SCRIPTS / "threads.py"), case, str(folder / "out"), *args]
    with open(folder / "log", "a") as log:
        return subprocess.Popen(command, cwd=folder, env=kept, stdout=log, stderr=log, text=True)


def ended(folder: Path, job: subprocess.Popen[str], ranks: int) -> list[Any]:
    status = job.wait(LIMIT_S)
    assert status == 0, (folder / "log").read_text()
    return [json.loads((folder / "out" / f"rank{rank}.json").read_text()) for rank in range(ranks)]


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", CASES)
def test_the_same_command_continues(case: str, tmp_path: Path) -> None:
    launcher, ranks = CASES[case]
    ours, stock = tmp_path / "ours", tmp_path / "stock"
    ours.mkdir()
    stock.mkdir()
    options = ("--checkpoints", str(ours / "checkpoints"))
    job = start(ours, case, *options, launcher=launcher, STOP_AT=str(STOP))
    folder = ours / "checkpoints"
    try:
        until(lambda: NEWEST in committed(folder, ranks), (ours / "log").read_text, LIMIT_S)
    finally:
        kill_all(job.pid)
        job.wait()
        jobdir.sweep(Path("/dev/shm"))
    found = ended(ours, start(ours, case, *options, launcher=launcher), ranks)
    log = (ours / "log").read_text()
    assert log.count(f"the job continues from the checkpoint at step boundary {NEWEST} ") == 1, log
    plain = TORCHRUN if ranks == 2 else ()
    assert found == ended(stock, start(stock, case, launcher=plain), ranks)
    assert not descendants(os.getpid())[1:]

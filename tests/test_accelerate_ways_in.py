"""Every way to start an Accelerate script ends in workers of ``swiftrun``, or says why not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness import armed

from shared_core.faults import Fault

ROOT = Path(__file__).parents[1]
SCRIPT = """
import sys
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset
from accelerate_swift import SwiftPlugin

plugin = SwiftPlugin(OPTIONS)
accelerator = Accelerator(ARGS kwargs_handlers=[plugin])
net = torch.nn.Linear(4, 1)
model, optimizer, loader = accelerator.prepare(
    net, torch.optim.SGD(net.parameters(), lr=0.1), DataLoader(TensorDataset(torch.ones(32, 4)), batch_size=2)
)
for epoch in plugin.epochs(2):
    for (x,) in loader:
        accelerator.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
recovery = plugin.loop.job is not None
sys.stdout.write(f"rank {accelerator.process_index} of {accelerator.num_processes}: recovery {recovery}\\n")
sys.stdout.flush()
accelerator.end_training()
"""
CONFIG = """
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_CPU
use_cpu: true
num_processes: 2
num_machines: 1
machine_rank: 0
mixed_precision: 'no'
"""


def start(
    folder: Path,
    *command: str,
    options: str = "",
    args: str = "cpu=True,",
    env: dict[str, str] | None = None,
    begin: str = "",
) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(begin + SCRIPT.replace("OPTIONS", options).replace("ARGS", args))
    (folder / "accelerate.yaml").write_text(CONFIG)
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("SWIFT_RECOVERY", "ACCELERATE_"))}
    environ |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"}
    return subprocess.run(
        [sys.executable, *command], cwd=folder, env=environ | (env or {}), capture_output=True, text=True, timeout=110
    )


WAYS: dict[str, tuple[tuple[str, ...], str, str]] = {
    "swiftrun": (("-m", "shared_core.cli.swiftrun", "--nproc-per-node", "2", "train.py"), "", "cpu=True,"),
    "python": (("train.py",), "num_processes=2", "cpu=True,"),
    "accelerate_launch": (
        ("-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2", "--mixed_precision", "no", "train.py"),
        "",
        "",
    ),
    "accelerate_launch_through_torchrun": (
        ("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "train.py"),
        "",
        "cpu=True,",
    ),
    "accelerate_launch_with_a_file": (
        ("-m", "accelerate.commands.launch", "--config_file", "accelerate.yaml", "train.py"),
        "",
        "",
    ),
}


@pytest.mark.nightly
@pytest.mark.parametrize("way", WAYS)
def test_a_failed_worker_is_replaced(way: str, tmp_path: Path) -> None:
    command, options, args = WAYS[way]
    begin = armed(Fault(1, 11, "bucket", "SIGKILL"))
    result = start(tmp_path, *command, options=options, args=args, begin=begin)
    assert result.returncode == 0, result.stderr
    assert sorted(line for line in result.stdout.splitlines() if line.startswith("rank")) == [
        "rank 0 of 2: recovery True",
        "rank 1 of 2: recovery True",
    ], result.stderr
    assert "; 1 worker failed" in result.stderr


@pytest.mark.nightly
def test_one_process_is_told_that_nothing_is_recovered(tmp_path: Path) -> None:
    result = start(tmp_path, "train.py")
    assert result.returncode == 0, result.stderr
    assert "rank 0 of 1: recovery False" in result.stdout
    [line] = [line for line in result.stderr.splitlines() if line.startswith("[swift]")]
    assert line == (
        "[swift] one process: nothing to recover from; start with swiftrun --nproc-per-node N SCRIPT, or "
        "SwiftPlugin(num_processes=N)"
    )
    quiet = start(tmp_path, "train.py", env={"SWIFT_RECOVERY": "0"})
    assert "[swift]" not in quiet.stderr


@pytest.mark.nightly
def test_a_failure_under_accelerate_launch_is_its_failure(tmp_path: Path) -> None:
    for way in ("accelerate_launch", "accelerate_launch_through_torchrun"):
        result = start(tmp_path, *WAYS[way][0], args="mixed_precision='no such thing',")
        assert result.returncode != 0
        assert "no such thing" in result.stderr


@pytest.mark.nightly
def test_plain_torchrun_trains_and_says_so_once(tmp_path: Path) -> None:
    result = start(tmp_path, "-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py")
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("recovery False") == 2
    assert result.stderr.count("survivors cannot be kept alive") == 1, result.stderr


@pytest.mark.nightly
def test_a_flag_turns_it_off(tmp_path: Path) -> None:
    command = ("-m", "shared_core.cli.swiftrun", "--nproc-per-node", "2", "train.py")
    result = start(tmp_path, *command, env={"SWIFT_RECOVERY": "0"})
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("recovery False") == 2


@pytest.mark.nightly
def test_no_device_is_explained(tmp_path: Path) -> None:
    command = ("-m", "shared_core.cli.swiftrun", "--nproc-per-node", "2", "train.py")
    result = start(tmp_path, *command, args="")
    assert result.returncode == 1
    assert "pass Accelerator(cpu=True) or set ACCELERATE_USE_CPU=true" in result.stderr


@pytest.mark.nightly
def test_an_unknown_option_is_named(tmp_path: Path) -> None:
    result = start(tmp_path, "train.py", options="on_failur='restart'")
    assert result.returncode == 1
    assert "did you mean 'on_failure'" in result.stderr

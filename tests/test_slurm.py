"""``srun swiftrun`` on one machine, under Debian's own SLURM and munge, which the tests start for themselves.

Nothing stands in for SLURM here: ``tests/slurm.py`` runs its daemons. Where they are not installed, or the user is not
root, the tests are skipped. What is said about several tasks is tested more quickly in
``tests/cluster/test_handover.py`` with a stand-in for the environment; most tests of it here are nightly ones.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import slurm
from slurm import Slurm, running_slurm

from shared_core.faults import Fault
from shared_core.faults.spec import dumps
from tests.support.processes import MARK, wait_gone

ROOT = Path(__file__).parents[1]
SWIFTRUN = (sys.executable, "-m", "shared_core.cli.swiftrun", "--nproc-per-node", "2", "train.py")
ONE_TASK = ("-N1", "-n1", "-c2")
#: Seconds that a job has: two imports of the stack on two busy processors, and a little training.
JOB_S = 100.0

ACCELERATE = """
import sys
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset
from accelerate_swift import SwiftPlugin

plugin = SwiftPlugin(num_processes=PROCESSES)
accelerator = Accelerator(cpu=True, kwargs_handlers=[plugin])
net = torch.nn.Linear(4, 1)
model, optimizer, loader = accelerator.prepare(
    net, torch.optim.SGD(net.parameters(), lr=0.1), DataLoader(TensorDataset(torch.ones(32, 4)), batch_size=2)
)
for epoch in plugin.epochs(2):
    for (x,) in loader:
        accelerator.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
sys.stdout.write(f"rank {accelerator.process_index} of {accelerator.num_processes}\\n")
sys.stdout.flush()
accelerator.end_training()
"""
LIGHTNING = """
import sys
import lightning.pytorch as pl
import lightning_swift
from lightning.pytorch.demos.boring_classes import BoringModel

trainer = pl.Trainer(
    accelerator="cpu", devices=2, strategy="swift_ddp", max_epochs=2, limit_train_batches=8, limit_val_batches=0,
    logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(BoringModel())
sys.stdout.write(f"rank {trainer.global_rank} of {trainer.world_size}\\n")
sys.stdout.flush()
"""
PLAIN = """
import sys
import shared_core
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

shared_core.install()
dist.init_process_group("gloo", FROM)
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
job = shared_core.attach(model, optimizer)
for epoch in job.epochs(1):
    for step, x in job.steps([torch.ones(2, 4)] * STEPS):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 3:
            open(f"at_work.{dist.get_rank()}", "w").close()
sys.stdout.write(f"rank {dist.get_rank()} of {dist.get_world_size()}\\n")
sys.stdout.flush()
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Slurm]:
    """One SLURM for all tests of this file."""
    why = slurm.missing()
    if why is not None:
        pytest.skip(why)
    with running_slurm() as running:
        yield running


@pytest.fixture(autouse=True)
def cleared(cluster: Slurm) -> Iterator[None]:
    """No test leaves a job, nor a node that another has to wait for."""
    yield
    cluster.ask("scancel", "--signal=KILL", "--full", "--user=root")
    cluster.wait("the node to be idle after a test", cluster.idle)


def plain(steps: int, start: str = "") -> str:
    return PLAIN.replace("STEPS", str(steps)).replace("FROM", start)


def start(
    cluster: Slurm, folder: Path, script: str, *command: str, env: dict[str, str] | None = None
) -> subprocess.Popen[str]:
    """Write ``train.py`` and give a command of SLURM's to it."""
    (folder / "train.py").write_text(script)
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("SWIFT_RECOVERY", "ACCELERATE_", "SLURM_"))}
    environ |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"}
    return subprocess.Popen(
        [slurm.program(command[0]), *command[1:]],
        cwd=folder,
        env=environ | cluster.env | (env or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(cluster: Slurm, process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Exit code, standard output and standard error."""
    try:
        out, err = process.communicate(timeout=JOB_S)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        pytest.fail(f"no end within {JOB_S:g} s\n{out}\n{err}\n{cluster.logs()}")
    return process.returncode, out, err


def ranks(out: str) -> list[str]:
    return sorted(line for line in out.splitlines() if line.startswith("rank"))


BOTH = ["rank 0 of 2", "rank 1 of 2"]


@pytest.mark.nightly
@pytest.mark.parametrize(
    "script", [pytest.param(ACCELERATE, marks=pytest.mark.nightly), LIGHTNING], ids=["accelerate", "lightning"]
)
def test_a_failed_worker_is_replaced(script: str, cluster: Slurm, tmp_path: Path) -> None:
    """``SLURM_*`` says one task; the workers of ``swiftrun`` are two all the same, also to Lightning."""
    (tmp_path / "faults.json").write_text(dumps([Fault(1, 11, "bucket", "SIGKILL")]))
    script = script.replace("PROCESSES", "1")
    job = start(cluster, tmp_path, script, "srun", *ONE_TASK, *SWIFTRUN[:-1], "--faults", "faults.json", SWIFTRUN[-1])
    code, out, err = finish(cluster, job)
    assert code == 0, err
    assert ranks(out) == BOTH, err
    assert "; 1 worker failed" in err
    assert "survivors cannot be kept alive" not in err


def at_work(cluster: Slurm, folder: Path) -> subprocess.Popen[str]:
    """A job under ``srun`` that does not end by itself; both of its workers are training."""
    job = start(cluster, folder, plain(10**6), "srun", *ONE_TASK, *SWIFTRUN)
    files = [folder / f"at_work.{rank}" for rank in (0, 1)]
    cluster.wait("both workers to train", lambda: all(f.exists() for f in files) or job.poll() is not None, JOB_S)
    assert job.poll() is None, finish(cluster, job)
    return job


@pytest.mark.parametrize("option", ["--verbose", pytest.param("--signal=TERM", marks=pytest.mark.nightly)])
def test_scancel_ends_all_processes(option: str, cluster: Slurm, tmp_path: Path) -> None:
    """Workers that get the signal too are not taken for failed."""
    job = at_work(cluster, tmp_path)
    cluster.ask("scancel", option, cluster.ask("squeue", "--noheader", "--format=%i"))
    code, out, err = finish(cluster, job)
    assert code == 1, err
    assert "received SIGTERM: ending all workers" in err
    assert "is back" not in err and ranks(out) == [], err
    assert wait_gone(os.environ[MARK], 5) == [], err


@pytest.mark.nightly
def test_the_batch_script_of_the_docs(cluster: Slurm, tmp_path: Path) -> None:
    found = re.search(r"```bash\n(#!/bin/bash\n.*?)```", (ROOT / "docs" / "clusters.md").read_text(), re.S)
    assert found is not None
    assert "--cpus-per-task=4" in found[1]
    # The node of the test has two processors.
    assert found[1].count("swiftrun ") == 1
    (tmp_path / "faults.json").write_text(dumps([Fault(1, 3, "bucket", "SIGKILL")]))
    batch = found[1].replace("--cpus-per-task=4", "--cpus-per-task=2")
    (tmp_path / "train.sbatch").write_text(batch.replace("swiftrun ", "swiftrun --faults faults.json "))
    job = start(cluster, tmp_path, plain(6), "sbatch", "--wait", "train.sbatch")
    code, out, err = finish(cluster, job)
    (log,) = (path.read_text() for path in tmp_path.glob("train-*.log"))
    assert code == 0, f"{out}{err}{log}"
    assert ranks(log) == BOTH
    assert "; 1 worker failed" in log
    assert [path.name for path in tmp_path.glob("events*")] == [f"events-{out.split()[-1]}.jsonl"]

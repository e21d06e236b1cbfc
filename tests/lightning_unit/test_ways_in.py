"""Every way in ends in workers of ``swiftrun`` with our strategy, from a plain ``python train.py``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from lightning.pytorch.cli import _JSONARGPARSE_SIGNATURES_AVAILABLE

ROOT = Path(__file__).parents[2]
SCRIPT = """
import os, sys, warnings
warnings.filterwarnings("ignore")
import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset
HEAD
class Model(pl.LightningModule):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.net = torch.nn.Linear(width, 1)
    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.ones(8, 4)), batch_size=2)
    def on_train_end(self):
        strategy = self.trainer.strategy
        kind = type(strategy).__name__
        place = f"rank {self.trainer.global_rank} of {self.trainer.world_size}"
        print(f"{place}: {kind} {strategy.job is not None}", flush=True)
OPTIONS = dict(accelerator="cpu", devices=2, max_epochs=1, logger=False, enable_checkpointing=False,
               enable_progress_bar=False, enable_model_summary=False)
TAIL
"""
FIT = "pl.Trainer({}, **OPTIONS).fit(Model())"
CLI = """
from lightning.pytorch.cli import LightningCLI
LightningCLI(Model, trainer_defaults=OPTIONS, save_config_callback=None)
"""
WAYS: dict[str, tuple[str, str, list[str], dict[str, str]]] = {
    "name": ("import lightning_swift", FIT.format("strategy='swift_ddp'"), [], {}),
    "object": (
        "from lightning_swift import SwiftDDPStrategy",
        FIT.format("strategy=SwiftDDPStrategy(standbys=0, data='seeded')"),
        [],
        {},
    ),
    "callback": (
        "from lightning_swift import SwiftCallback",
        FIT.format("strategy='ddp', callbacks=[SwiftCallback()]"),
        [],
        {},
    ),
    "environment": ("", FIT.format("strategy='ddp'"), [], {"SWIFT_RECOVERY": "1"}),
    "cli_name": ("import lightning_swift", CLI, ["fit", "--trainer.strategy", "swift_ddp"], {}),
    "cli_class": (
        "",
        CLI,
        ["fit", "--trainer.strategy", "lightning_swift.SwiftDDPStrategy", "--trainer.strategy.standbys", "0"],
        {},
    ),
    "yaml": ("", CLI, ["fit", "--config", "run.yaml"], {}),
}
YAML = """
trainer:
  strategy: ddp
  callbacks:
    - class_path: lightning_swift.SwiftCallback
"""
ENTRY_POINT = (
    "[lightning.pytorch.callbacks_factory]\nswift_recovery = lightning_swift.callback:callbacks_from_environment\n"
)


def start(
    tmp_path: Path, head: str, tail: str, args: list[str], env: dict[str, str], *before: str
) -> subprocess.CompletedProcess[str]:
    (tmp_path / "train.py").write_text(SCRIPT.replace("HEAD", head).replace("TAIL", tail))
    (tmp_path / "run.yaml").write_text(YAML)
    # The entry point of the project, whether or not it is installed here.
    info = tmp_path / "swift_recovery-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: swift-recovery\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINT)
    environ = {k: v for k, v in os.environ.items() if not k.startswith("SWIFT_RECOVERY")} | env
    environ |= {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, *before, "train.py", *args]
    return subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=110)


@pytest.mark.nightly
@pytest.mark.parametrize("way", WAYS)
def test_plain_python_hands_over(way: str, tmp_path: Path) -> None:
    head, tail, args, env = WAYS[way]
    if tail is CLI and not _JSONARGPARSE_SIGNATURES_AVAILABLE:
        pytest.skip("LightningCLI needs jsonargparse[signatures], which the extra 'lightning' installs")
    done = start(tmp_path, head, tail, args, env)
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        assert done.stdout.count(f"rank {rank} of 2: SwiftDDPStrategy True") == 1, done.stdout + done.stderr


@pytest.mark.nightly
def test_plain_torchrun_trains_and_says_so_once(tmp_path: Path) -> None:
    head, tail, args, env = WAYS["name"]
    done = start(tmp_path, head, tail, args, env, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("of 2: SwiftDDPStrategy False") == 2, done.stdout
    assert done.stderr.count("started by plain torchrun") == 1, done.stderr


FABRIC = """
from lightning.fabric import Fabric
fabric = Fabric(strategy="swift_ddp", accelerator="cpu", devices=2)
fabric.launch()
kind = type(fabric.strategy).__name__
print(f"rank {fabric.global_rank} of {fabric.world_size}: {kind} {fabric.strategy.job is not None};", flush=True)
lightning_swift.attach()
"""


@pytest.mark.nightly
@pytest.mark.parametrize("under", ["python", "torchrun"])
def test_fabric(under: str, tmp_path: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    done = start(tmp_path, "import lightning_swift", FABRIC, [], {}, *(torchrun if under == "torchrun" else []))
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        said = f"rank {rank} of 2: SwiftFabricStrategy {under == 'python'};"
        assert done.stdout.count(said) == 1, done.stdout + done.stderr
    assert done.stderr.count("started by plain torchrun") == int(under == "torchrun"), done.stderr

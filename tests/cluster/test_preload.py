"""What a standby imports for a script."""

from __future__ import annotations

from pathlib import Path

import pytest
from util import run

from shared_core.worker.start import preload


def test_what_the_script_and_its_neighbours_import_is_found(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "from model import Net\nimport os, my_private_package\n# import accelerate\n'transformers'\n"
    )
    (tmp_path / "model.py").write_text(
        "import torch.nn as nn\nfrom transformers import GPT2Config\nfrom torchvision import *\nfrom .x import y\n"
    )
    chosen = preload.modules_for(tmp_path / "train.py", extra=["wave"])
    assert chosen[: len(preload.ALWAYS)] == list(preload.ALWAYS)
    assert {"torch._dynamo", "torch.nn", "transformers:GPT2Config", "torchvision", "wave"} <= set(chosen)
    assert not {"accelerate", "os", "my_private_package", "lightning.pytorch"} & set(chosen)


def test_lightning_is_recognised(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    for line in (
        "import lightning as L",
        "from lightning_swift import SwiftCallback",
        "import lightning.pytorch as pl",
    ):
        script.write_text(line)
        assert {"lightning.pytorch", "torchmetrics"} <= set(preload.modules_for(script))
    script.write_text("import pytorch_lightning as pl")
    assert "pytorch_lightning" in preload.modules_for(script)


def test_a_script_that_cannot_be_read_or_parsed_costs_nothing(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("def (:\n")
    for script in (tmp_path / "bad.py", tmp_path / "missing.py", None):
        assert preload.modules_for(script) == list(preload.ALWAYS)


def test_modules_beside_the_script_are_not_taken_from_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import datasets\nimport timm\nimport torchmetrics.text\nimport torchvision")
    (tmp_path / "datasets.py").touch()
    (tmp_path / "torchmetrics").mkdir()
    (tmp_path / "torchmetrics" / "__init__.py").touch()
    (tmp_path / "timm").mkdir()  # a folder of data: the package is found first
    chosen = preload.modules_for(tmp_path / "train.py")
    assert {"timm", "torchvision"} <= set(chosen)
    assert not {"datasets", "torchmetrics", "torchmetrics.text"} & set(chosen)


@pytest.mark.nightly
def test_a_worker_of_a_plain_script_finds_the_product_imported(tmp_path: Path) -> None:
    """Everything that it imports itself is added to the stall of each recovery."""
    job = run(
        tmp_path,
        """
import sys
before = set(sys.modules)
import shared_core, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
shared_core.install()
dist.init_process_group("gloo")
net = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.AdamW(net.parameters())
job = shared_core.attach(net, optimizer)
for epoch in job.epochs(1):
    for step, batch in job.steps(torch.utils.data.DataLoader(torch.ones(4, 4), batch_size=2)):
        net(batch).sum().backward()
        optimizer.step()
late = sorted(name for name in set(sys.modules) - before if name.startswith("shared_core"))
print("imported", late)
dist.destroy_process_group()
""",
        nproc=1,
    )
    assert job.code == 0, job.stderr
    assert "imported []" in job.stdout
    assert {"torch", "shared_core.loop"} <= set(job.of("start")[0].fields["imports"])


#: In the zygote; the first worker, which is forked twice, is told to end before it has run anything.
STRUCK = """
import os, signal
from pathlib import Path
forks, done = 0, Path(__file__).with_name("done")
def struck():
    global forks
    forks += 1
    if forks == 2 and not done.exists():
        done.touch()
        os.kill(os.getpid(), signal.SIGTERM)
os.register_at_fork(after_in_child=struck)
"""


@pytest.mark.nightly
def test_a_worker_that_is_told_to_end_at_its_first_instant_ends(tmp_path: Path) -> None:
    (tmp_path / "strikes.py").write_text(STRUCK)
    job = run(tmp_path, "print('ran')", options=["--preload", "strikes"], env={"PYTHONPATH": str(tmp_path)}, nproc=1)
    assert job.code == 0 and job.stdout == "ran\n", job.stderr
    assert [event.fields["cause"] for event in job.of("failed")] == ["killed by SIGTERM"], job.stderr


@pytest.mark.parametrize(
    ("source", "nothing"),
    [
        ("import os, json\nfrom shared_core.worker import link\n", True),
        ("import os.path", True),
        ("import torch", False),
        ("from torch.nn import Linear", False),
        ("from .train import main", False),
        ("import importlib\nimportlib.import_module('torch')", False),
        ("exec(open('train.py').read())", False),
        ("def broken(", False),
    ],
)
def test_a_script_that_trains_nothing_waits_for_no_groups(source: str, nothing: bool, tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(source)
    assert preload.trains_nothing(script) is nothing

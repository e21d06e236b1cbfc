"""Each public name has an example in its docstring, and it runs as it stands there."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
#: What an example may use besides what it makes.
BEFORE = {
    "shared_core": "",
    "lightning_swift": """
        from lightning import Fabric
        from lightning.pytorch import Trainer
        from torch.distributed.fsdp import fully_shard
        import lightning_swift
        """,
    "accelerate_swift": """
        from accelerate import Accelerator
        import accelerate_swift
        """,
}
COMMON = """
import torch
import shared_core
words = {}
data = [torch.full((4,), float(number)) for number in range(8)]
loader = torch.utils.data.DataLoader(data, batch_size=2)
sampler = torch.utils.data.distributed.DistributedSampler(data, num_replicas=1, rank=0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
"""
#: Each in a process of its own, after the imports.
EACH = """
import atexit, os, sys, traceback
for name, code in EXAMPLES.items():
    print(name, flush=True)
    if (child := os.fork()) == 0:
        try:
            exec(compile(code, name, "exec"), globals())
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        atexit._run_exitfuncs()  # what the example has made in memory is removed
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        sys.exit(1)
"""


def example(docstring: str) -> str:
    """The code of a docstring below ``Example::``; empty if there is none."""
    found = re.search(r"^Example::\n\n((?:    .*\n|\n)+)", docstring + "\n", re.M)
    return textwrap.dedent(found[1]) if found else ""


def public(package: str) -> dict[str, str]:
    """The examples of a package, by name."""
    module = importlib.import_module(package)
    return {name: example(inspect.getdoc(getattr(module, name)) or "") for name in module.__all__}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.mark.timeout(400)
def test_each_public_name_has_an_example_that_runs(tmp_path: Path) -> None:
    examples = {f"{package}.{name}": code for package in BEFORE for name, code in public(package).items()}
    assert not [name for name, code in examples.items() if not code], "no example"
    script = tmp_path / "examples.py"
    before = "".join(map(textwrap.dedent, BEFORE.values()))
    script.write_text(before + COMMON + f"EXAMPLES = {examples!r}\n" + EACH)
    env = os.environ | {"PYTHONPATH": str(ROOT), "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"after {done.stdout.split()[-1:]}: {done.stderr}"

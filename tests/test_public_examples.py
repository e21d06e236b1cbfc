"""Each public name has an example in its docstring, and it runs as it stands there."""

from __future__ import annotations

import importlib
import inspect
import re
import textwrap
from pathlib import Path

from harness import Jobs

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
os.environ["GROUP_WORLD_SIZE"] = "2"  # of several machines nothing becomes swiftrun
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


def test_each_public_name_has_an_example_that_runs(jobs: Jobs) -> None:
    examples = {f"{package}.{name}": code for package in BEFORE for name, code in public(package).items()}
    assert not [name for name, code in examples.items() if not code], "no example"
    out = jobs.folder("examples")
    before = "".join(map(textwrap.dedent, BEFORE.values()))
    (out / "examples.py").write_text(before + COMMON + f"EXAMPLES = {examples!r}\n" + EACH)
    status = jobs.plain.run(
        str(out / "examples.py"),
        [],
        nproc=1,
        env={"PYTHONPATH": str(ROOT)},
        cwd=str(out),
        stdout=str(out / "stdout"),
        stderr=str(out / "stderr"),
        timeout_s=100.0,
    )
    tried = (out / "stdout").read_text().split()
    assert status == 0, f"in {tried[-1:]}: {(out / 'stderr').read_text()}"
    assert {*examples} <= {*tried}

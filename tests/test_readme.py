"""The scripts in the README run as they stand there, lose a worker, and print the same as without a loss."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from shared_core.testing import Fault
from shared_core.testing.faults import dumps

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
#: Complete scripts: python blocks that begin with the name of a file.
SCRIPTS = dict(re.findall(r"```python\n# (train_\w+\.py): [^\n]*\n(.*?)```", README, re.S))


def run(script: Path, *launcher: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    environ = {k: v for k, v in os.environ.items() if not k.startswith("SWIFT_")}
    environ |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | (env or {})
    command = [sys.executable, "-m", *launcher, "--nproc-per-node", "2", str(script)]
    return subprocess.run(command, cwd=script.parent, env=environ, capture_output=True, text=True, timeout=100)


def test_the_readme_shows_them() -> None:
    assert sorted(SCRIPTS) == ["train_accelerate.py", "train_torch.py"]


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_of_the_readme(name: str, tmp_path: Path) -> None:
    script = tmp_path / name
    # The README does not seed its generators, which two runs that are compared must.
    script.write_text("import torch; torch.manual_seed(int(__import__('os').environ['RANK']))\n" + SCRIPTS[name])
    plain = run(script, "torch.distributed.run")
    assert plain.returncode == 0, plain.stderr
    assert "mean loss" in plain.stdout
    faults = dumps([Fault(1, 20, "bucket", "SIGKILL"), Fault(0, 40, "forward", "SIGKILL")])
    lost = run(script, "shared_core.cli.swiftrun", env={"SWIFT_FAULTS": faults})
    assert lost.returncode == 0, lost.stderr
    assert "2 worker(s) were lost" in lost.stderr
    losses = [sorted(re.findall(r"mean loss [\d.]+", each.stdout)) for each in (plain, lost)]  # ranks in any order
    assert losses[0] == losses[1]

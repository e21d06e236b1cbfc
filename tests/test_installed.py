"""The wheel that users install: what is in it, and that a job runs from it, far from the repository."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared_core.faults import Fault
from shared_core.faults.spec import dumps

ROOT = Path(__file__).parents[1]
PACKAGES = ("shared_core", "lightning_swift", "accelerate_swift")
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
SCRIPT = """
import hashlib, json
import shared_core, lightning_swift, accelerate_swift, torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

shared_core.install()
dist.init_process_group("gloo")
torch.manual_seed(7)
data = torch.randn(64, 16)
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.Dropout(), torch.nn.Linear(8, 1)))
optimizer = torch.optim.AdamW(model.parameters())
job = shared_core.attach(model, optimizer)
for epoch in job.epochs(2):
    for step, batch in job.steps(DataLoader(data, batch_size=8, sampler=DistributedSampler(data))):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
files = [each.__file__ for each in (shared_core, lightning_swift, accelerate_swift)]
print("\\n" + json.dumps([dist.get_rank(), digest, files]), flush=True)
dist.destroy_process_group()
"""


def run(*command: str | Path, cwd: Path, status: int = 0) -> subprocess.CompletedProcess[str]:
    """A command as a user's shell has it: nothing in the environment leads to the repository."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("SWIFT_RECOVERY", "PYTHONPATH", "PET_"))}
    environ |= {"OMP_NUM_THREADS": "1", "PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=environ, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == status, f"{command}\n{done.stdout}\n{done.stderr}"
    return done


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that ``SWIFT_TEST_WHEEL`` names; else one of a copy of the sources: building leaves nothing here."""
    if built := os.environ.get("SWIFT_TEST_WHEEL"):
        return Path(built)
    sources = tmp_path_factory.mktemp("sources")
    for name in PACKAGES:
        shutil.copytree(ROOT / name, sources / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, sources)
    options = ("--no-deps", "--no-build-isolation", "--wheel-dir", "dist")
    run(sys.executable, "-m", "pip", "wheel", *options, ".", cwd=sources)
    [found] = (sources / "dist").glob("*.whl")
    return found


@pytest.fixture(scope="module")
def commands(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """``bin`` of a fresh environment with the wheel. Torch and the like come from the environment of the tests, whose
    own install of the project is not followed: a directory that a ``.pth`` names has its ``.pth`` files ignored.
    """
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder)
    python = folder / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", wheel, cwd=folder)
    [site] = folder.glob("lib/python*/site-packages")
    (site / "others.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    yield folder / "bin"
    shutil.rmtree(folder)


def test_the_wheel_has_every_file_of_the_packages(wheel: Path) -> None:
    """Types, tables and pages too; and nothing else."""
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
    files = (path for name in PACKAGES for path in (ROOT / name).rglob("*") if path.is_file())
    wanted = {str(path.relative_to(ROOT)) for path in files if "__pycache__" not in path.parts}
    assert found == wanted
    assert {f"{name}/py.typed" for name in PACKAGES} <= found


@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_a_job_runs_from_the_wheel_and_loses_a_worker(commands: Path, tmp_path: Path) -> None:
    for program in ("swiftrun", "swiftctl"):
        assert run(commands / program, "--version", cwd=tmp_path).stdout == f"{program} {VERSION}\n"
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "faults.json").write_text(dumps([Fault(1, 6, "bucket", "SIGKILL")]))
    ends = []
    for options in ([], ["--faults", "faults.json"]):
        done = run(commands / "swiftrun", "--nproc-per-node=2", *options, "train.py", cwd=tmp_path)
        ends.append(sorted(json.loads(line) for line in re.findall(r"^\[.*\]$", done.stdout, re.MULTILINE)))
    assert "; 1 worker failed" in done.stderr
    assert ends[0] == ends[1] and [rank for rank, *_ in ends[0]] == [0, 1]
    for _, _, files in ends[0]:
        assert all(Path(file).is_relative_to(commands.parent) for file in files), files


def test_what_needs_a_clone_says_so(commands: Path, tmp_path: Path) -> None:
    (tmp_path / "benchmarks" / "lab").mkdir(parents=True)
    (tmp_path / "benchmarks" / "lab" / "__init__.py").touch()  # somebody else's
    for command in ("plan --dp 2", "simulate --help"):
        said = run(commands / "swiftctl", "lab", *command.split(), cwd=tmp_path, status=2).stderr
        assert said.count("\n") == 1, said
        assert said.startswith(f"swiftctl: swiftctl lab {command.split()[0]} needs a clone of the repository"), said
    assert "simulate" in run(commands / "swiftctl", "lab", "--help", cwd=tmp_path).stdout
    assert "COMMAND is missing" in run(commands / "swiftctl", "lab", cwd=tmp_path, status=2).stderr


def test_the_same_commands_run_from_a_clone(tmp_path: Path) -> None:
    """As its console script runs them: from any folder, also one with a package of the same name."""
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "__init__.py").write_text("raise ImportError('the wrong one')")
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); from shared_core.cli.swiftctl import main; "
        f"sys.path.remove({str(ROOT)!r}); sys.exit(main())"
    )
    for command in ("policy", "plan --dp 2 --pp 2 --micro-batches 2 --time-limit 0"):
        assert run(sys.executable, "-c", code, "lab", *command.split(), cwd=tmp_path).stdout.strip()

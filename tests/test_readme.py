"""What the README and the first pages show runs as it stands there, and loses a worker."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from harness import Jobs, armed

from shared_core.faults import Fault
from shared_core.faults.spec import dumps
from tests.support.cluster import Cluster
from tests.support.namespaces import machines, unavailable

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
START = (ROOT / "docs" / "start.md").read_text()
MODES = (ROOT / "docs" / "modes.md").read_text()
#: Complete scripts: python blocks that begin with the name of a file.
SCRIPTS = dict(re.findall(r"```python\n# (train_\w+\.py): [^\n]*\n(.*?)```", START, re.S))


def run(script: Path, *launcher: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    environ = {k: v for k, v in os.environ.items() if not k.startswith("SWIFT_")}
    environ |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | (env or {})
    command = [sys.executable, "-m", *launcher, "--nproc-per-node", "2", str(script)]
    return subprocess.run(command, cwd=script.parent, env=environ, capture_output=True, text=True, timeout=100)


def stock(script: Path) -> subprocess.CompletedProcess[str]:
    """The run under torchrun, whose workers gloo aborts now and then when they have finished."""
    for _ in range(4):
        plain = run(script, "torch.distributed.run")
        if "terminate called without an active exception" not in plain.stderr:
            break
    assert plain.returncode == 0, plain.stderr
    return plain


def taken(folder: Path) -> dict[str, bytes]:
    """The parameters that a script has saved in ``folder``, which are removed."""
    found = {path.name: path.read_bytes() for path in folder.glob("*.pt")}
    for name in found:
        (folder / name).unlink()
    return found


def without_numbers(line: str) -> str:
    """A line of the console with a zero for each number that differs from run to run."""
    return re.sub(r"(pids? |after )[\d., ]+", r"\g<1>0", line)


def test_the_readme_is_short() -> None:
    assert len(README.split()) <= 600


def test_the_commands_that_install_name_what_there_is() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    [torch] = set(re.findall(r"torch==([\d.]+)", (ROOT / "Makefile").read_text()))
    for page in (README, START):
        assert set(re.findall(r"torch==([\d.]+)", page)) == {torch}
        asked = re.findall(r"pip install -e \"\.\[([\w,]+)\]\"", page)
        assert asked and {extra for each in asked for extra in each.split(",")} <= extras.keys()


def test_the_readme_shows_them() -> None:
    assert sorted(SCRIPTS) == ["train_accelerate.py", "train_fabric.py", "train_torch.py"]


@pytest.mark.nightly
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_of_the_readme(name: str, tmp_path: Path) -> None:
    script = tmp_path / name
    # The README does not seed its generators, which two runs that are compared must.
    script.write_text("import torch; torch.manual_seed(int(__import__('os').environ['RANK']))\n" + SCRIPTS[name])
    plain = stock(script)
    assert "mean loss" in plain.stdout
    saved = taken(tmp_path)
    assert list(saved) == (["best.pt"] if name == "train_torch.py" else [])
    faults = tmp_path / "faults.json"
    faults.write_text(dumps([Fault(1, 20, "bucket", "SIGKILL"), Fault(0, 40, "forward", "SIGKILL")]))
    failed = run(script, "shared_core.cli.swiftrun", "--faults", str(faults))
    assert failed.returncode == 0, failed.stderr
    assert "; 2 workers failed" in failed.stderr
    # Ranks print in any order.
    losses = [sorted(re.findall(r"mean loss [\d., best]+", each.stdout)) for each in (plain, failed)]
    assert losses[0] == losses[1]
    assert taken(tmp_path) == saved


@pytest.mark.nightly
def test_the_first_lines_of_the_readme(tmp_path: Path) -> None:
    """The change for Lightning, around a model of Lightning's own, started by ``python train.py``."""
    lines = re.findall(r"```diff\n(.*?)```", README, re.S)[0].splitlines()
    snippet = "\n".join(line[2:] for line in lines if not line.startswith("-"))
    script = tmp_path / "train.py"
    script.write_text(f"""{armed(Fault(1, 5, "bucket", "SIGKILL"))}
from lightning.pytorch.demos.boring_classes import BoringModel
{snippet}
trainer.fit_loop.max_epochs = 1
trainer.fit(BoringModel())
print(f"steps {{trainer.global_step}};")
""")
    environ = {k: v for k, v in os.environ.items() if not k.startswith("SWIFT_")}
    environ |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("steps 16;") == 4, done.stdout
    assert "; 1 worker failed" in done.stderr


@pytest.mark.nightly
def test_the_quick_start_of_the_readme(tmp_path: Path) -> None:
    """Its example, made short and with a failed worker, prints what is quoted there."""
    [name] = re.findall(r"^python (examples/\w+\.py)", README, re.MULTILINE)
    first = "from __future__ import annotations\n"
    script = tmp_path / name
    script.parent.mkdir()
    script.write_text((ROOT / name).read_text().replace(first, first + armed(Fault(1, 2, "bucket", "SIGKILL")), 1))
    environ = {k: v for k, v in os.environ.items() if not k.startswith("SWIFT_") and k != "OMP_NUM_THREADS"}
    command = [sys.executable, name, "--windows", "64", "--epochs", "1"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr
    quoted = re.findall(r"^\[swift\] .*", README, re.MULTILINE)
    said = {without_numbers(line) for line in done.stderr.splitlines()}
    assert len(quoted) == 3 and {without_numbers(line) for line in quoted} <= said, done.stderr


@pytest.mark.nightly
@pytest.mark.skipif(bool(unavailable()), reason=unavailable() or "machines can be made")
def test_several_machines_as_in_the_readme(jobs: Jobs) -> None:
    """Two machines with four workers each, and a spare one."""
    [line] = re.findall(r"## Several machines.*?```bash\nswiftrun (.*?)```", MODES, re.S)
    out = jobs.folder("readme")
    (out / "train.py").write_text(SCRIPTS["train_torch.py"])
    with machines(3) as three:
        cluster = Cluster(jobs.warm, three, out, out / "train.py", command=line.replace("\\\n", " ").split())
        result, statuses = cluster.finish(100.0)
    assert statuses == [0, 0, 0], result.tail()
    said = [(out / f"stdout.{place}.txt").read_text().count("mean loss") for place in range(3)]
    assert sorted(said) == [0, 4, 4], said

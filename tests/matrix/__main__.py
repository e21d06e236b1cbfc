"""Run a chosen part of the tests against each version of torch and Python, each in an environment of its own.

Usage: ``make matrix``, or ``python tests/matrix [CELL ...]``; a cell is ``2.15.0-3.13``. Environments (up to
2.2 GB each) and logs lie under ``runs/matrix``; ``docs/design/versions.md`` gets the table of what ran.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import standins

ROOT = Path(__file__).parents[2]
RUNS = ROOT / "runs" / "matrix"
PAGE = ROOT / "docs" / "design" / "versions.md"
#: torch, and the versions of Python that it is run with.
CELLS = [
    *((torch, "3.11") for torch in ("2.11.0", "2.12.0", "2.13.0", "2.14.1", "2.15.0")),
    ("2.11.0", "3.12"),
    *(("2.15.0", python) for python in ("3.12", "3.13", "3.14")),
]
#: Each way in and each kind of state, with real failures; about ten minutes on two cores.
TESTS = [
    "tests/test_compat.py",
    "tests/comm/test_operations.py",
    "tests/faults/test_faults.py",
    "tests/test_plain_ddp.py",
    "tests/test_features_lightning.py",
    "tests/test_accelerate.py",
    "tests/test_fabric.py",
    "tests/test_variables.py",
    "tests/test_checkpoints_whole_job.py",
    "tests/sharded/test_fully_shard.py",
    "tests/sharded/test_zero.py",
    "tests/pipeline/test_engine.py",
    "tests/test_installed.py",
]
#: The table is between these in the page.
BEGIN, END = "<!-- made by `make matrix` -->\n", "<!-- end -->"


def main() -> int:
    """Returns 1 if a test of any cell failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cells", nargs="*", metavar="CELL", help="such as 2.15.0-3.13; all by default")
    parser.add_argument("--parallel", default="2", metavar="N", help="tests at a time")
    parser.add_argument("--only", action="append", metavar="TEST", help="these tests in the place of the chosen part")
    args = parser.parse_args()
    cells = [(torch, python) for torch, python in CELLS if not args.cells or f"{torch}-{python}" in args.cells]
    if not cells:
        parser.error(f"there is no such cell; there are {', '.join('-'.join(each) for each in CELLS)}")
    results = [run_cell(torch, python, args.parallel, args.only or TESTS) for torch, python in cells]
    if not args.only:
        PAGE.write_text(with_rows(PAGE.read_text(), results))
    print(*(json.dumps(row) for row in results), sep="\n")
    return int(any(row.get("failed") for row in results))


def run_cell(torch: str, python: str, parallel: str, tests: list[str]) -> dict[str, Any]:
    """A row: what was there and how the tests ended, or why there is none."""
    folder = RUNS / f"{torch}-{python}"
    row: dict[str, Any] = {"torch": torch, "python": python, "on": datetime.date.today().isoformat()}
    interpreter = find_python(python)
    if interpreter is None:
        return row | {"why_not": f"there is no Python {python}"}
    try:
        executable = environment(folder, interpreter, torch)
    except subprocess.CalledProcessError as error:
        return row | {"why_not": f"{' '.join(map(str, error.cmd[-3:]))} failed, see {folder.name}.log"}
    report = folder / "report.xml"
    command = [executable, "-m", "pytest", "-n", parallel, "--dist", "worksteal", f"--junitxml={report}", *tests]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with open(RUNS / f"{folder.name}.log", "a") as log:
        subprocess.run(command, cwd=ROOT, env=env, stdout=log, stderr=log, check=False)
    suite = ElementTree.parse(report).getroot()[0].attrib
    ran, failed = int(suite["tests"]), int(suite["failures"]) + int(suite["errors"])
    skipped = int(suite["skipped"])
    return row | {"packages": versions(executable), "ran": ran, "failed": failed, "skipped": skipped}


def find_python(version: str) -> str | None:
    """An interpreter of this version: on the path, or under pyenv."""
    roots = [Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")]
    here = [str(path) for root in roots for path in sorted(root.glob(f"{version}.*/bin/python"))]
    return next(iter(here), None) or shutil.which(f"python{version}")


def environment(folder: Path, interpreter: str, torch: str) -> str:
    """An environment with this torch and all that the tests need, made once. Returns its interpreter.

    With this process's version of Python it has only torch, and finds all other packages in this one's environment.

    Raises:
        subprocess.CalledProcessError: it cannot be made.
    """
    executable, ready = folder / "bin" / "python", folder / "ready"
    if ready.exists():
        return str(executable)
    shutil.rmtree(folder, ignore_errors=True)
    RUNS.mkdir(parents=True, exist_ok=True)
    with open(RUNS / f"{folder.name}.log", "w") as log:

        def call(*words: str | Path) -> None:
            subprocess.run([str(word) for word in words], cwd=ROOT, stdout=log, stderr=log, check=True)

        call(interpreter, "-m", "venv", folder)
        pip = [executable, "-m", "pip", "install", "--disable-pip-version-check"]
        call(*pip, "--no-deps", f"torch=={torch}")
        [site_packages] = folder.glob("lib/python*/site-packages")
        if (site_packages / "torch" / "lib" / "libtorch_cuda.so").exists():
            [metadata] = site_packages.glob("torch-*.dist-info/METADATA")
            text = metadata.read_text()
            toolkit = re.search(r"^Requires-Dist: cuda-toolkit\[.*\]==(\d+\.\d+)", text, re.MULTILINE)
            if toolkit is not None:
                call(*pip, "--no-deps", f"nvidia-cuda-runtime=={toolkit[1]}.*")
            metadata.write_text(re.sub(r"^Requires-Dist: (cuda-|nvidia-|triton).*\n", "", text, flags=re.MULTILINE))
            standins.make(site_packages)
        if python_of(interpreter) == sys.version_info[:2]:
            (site_packages / "shared.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
            call(*pip[:3], "uninstall", "--yes", "setuptools")  # Python's own comes first, and is too old for a wheel
        else:
            call(*pip, "--editable", ".[all,test]")
    ready.touch()
    return str(executable)


def python_of(interpreter: str) -> tuple[int, ...]:
    """Major and minor version."""
    code = "import sys; print(*sys.version_info[:2])"
    found = subprocess.run([interpreter, "-c", code], check=True, capture_output=True, text=True)
    return tuple(map(int, found.stdout.split()))


def versions(executable: str) -> dict[str, str]:
    """Of the frameworks that an environment has."""
    code = (
        "import json, importlib.metadata as m, platform; has = {d.name: d.version for d in m.distributions()}; "
        "print(json.dumps({'python': platform.python_version()} | {name: has[name] for name in "
        "('lightning', 'accelerate', 'transformers', 'deepspeed') if name in has}))"
    )
    found: dict[str, str] = json.loads(subprocess.run([executable, "-c", code], check=True, capture_output=True).stdout)
    return found


def with_rows(page: str, results: list[dict[str, Any]]) -> str:
    """The page with these rows in the place of those of the same versions."""
    before, _, rest = page.partition(BEGIN)
    table, _, after = rest.partition(END)
    rows = {tuple(line.split(" | ")[:2]): line for line in table.splitlines() if re.match(r"\| \d", line)}
    for row in results:
        line = as_line(row)
        rows[tuple(line.split(" | ")[:2])] = line
    head = "| torch | Python | tests that ran | passed | failed | skipped | on |\n" + "|---" * 7 + "|\n"
    lines = "".join(f"{rows[key]}\n" for key in sorted(rows))
    others = [row["packages"].items() for row in results if "packages" in row]
    named = ", ".join(f"{name} {version}" for name, version in others[-1] if name != "python") if others else ""
    told = f"\nBeside them, in the newest row: {named}.\n" if named else table[table.find("\nBeside them") :]
    return f"{before}{BEGIN}{head}{lines}{told}{END}{after}"


def as_line(row: dict[str, Any]) -> str:
    """A row of the table."""
    if "why_not" in row:
        return f"| {row['torch']} | {row['python']} | not run: {row['why_not']} | | | | {row['on']} |"
    passed = row["ran"] - row["failed"] - row["skipped"]
    ran, failed, skipped = row["ran"] - row["skipped"], row["failed"], row["skipped"]
    return f"| {row['torch']} | {row['python']} | {ran} | {passed} | {failed} | {skipped} | {row['on']} |"


if __name__ == "__main__":
    sys.exit(main())

"""Runs torch's own suite for backends, on plain gloo and over this product, and prints what passes where.

    python -m tests.suites.torch_backends [--only WORD] [--processes 4]

All tests that pass on plain gloo on a CPU must pass here. The suite needs ``expecttest``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.support.processes import MARK, kill_marked

ROOT = Path(__file__).resolve().parents[2]
#: A test that lasts longer has failed, and a job whose processes import for longer, in seconds.
_LONGEST_S, _LONGEST_START_S = 150.0, 600.0
Outcomes = dict[str, tuple[str, str]]


def names(only: str = "") -> list[str]:
    """Tests of the suite."""
    os.environ.update({"BACKEND": "gloo", "WORLD_SIZE": "4", "TEMP_DIR": tempfile.gettempdir()})
    from torch.testing._internal.distributed.distributed_test import DistributedTest

    suite = DistributedTest._DistTestBase
    return [name for name in sorted(dir(suite)) if name.startswith("test_") and only in name]


def run(tests: Sequence[str], *, stock: bool, processes: int = 4) -> Outcomes:
    """How each test ends (passed, skipped, failed), and why."""
    found: Outcomes = {}
    while len(found) < len(tests):
        left = [name for name in tests if name not in found]
        # Members that fail a monitored barrier have begun one collective more than those that did not come, on plain
        # gloo too: what follows such a test in its processes is another program in each rank.
        alone = [name for name in left if "monitored_barrier" in name]
        left = [name for name in left if name not in alone] or alone[:1]
        with tempfile.TemporaryDirectory(prefix="torch-backends-") as folder:
            said, tail = _job(left, Path(folder), stock=stock, processes=processes)
            apart = (Path(folder) / "apart").exists()
        found |= said
        if len(said) < len(left) and not apart:
            found[left[len(said)]] = "failed", f"the job ended, or the test hangs:\n{tail}"
    return found


def _job(tests: Sequence[str], folder: Path, *, stock: bool, processes: int) -> tuple[Outcomes, str]:
    """Run tests until ranks differ in one. Returns how those ended that all ranks have ended, and the last output."""
    for name in ("barrier", "test_dir"):
        (folder / name).mkdir()
    (folder / "tests.json").write_text(json.dumps(list(tests)))
    mark = os.environ.get(MARK, "") + uuid.uuid4().hex[:8]
    env = {key: value for key, value in os.environ.items() if not key.startswith("SWIFT_")}
    env |= {"BACKEND": "gloo", "TEMP_DIR": str(folder), "OMP_NUM_THREADS": "1", MARK: mark}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    if stock:
        env["SWIFT_BASELINE"] = "1"
        launcher = ["torch.distributed.run", "--standalone"]
    else:
        launcher = ["shared_core.cli.swiftrun", "--standbys=0", f"--events={folder / 'events.jsonl'}"]
    worker = str(Path(__file__).with_name("torch_backends_worker.py"))
    command = [sys.executable, "-m", *launcher, f"--nproc-per-node={processes}", worker, str(folder / "tests.json")]
    with (folder / "output").open("wb") as output:
        job = subprocess.Popen(command, env=env, stdout=output, stderr=subprocess.STDOUT, cwd=folder)
        ended, since = 0, time.monotonic()
        while job.poll() is None:
            time.sleep(0.2)
            if (now := _ended(folder, processes)) > ended:
                ended, since = now, time.monotonic()
            if time.monotonic() - since > (_LONGEST_S if ended else _LONGEST_START_S):
                kill_marked(mark)
        kill_marked(mark)
    outcomes: Outcomes = {}
    for number in range(_ended(folder, processes)):
        said = [json.loads((folder / f"said.{number}.{rank}").read_text()) for rank in range(processes)]
        outcomes[tests[number]] = _together(said)
    return outcomes, (folder / "output").read_text(errors="replace")[-1500:]


def _ended(folder: Path, processes: int) -> int:
    """How many tests all ranks have ended."""
    number = 0
    while all((folder / f"said.{number}.{rank}").exists() for rank in range(processes)):
        number += 1
    return number


def _together(said: Sequence[Sequence[str]]) -> tuple[str, str]:
    """How a test has ended, from how it has in each rank."""
    for outcome in ("failed", "skipped"):
        for each, why in said:
            if each == outcome:
                return outcome, why
    return "passed", ""


def table(stock: Outcomes, here: Outcomes) -> str:
    """What passes on plain gloo, and how it ends here."""
    rows = [f"{name:70} {here[name][0]}" for name in stock if stock[name][0] == "passed"]
    counts = Counter(here[name][0] for name in stock if stock[name][0] == "passed")
    told = ", ".join(f"{number} {outcome}" for outcome, number in sorted(counts.items()))
    return "\n".join([*rows, f"{len(rows)} tests pass on plain gloo; here: {told}"])


def main() -> int:
    """Run the suite; the exit status is 1 if a test that passes on plain gloo does not here."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="part of the names of the tests to run")
    parser.add_argument("--processes", type=int, default=4, help="workers of each job")
    args = parser.parse_args()
    stock = run(names(args.only), stock=True, processes=args.processes)
    passing = [name for name, (outcome, _) in stock.items() if outcome == "passed"]
    here = run(passing, stock=False, processes=args.processes)
    print(table(stock, here))
    failed = [name for name in passing if here[name][0] != "passed"]
    for name in failed:
        print(f"\n--- {name}: {here[name][0]}\n{here[name][1]}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())

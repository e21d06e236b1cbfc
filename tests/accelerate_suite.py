"""``python tests/accelerate_suite.py``: all scripts of ``accelerate.test_utils.scripts``, stock and with the plugin.

Prints a table, and ends with status 1 if one fails with the plugin that passes stock. Names choose some of them.
Scripts that load models or data from the hub are listed and not run.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "accelerate.test_utils.scripts"
#: Functions of scripts of which the others run. On a CPU ranks with uneven inputs wait for ever; ``StatefulDataLoader``
#: is refused by name (tests/loaders/test_kinds.py).
LEFT_OUT = {
    "test_distributed_data_loop": (
        "test_can_join_uneven_inputs",
        "test_join_can_override_even_batches",
        "test_join_can_override_for_mixed_type_dataloaders",
        "test_join_raises_warning_for_iterable_when_overriding_even_batches",
        "test_stateful_dataloader",
        "test_stateful_dataloader_save_state",
    ),
}
_RUN = Path(__file__).parent / "scripts" / "acc_suite.py"
_ROOT = Path(__file__).parents[1]
_LAUNCHERS = {
    "stock": ("torch.distributed.run", "--standalone", "--nproc-per-node=2"),
    "plugin": ("shared_core.cli.swiftrun", "--nproc-per-node=2", "--standbys=1", "--events="),
}


@dataclass(frozen=True)
class Outcome:
    """How one script ended, in one way to run it.

    Attributes:
        passed: with status 0, in time.
        seconds: how long it took.
        why: the last line that names an error.
    """

    passed: bool
    seconds: float
    why: str = ""


def _folder() -> Path:
    spec = importlib.util.find_spec(PACKAGE)
    assert spec is not None and spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0])


def modules() -> list[str]:
    """All scripts, without those that are imported only."""
    folder = _folder()
    found = sorted(path.relative_to(folder).with_suffix("") for path in folder.rglob("test_*.py"))
    return [f"{PACKAGE}.{'.'.join(path.parts)}" for path in found]


def downloads(module: str) -> bool:
    """Whether a script loads models or data from the hub."""
    source = _folder().joinpath(*module.removeprefix(f"{PACKAGE}.").split(".")).with_suffix(".py").read_text()
    return bool(re.search(r"\b(from_pretrained|load_dataset)\(", source))


def reason(text: str) -> str:
    """Why a script has failed, from its output: the first line that names an error of its own."""
    if missing := re.search(r"No module named '(\w+)'|Please install (\w+)", text):
        return f"needs the package {missing[1] or missing[2]}"
    if re.search(r"\bMULTI_CPU\b|Torch not compiled with CUDA|at least two accelerators", text):
        return "needs GPUs"
    named = (
        line.strip() for line in text.splitlines() if re.search(r"\w(Error|Failed|Unsupported|Exception)\b.*:", line)
    )
    return next((line for line in named if "ChildFailedError" not in line), "?")


def run(module: str, way: str, timeout_s: float) -> Outcome:
    """Run one script with two workers on the CPU.

    Args:
        module: the script.
        way: ``stock`` or ``plugin``.
        timeout_s: longest time, in seconds.
    """
    env = {name: value for name, value in os.environ.items() if not name.startswith(("SWIFT_", "ACCELERATE_"))}
    env |= {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    env |= {"SWIFT_BASELINE": "1"} if way == "stock" else {}
    env["PYTHONPATH"] = os.pathsep.join([str(_ROOT), env.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", *_LAUNCHERS[way], str(_RUN), module, *LEFT_OUT.get(module.rpartition(".")[2], ())]
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as log:
        try:
            ended = subprocess.run(command, cwd=folder, env=env, stdout=log, stderr=log, timeout=timeout_s)
            status, why = ended.returncode, ""
        except subprocess.TimeoutExpired:
            status, why = 1, f"not done after {timeout_s:.0f} s"
        log.seek(0)
        text = log.read().decode(errors="replace")
    if os.environ.get("SHOW"):
        sys.stderr.write(text)
    return Outcome(status == 0, time.monotonic() - began, "" if status == 0 else why or reason(text))


def rows(names: list[str], timeout_s: float) -> Iterator[tuple[str, Outcome | None, Outcome | None]]:
    """Each script, how it ended stock, and with the plugin; None where it is not run, or does not pass stock."""
    for module in modules():
        if names and module.rpartition(".")[2] not in names:
            continue
        stock = None if downloads(module) else run(module, "stock", timeout_s)
        yield module, stock, run(module, "plugin", timeout_s) if stock is not None and stock.passed else None


def main(names: list[str], timeout_s: float = 600.0) -> int:
    """Print the table; the status."""
    worst = 0
    print("| script | stock | with the plugin | why not |\n|---|---|---|---|", flush=True)
    for module, stock, ours in rows(names, timeout_s):
        name = module.removeprefix(f"{PACKAGE}.")
        told = "not run" if ours is None else f"{'passes' if ours.passed else '**fails**'} ({ours.seconds:.0f} s)"
        if stock is None:
            how, why = "not run", "downloads models or data"
        else:
            why = stock.why or (ours.why if ours is not None else "")
            if left_out := LEFT_OUT.get(name):
                why = why or f"without {', '.join(left_out)}, which need GPUs or are refused"
            how = f"{'passes' if stock.passed else 'fails'} ({stock.seconds:.0f} s)"
        print(f"| {name} | {how} | {told} | {why[:220]} |", flush=True)
        worst |= ours is not None and not ours.passed
    return int(worst)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The injector on real processes: where it strikes, how, and that it strikes once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shared_core.errors import ConfigError
from shared_core.faults import Fault, FaultInjected, inject
from shared_core.faults.spec import EXIT_CODE, dumps
from tests.support.runner import ROOT

STEPS = """
from shared_core.faults import inject
for step in range(1, 6):
    inject.point("step_boundary")
    for n in (1, 2, 3):
        inject.point("collective.before")
        print(step, n, flush=True)
"""

UPDATE = """
import torch
from shared_core.faults import inject
weights = [torch.ones(3, requires_grad=True) for _ in range(4)]
optimizers = [torch.optim.SGD(weights[:2], 0.1), torch.optim.SGD(weights[2:], 0.1)]
for weight in weights:
    weight.grad = torch.ones(3)
for step in (1, 2):
    inject.point("step_boundary")
    for optimizer in optimizers:
        with inject.update_window():
            optimizer.step()
    print(step, [weight[0].item() for weight in weights], flush=True)
"""


def _run(code: str, faults: list[Fault], tmp_path: Path, **env: str) -> tuple[int, list[str], list[dict[str, Any]]]:
    """Exit status, lines printed and strikes of a process that is rank 1."""
    struck = tmp_path / "struck.jsonl"
    process = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ
        | inject.variables(faults)
        | {"RANK": "1", inject.STRUCK: str(struck), "PYTHONPATH": str(ROOT)}
        | env,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return process.returncode, process.stdout.splitlines(), inject.read_struck(struck)


@pytest.fixture(autouse=True)
def _disarmed() -> Iterator[None]:
    yield
    inject.disarm()


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("SIGKILL", -signal.SIGKILL),
        ("SIGTERM", -signal.SIGTERM),
        ("os._exit", EXIT_CODE),
        ("exception", 1),
        ("segfault", -signal.SIGSEGV),
    ],
)
def test_each_kind_at_the_nth_occurrence_of_a_step(kind: str, status: int, tmp_path: Path) -> None:
    fault = Fault(1, 3, "collective.before", kind, nth=2)
    got, lines, struck = _run(STEPS, [Fault(0, 1, "step_boundary", "SIGKILL"), fault], tmp_path)
    assert got == status
    assert lines[-1] == "3 1"
    assert [(s["index"], s["fault"], s["boundaries"]) for s in struck] == [(1, fault.to_dict(), 3)]


def test_sigstop_stops_and_leaves_a_process_that_continues(tmp_path: Path) -> None:
    env = os.environ | {"RANK": "1", "PYTHONPATH": str(ROOT), inject.STRUCK: str(tmp_path / "struck")}
    env |= inject.variables([Fault(1, 2, "step_boundary", "SIGSTOP")])
    process = subprocess.Popen([sys.executable, "-c", STEPS], env=env, stdout=subprocess.PIPE, text=True)
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    os.kill(process.pid, signal.SIGCONT)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    assert out.splitlines()[-1] == "5 3"


def test_a_fault_strikes_once_in_a_job(tmp_path: Path) -> None:
    faults = [Fault(1, 2, "step_boundary", "SIGKILL"), Fault(1, 4, "step_boundary", "SIGKILL")]
    assert [_run(STEPS, faults, tmp_path)[0] for _ in range(3)] == [-9, -9, 0]
    assert [s["boundaries"] for s in inject.read_struck(tmp_path / "struck.jsonl")] == [2, 4]


def test_a_fault_of_another_incarnation_waits_for_it(tmp_path: Path) -> None:
    faults = [Fault(1, 2, "step_boundary", "SIGKILL", incarnation=1)]
    assert _run(STEPS, faults, tmp_path)[0] == 0
    assert _run(STEPS, faults, tmp_path, SWIFT_RECOVERY_INCARNATION="1")[0] == -9


@pytest.mark.parametrize("launcher", [None, "0", "1", "x", "2147483647"])
def test_the_environment_alone_arms_nothing(launcher: str | None, tmp_path: Path) -> None:
    """As under torchrun, where somebody has set the variable."""
    env = os.environ | {"RANK": "1", inject.FAULTS: dumps([Fault(1, 2, "step_boundary", "os._exit")])}
    env |= {"PYTHONPATH": str(ROOT)} | ({} if launcher is None else {inject.LAUNCHER: launcher})
    assert subprocess.run([sys.executable, "-c", STEPS], env=env, capture_output=True).returncode == 0


@pytest.mark.parametrize(
    "content", [b"{}", b"[{}]", b"\xff", b"[", b'[{"rank": 1, "step": 1, "point": "?", "kind": "SIGKILL"}]']
)
def test_a_file_that_cannot_be_read_is_an_error(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "faults.json").write_bytes(content)
    with pytest.raises(ConfigError, match="fault"):
        inject.read_file(tmp_path / "faults.json")


def test_a_grandchild_of_the_launcher_is_armed(tmp_path: Path) -> None:
    """``swiftrun --no-python`` may start a shell script that starts the worker."""
    env = (
        os.environ
        | inject.variables([Fault(1, 2, "step_boundary", "os._exit")])
        | {"RANK": "1", "PYTHONPATH": str(ROOT)}
    )
    command = ["sh", "-c", '"$@"; exit $?', "sh", sys.executable, "-c", STEPS]
    assert subprocess.run(command, env=env, capture_output=True).returncode == EXIT_CODE


@pytest.mark.nightly
@pytest.mark.parametrize("nth", [1, 3])
def test_inside_the_updates_of_two_optimizers(nth: int, tmp_path: Path) -> None:
    """Plain SGD is one operation a parameter; the third is the second optimizer's first."""
    status, lines, struck = _run(UPDATE, [Fault(1, 2, "update.during", "SIGKILL", nth=nth)], tmp_path)
    assert (status, len(lines), struck[0]["boundaries"]) == (-9, 1, 2)


def test_update_stops_between_parameters() -> None:
    torch = pytest.importorskip("torch")
    weights = [torch.ones(3, requires_grad=True) for _ in range(3)]
    for weight in weights:
        weight.grad = torch.ones(3)
    inject.arm([Fault(0, 1, "update.during", "exception", nth=2)], rank=0)
    inject.point("step_boundary")
    with pytest.raises(FaultInjected, match="rank 0 at update.during, step 1"), inject.update_window():
        torch.optim.SGD(weights, 0.5, foreach=False).step()
    assert [round(weight[0].item(), 3) for weight in weights] == [0.5, 1.0, 1.0]


def test_a_replacement_counts_from_where_it_joined() -> None:
    inject.arm([Fault(0, 7, "bucket", "exception", incarnation=1)], rank=0, incarnation=1)
    inject.point("bucket")
    inject.set_step(7)
    with pytest.raises(FaultInjected):
        inject.point("bucket")
    inject.point("bucket")


def test_forming_the_first_groups_is_no_recovery() -> None:
    inject.arm([Fault(0, -1, "recovery.installed", "exception")], rank=0)
    inject.point("recovery.installed")
    inject.point("step_boundary")
    with pytest.raises(FaultInjected):
        inject.point("recovery.installed")


def test_children_of_a_worker_are_not_struck(tmp_path: Path) -> None:
    code = "import os\nfrom shared_core.faults import inject\ninject.point('startup')\npid = os.fork()\n"
    code += "if pid == 0: inject.point('step_boundary')\nelse: print(os.waitpid(pid, 0)[1], flush=True)\n"
    assert _run(code, [Fault(1, 1, "step_boundary", "SIGKILL")], tmp_path)[:2] == (0, ["0"])


def test_a_delayed_fault_strikes_wherever_the_worker_is(tmp_path: Path) -> None:
    code = (
        "from shared_core.faults import inject\nimport time\ninject.point('step_boundary')\nprint('on', flush=True)\n"
    )
    code += "time.sleep(60)\n"
    begin = time.monotonic()
    status, lines, _ = _run(code, [Fault(1, 1, "step_boundary", "SIGKILL", delay_s=0.1)], tmp_path)
    assert (status, lines) == (-9, ["on"])
    assert time.monotonic() - begin < 30


def test_the_strike_is_in_the_events(tmp_path: Path) -> None:
    events = tmp_path / "events.jsonl"
    _run(STEPS, [Fault(1, 2, "step_boundary", "SIGKILL")], tmp_path, SWIFT_RECOVERY_EVENTS=str(events))
    (event,) = [json.loads(line) for line in events.read_text().splitlines()]
    assert (event["kind"], event["rank"], event["fields"]["fault"]["kind"]) == ("fault", 1, "SIGKILL")

"""What a user reads on the console, line by line, against ``golden/console.txt``.

After a change of the lines that is meant: ``SWIFT_TESTS_GOLDEN=write pytest tests/test_console.py -m ''``.
"""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import SCRIPTS, Jobs

from shared_core.config import SwiftConfig
from shared_core.faults import Fault
from shared_core.launcher.console import ConsoleReporter
from shared_core.protocol.failure_policy import AS_ANY
from tests.support.cluster import Cluster
from tests.support.namespaces import machines, unavailable
from tests.support.runner import JobResult

GOLDEN = Path(__file__).parent / "golden" / "console.txt"
HEAD = "=== "


def normalised(text: str, out: Path) -> str:
    """Without what differs from run to run, and what only a test prints."""
    # A machine that has much to do makes every wait long.
    test_only = re.compile(
        r"fault injector|^\[swift\] (waiting|.* waits?) for |"
        r"\[c10d\] The hostname of the client socket cannot be retrieved"
    )
    lines = [line for line in text.splitlines() if not test_only.search(line)]
    text = "\n".join(lines).replace(f"{out}/", "").replace(f"{SCRIPTS}/", "")
    text = re.sub(r"\bpids? \d[\d, ]*", lambda found: re.sub(r"\d+", "PID", found[0]), text)
    text = re.sub(r"[\w.-]+ \((\d+\.)+(\d+)\)", r"HOST (ADDRESS.\2)", text)
    text = re.sub(r"step boundary \d+", "step boundary N", text)
    text = re.sub(r"(\w\.py):\d+\)", r"\1:LINE)", text)
    return re.sub(r"\d+\.\d+ s\b", "TIME s", text).strip() + "\n"


def sections() -> dict[str, str]:
    """What the file holds, by name."""
    found = re.split(rf"^{HEAD}(.*)\n", GOLDEN.read_text() if GOLDEN.exists() else "", flags=re.M)
    return dict(zip(found[1::2], found[2::2], strict=True))


def check(name: str, said: str) -> None:
    known = sections()
    if os.environ.get("SWIFT_TESTS_GOLDEN") == "write":
        known[name] = said
        GOLDEN.write_text("".join(f"{HEAD}{each}\n{text}" for each, text in sorted(known.items())))
    assert said == known.get(name), f"{name}: the console says\n{said}"


ONE = [Fault(1, 4, "bucket", "SIGKILL")]
CASES: dict[str, Callable[[Jobs], JobResult]] = {
    "replace": lambda jobs: jobs.run("plain_ddp.py", nproc=3, faults=ONE),
    "restart": lambda jobs: jobs.run(
        "plain_ddp.py",
        faults=[Fault(1, 7, "bucket", "SIGKILL")],
        launcher_args=["--on-failure=restart", "--checkpoint-dir=checkpoints"],
        env={"SWIFT_RECOVERY_CHECKPOINT_EVERY_STEPS": "4"},
    ),
    "shrink and grow": lambda jobs: jobs.run(
        "resize.py",
        nproc=3,
        faults=ONE,
        args=["--epochs", "8", "--until", "3"],
        launcher_args=["--on-failure=shrink"],
        env={"SWIFT_RECOVERY_RESIZE_GROW_AFTER_S": "3"},
    ),
    "reroute": lambda jobs: jobs.run(
        "survivor_group.py",
        faults=[Fault(1, 4, "survivor_group.wait", "SIGKILL")],
        launcher_args=["--on-failure=reroute"],
    ),
}


@pytest.mark.parametrize(
    "name", [name if name == "replace" else pytest.param(name, marks=pytest.mark.nightly) for name in CASES]
)
def test_a_life_with_a_failure(name: str, jobs: Jobs) -> None:
    """Everything that the launcher, the workers and the libraries below them write, also to standard error itself."""
    result = CASES[name](jobs)
    assert result.status == 0 and result.struck, result.tail()
    check(name, normalised(result.stderr, result.out))
    assert len({event.run for event in result.events}) == 1 and result.events[0].run, "all attempts are one run"


def test_no_wait_is_silent() -> None:
    now, said = [1000.0], list[str]()
    console_reporter = ConsoleReporter(said.append, now[0], lambda: now[0])

    def looks_at(second: float) -> list[str]:
        now[0] = 1000.0 + second
        del said[:]
        console_reporter.look()
        return said

    console_reporter.starts("train.py", 2, {0: 7, 1: 8}, SwiftConfig(), None)
    now[0] = 1099.0
    console_reporter.failed(1, "killed by SIGKILL", now[0], 8)
    assert looks_at(103) == []
    [line] = looks_at(104.5)
    assert line.endswith("rank 1 failed (pid 8: killed by SIGKILL), and its replacement is not started yet")
    console_reporter.replacement(1, 9)
    assert looks_at(150) == []
    [line] = looks_at(165)
    assert line.startswith("waiting for 66 s now: ") and line.endswith(
        "(pid 9) has been running the script up to the training loop for 60 s"
    )
    console_reporter.report({"rank": 1, "time": now[0]})
    assert said[1:] == ["rank 1 is back after 66.00 s; 0 steps lost (pid 8: killed by SIGKILL; now pid 9)"]
    assert looks_at(999) == []


def test_one_worker_has_no_replica_and_is_told_so() -> None:
    for folder, answer in ((None, "from scratch; set --checkpoint-dir"), ("kept", "from the newest checkpoint")):
        said: list[str] = []
        config = SwiftConfig.from_dict({"checkpoint.dir": folder} if folder else {})
        ConsoleReporter(said.append, 0.0, lambda: 0.0).starts("train.py", 1, {0: 7}, config, None)
        assert "1 worker runs train.py (pid 7); no replica: a crash restarts" in said[0] and answer in said[0]


def test_the_last_line_names_the_command_for_a_report() -> None:
    def last(events: str | None, reason: str = "") -> str:
        said: list[str] = []
        reporter = ConsoleReporter(said.append, 0.0, lambda: 0.0)
        reporter.starts("train.py", 2, {0: 7, 1: 8}, SwiftConfig(), events)
        reporter.fails(reason) if reason else reporter.succeeds(2)
        return said[-1]

    assert last(f"{os.getcwd()}/my events.jsonl").endswith(
        "no worker failed; report: swiftctl report 'my events.jsonl'"
    )
    assert last("events.jsonl", "it died").endswith("it died; report: swiftctl report events.jsonl")
    assert last("events.jsonl", f"it raised ConfigError{AS_ANY}").endswith(AS_ANY)
    assert last(None).endswith("no worker failed")


@pytest.mark.parametrize(("env", "colored"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)])
def test_lines_are_colored_on_a_terminal_only(env: dict[str, str], colored: bool) -> None:
    terminal, its_end = pty.openpty()
    code = "from shared_core.events import console; console('told\\033[31m')"
    environ = {key: value for key, value in os.environ.items() if key != "NO_COLOR"} | {"TERM": "xterm"} | env
    done = subprocess.run([sys.executable, "-c", code], env=environ, stderr=its_end, check=True)
    os.close(its_end)
    with open(terminal, "rb") as file:
        line = file.readline()
    assert line == (b"\033[36m[swift] told\\x1b[31m\033[0m\r\n" if colored else b"[swift] told\\x1b[31m\r\n")
    done = subprocess.run([sys.executable, "-c", code], env=environ, stderr=subprocess.PIPE, check=True)
    assert done.stderr == b"[swift] told\\x1b[31m\n"


def test_failures_that_follow_each_other_are_one_line() -> None:
    said: list[str] = []
    console_reporter = ConsoleReporter(said.append, 1010.0, lambda: 1010.0)
    console_reporter.failed(1, "killed by SIGKILL", 1001.0, 8)
    console_reporter.replacement(1, 18)
    console_reporter.failed(0, "exited with code 3", 1002.0, 7)
    console_reporter.failed(1, "killed by SIGSEGV", 1003.0, 18)  # the replacement, too
    for rank in (0, 1):
        console_reporter.replacement(rank, 20 + rank)
    console_reporter.report({"rank": 1, "pid": 18, "time": 1002.9})  # heard late
    console_reporter.report({"rank": 1, "pid": 21, "time": 1004.0})
    assert said == []
    console_reporter.report({"rank": 0, "time": 1004.5})
    why = "rank 0, pid 7: exited with code 3; now pid 20; rank 1, pid 18: killed by SIGSEGV; now pid 21"
    assert said == [f"ranks 0 and 1 are back after 3.50 s; 0 steps lost ({why})"]
    console_reporter.failed(0, "killed by SIGKILL", 1005.0, 20)
    console_reporter.fails("rank 0 died 3 times in a row")
    assert said[1:] == [
        "rank 0 failed (pid 20: killed by SIGKILL)",
        "the job failed after 0.0 s: rank 0 died 3 times in a row",
    ]


@pytest.mark.nightly
def test_a_job_that_fails(jobs: Jobs) -> None:
    """Its traceback, and torchrun's report of it, stand between the lines."""
    faults = [Fault(1, 4, "forward", "exception"), Fault(1, 4, "forward", "exception", incarnation=1)]
    result = jobs.run("plain_ddp.py", faults=faults)
    assert result.status == 1, result.tail()
    said = [line for line in result.stderr.splitlines() if line.startswith("[swift]")]
    check("failure", normalised("\n".join(said), result.out))


@pytest.mark.nightly
@pytest.mark.skipif(bool(unavailable()), reason=unavailable() or "machines can be made")
def test_a_machine_that_fails(jobs: Jobs) -> None:
    """Three machines, of which the last one waits as a spare."""
    out = jobs.folder("console")
    with machines(3) as made:
        cluster = Cluster(jobs.warm, made, out, SCRIPTS / "plain_ddp.py", args=["--norm", "--steps", "150"])
        cluster.until(lambda: cluster.boundaries(2) >= 20)
        [spare] = [place for place in (1, 2) if "as a spare" in cluster.said(place)]
        made[3 - spare].kill()
        result, statuses = cluster.finish()
    assert sorted(statuses) == [-9, 0, 0], result.tail()
    places = {"first": 0, "failed": 3 - spare, "spare": spare}
    said = normalised("".join(f"--- {who}\n{cluster.said(place)}" for who, place in places.items()), out)
    for who, place in places.items():  # either may have come first
        said = said.replace(f"(ADDRESS.{place + 1})", f"(ADDRESS of the {who})")
    check("machine", said)

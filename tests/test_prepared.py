"""A hot standby takes a failed rank's place: the bits are those of the run without a failure,
and it has served.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from harness import Jobs

from shared_core.config import SwiftConfig
from shared_core.faults import ANY_STEP, Fault
from shared_core.protocol.preparing import Measured, decide
from shared_core.system.process import machine_bytes, private_bytes
from tests.support.report import AWAIT
from tests.support.runner import JobResult, check_survivors, compare, unconfirmed

PLAIN = ["--norm"]
PIPELINE = ["--tied", "--clip", "0.5", "--checkpointing", "1", "--schedule", "--evaluate"]
GIB = 1 << 30
#: Rank 1 is killed in the fifth batch, before which a standby was prepared.
KILLED, AT_4 = Fault(1, 5, "bucket", "SIGKILL"), {4: (1, 0)}


def run(
    jobs: Jobs,
    script: str,
    faults: Sequence[Fault],
    awaited: dict[int, tuple[int, int]],
    *,
    prepared: int | str = 1,
    nproc: int = 2,
    args: Sequence[str] = PLAIN,
) -> list[tuple[int, str]]:
    """Rank of each replacement, and where its process came from; the result is that of the run without a failure.

    Args:
        awaited: by number of a forward pass: hot standbys that workers wait for there, and how many failed
            before.
    """
    env = {"SWIFT_RECOVERY_STANDBY_PREPARED": str(prepared), AWAIT: json.dumps(awaited)}
    result = jobs.run(script, nproc=nproc, faults=faults, env=env, args=args)
    reference = jobs.reference(script, nproc=nproc, args=args)
    compare(result, reference)
    failed_spares = [fault for fault in faults if fault.point.startswith("spare.")]
    assert len(unconfirmed(result)) == len(failed_spares), "\n".join([*unconfirmed(result), result.tail()])
    struck = {fault.rank for fault in faults}
    spares = {event.rank for event in result.kinds("prepared")}  # they are processes that ran the script, too
    check_survivors(result, reference, struck | spares)
    [start] = result.kinds("start")
    survivors = {str(rank): report["pid"] for rank, report in result.reports.items() if rank not in struck}
    assert survivors.items() <= start.fields["pids"].items(), result.tail()
    said = [line for line in result.stderr.splitlines() if "the hot standby of rank" in line]
    assert len(said) == len(failed_spares), result.tail()
    _check_output(result)
    return [(event.rank, event.fields["how"]) for event in result.kinds("replacement_start")]


def _check_output(result: JobResult) -> None:
    """What a standby writes is shown once it is a replacement."""
    replacements = result.kinds("replacement_start")
    # Two workers share a pipe: their lines may be joined.
    shown = re.findall(r"rank \d is ready", result.stdout)
    if shown:
        first = len(result.reports)
        assert len(shown) == first + len(replacements), result.tail()


def test_a_standby_fails_while_it_waits(jobs: Jobs) -> None:
    """One line, and another one is prepared."""
    faults = [KILLED, Fault(1, ANY_STEP, "spare.waits", "SIGKILL", incarnation=1)]
    assert run(jobs, "plain_ddp.py", faults, {4: (1, 1)}) == [(1, "prepared")]


@pytest.mark.nightly
def test_a_standby_fails_while_it_prepares(jobs: Jobs) -> None:
    faults = [KILLED, Fault(1, ANY_STEP, "spare.prepares", "exception", incarnation=1)]
    assert run(jobs, "plain_ddp.py", faults, {4: (1, 1)}) == [(1, "prepared")]


@pytest.mark.nightly
def test_two_ranks_fail_and_one_has_a_standby(jobs: Jobs) -> None:
    faults = [Fault(3, 5, "bucket", "SIGKILL"), Fault(2, 5, "bucket", "SIGKILL")]
    replacements = run(jobs, "plain_ddp.py", faults, AT_4, nproc=4)
    assert sorted(replacements) == [(2, "standby"), (3, "prepared")]


@pytest.mark.nightly
def test_a_slow_start_is_prepared_for_by_itself(jobs: Jobs) -> None:
    args = [*PLAIN, "--startup", "2.2"]
    assert run(jobs, "plain_ddp.py", [KILLED], AT_4, prepared="auto", args=args) == [(1, "prepared")]


#: Script, workers, its arguments, fault in the rank that has a standby, forward pass before which that is prepared.
SCRIPTS: dict[str, tuple[str, int, list[str], Fault, int]] = {
    "accelerate": ("acc.py", 2, [], Fault(1, 14, "bucket", "SIGKILL"), 13),
    "lightning": ("lit.py", 2, ["--feature", "all"], Fault(1, 6, "bucket", "SIGKILL"), 5),
    "transformers": ("hf_trainer.py", 2, [], Fault(1, 6, "bucket", "SIGKILL"), 5),
    "pipeline": ("pipe.py", 4, PIPELINE, Fault(3, 4, "pipe.backward", "SIGKILL"), 6),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", SCRIPTS)
def test_frameworks(name: str, jobs: Jobs) -> None:
    script, nproc, args, fault, waits = SCRIPTS[name]
    assert run(jobs, script, [fault], {waits: (1, 0)}, nproc=nproc, args=args) == [(fault.rank, "prepared")]


@pytest.mark.nightly
def test_a_standby_of_a_finished_call_does_not_serve_in_the_next(jobs: Jobs) -> None:
    """The first fit has 12 batches. Its standby is given up when it ends, and others are prepared."""
    faults = [Fault(1, 20, "bucket", "SIGKILL")]
    replacements = run(jobs, "lit.py", faults, {5: (1, 0), 26: (2, 0)}, args=["--feature", "fit_test_fit"])
    assert [rank for rank, _ in replacements] == [1]


@pytest.mark.nightly
def test_a_stage_without_a_replica_has_no_standby(jobs: Jobs) -> None:
    """Its replacement runs on from a checkpoint, or from the beginning."""
    env = {"SWIFT_RECOVERY_STANDBY_PREPARED": "1"}
    fault = Fault(1, 4, "pipe.backward", "SIGKILL")
    result = jobs.run("pipe.py", faults=[fault], env=env)
    compare(result, jobs.reference("pipe.py"))
    assert [event.fields["how"] for event in result.kinds("replacement_start")] == ["standby"], result.tail()
    assert not result.kinds("prepared")


# -- decisions --------------------------------------------------------------------------------------------------------


def config(prepared: int | str, on_failure: str = "replace") -> SwiftConfig:
    return SwiftConfig.from_dict({"on_failure": on_failure, "standby.prepared": prepared})


def test_auto_prepares_where_the_start_is_slow_and_memory_allows() -> None:
    def number(startup_s: float, free_gib: float, ranks: range = range(4), on_failure: str = "replace") -> int:
        measured = Measured(startup_s, 2 * GIB, int(free_gib * GIB), 100 * GIB)  # 10 GiB stay free
        return decide(config("auto", on_failure), ranks, measured).number

    assert [number(8.0, free) for free in (0, 11.9, 12, 15.9, 16, 90)] == [0, 0, 1, 2, 3, 3]
    assert number(1.9, 90) == 0
    assert number(8.0, 90, range(1)) == 0  # rank 0 alone
    assert number(8.0, 90, range(4, 8)) == 4  # another machine
    assert [number(8.0, 90, on_failure=each) for each in ("reroute", "shrink", "restart")] == [0, 0, 0]


def test_the_decision_is_said_with_its_numbers() -> None:
    text = decide(config("auto"), range(4), Measured(8.04, GIB // 2, 27 * GIB, 32 * GIB)).text
    assert text == (
        "3 standbys are prepared: the script takes 8.0 s to its first batch; a worker has 0.50 GiB, 27.00 GiB are "
        "free, and 3.20 GiB stay free"
    )


def test_memory_of_a_container_counts(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 1000 kB\nMemAvailable: 900 kB\n")
    assert machine_bytes(tmp_path, tmp_path / "meminfo") == (900 << 10, 1000 << 10)
    (tmp_path / "memory.max").write_text("max\n")
    assert machine_bytes(tmp_path, tmp_path / "meminfo") == (900 << 10, 1000 << 10)
    (tmp_path / "memory.max").write_text(f"{500 << 10}\n")
    (tmp_path / "memory.current").write_text(f"{450 << 10}\n")
    (tmp_path / "memory.stat").write_text(f"anon 7\nfile {40 << 10}\nshmem {10 << 10}\n")
    assert machine_bytes(tmp_path, tmp_path / "meminfo") == (80 << 10, 500 << 10)
    free, total = machine_bytes()
    assert 0 < free <= total and private_bytes(1 << 30) == 0


# -- a process that stands by -----------------------------------------------------------------------------------------

HOLDS = """
import os, sys
from shared_core.worker.start.hot_standby import HeldOutput
print("before", flush=True)
held = HeldOutput()
print("held", flush=True)
os.system("echo child")
print("held too", file=sys.stderr)
if sys.argv[1] == "show":
    held.show()
    print("after", flush=True)
os._exit(0)
"""


@pytest.mark.parametrize(
    ("how", "out", "err"), [("show", "before\nheld\nchild\nafter\n", "held too\n"), ("drop", "before\n", "")]
)
def test_output_is_held(how: str, out: str, err: str) -> None:
    done = subprocess.run([sys.executable, "-c", HOLDS, how], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == (out, err)


BACKGROUND = """
import os, subprocess
os.setsid()
before = os.getpriority(os.PRIO_PROCESS, 0), open("/proc/self/oom_score_adj").read()
from shared_core.worker.start.hot_standby import Background
background = Background()
child = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
assert open("/proc/self/oom_score_adj").read() != before[1]
background.leave()
assert (os.getpriority(os.PRIO_PROCESS, 0), open("/proc/self/oom_score_adj").read()) == before
assert os.getpriority(os.PRIO_PROCESS, child.pid) == before[0]
child.communicate()
"""


def test_the_background_can_be_left() -> None:
    subprocess.run([sys.executable, "-c", BACKGROUND], check=True)

"""A worker whose script starts slowly forks itself as its own hot standby, rank 0 too: a failure costs no start-up, and
the bits are those of the run without a failure.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence

import pytest
from harness import Jobs, few

from shared_core.config import SwiftConfig
from shared_core.faults import ANY_STEP, Fault
from shared_core.protocol.preparing import RESERVE_BYTES, Forkable, Measured, why_not
from shared_core.protocol.request import SINGLE_THREADED
from tests.support.report import AWAIT, STARTUP
from tests.support.runner import JobResult, compare, unconfirmed

#: With more, NumPy starts them when it is imported.
ONE_THREAD = os.environ | SINGLE_THREADED
#: From this on a worker forks itself.
SLOW = {STARTUP: "2.1", "SWIFT_RECOVERY_STANDBY_PREPARED": "auto"}
FOUND = Forkable(2, 1, 1, (), (), "", Measured(3.0, 1 << 20, RESERVE_BYTES + (2 << 20), RESERVE_BYTES))


def run(
    jobs: Jobs,
    script: str,
    faults: Sequence[Fault],
    awaited: dict[int, tuple[int, int]],
    *,
    args: Sequence[str] = (),
) -> JobResult:
    """``awaited``: by number of a forward pass: hot standbys that workers wait for there, and how many failed before.
    The result is that of the run without a failure.
    """
    result = jobs.run(script, faults=faults, env=SLOW | {AWAIT: json.dumps(awaited)}, args=args)

    compare(result, jobs.reference(script, args=args))
    spares = [fault for fault in faults if fault.point.startswith("spare.")]
    assert len(unconfirmed(result)) == len(spares), "\n".join([*unconfirmed(result), result.tail()])
    return result


def replacements(result: JobResult) -> list[tuple[int, str]]:
    return [(event.rank, event.fields["how"]) for event in result.kinds("replacement_start")]


def test_rank_0_fails_early_and_again(jobs: Jobs) -> None:
    """The script's start runs once in each rank: the copy of a copy is there for the second failure, with processes of
    loaders of its own.
    """
    faults = [
        Fault(0, 2, "bucket", "SIGKILL"),
        Fault(0, 6, "bucket", "SIGKILL", incarnation=1),
        Fault(1, 9, "forward", "SIGKILL"),
    ]
    result = run(jobs, "loop.py", faults, {2: (2, 0), 5: (3, 0)}, args=["--workers", "2"])
    assert replacements(result) == [(0, "forked"), (0, "forked"), (1, "forked")], result.tail()
    assert len(result.workers) == 2, result.tail()


@pytest.mark.nightly
def test_the_standby_itself_fails(jobs: Jobs) -> None:
    """One line; the replacement runs the script from its start."""
    faults = [Fault(0, ANY_STEP, "spare.waits", "SIGKILL", incarnation=1), Fault(0, 5, "bucket", "SIGKILL")]
    result = run(jobs, "loop.py", faults, {4: (0, 1)})
    assert replacements(result) == [(0, "standby")], result.tail()
    assert len(result.told("the hot standby of rank 0 (pid")) == 1, result.tail()


#: Script, its arguments, faults.
SCRIPTS: dict[str, tuple[str, list[str], list[Fault]]] = {
    "no_epochs": ("loop.py", ["--no-epochs", "--epochs", "1"], [Fault(0, 4, "bucket", "SIGKILL")]),
    "log_file": ("loop.py", ["--log", "w"], [Fault(0, 4, "bucket", "SIGKILL")]),
    "groups": ("groups_in_a_loop.py", ["left"], [Fault(0, 8, "collective.before", "SIGKILL")]),
    "lightning": ("lit.py", ["--feature", "all"], [Fault(0, 6, "bucket", "SIGKILL"), Fault(1, 9, "bucket", "SIGKILL")]),
    "accelerate": ("acc.py", [], [Fault(0, 14, "bucket", "SIGKILL")]),
}


@pytest.mark.parametrize("name", few(SCRIPTS, "loader_workers", "lightning"))
def test_scripts(name: str, jobs: Jobs) -> None:
    script, args, faults = SCRIPTS[name]
    result = run(jobs, script, faults, {2: (2, 0)}, args=args)
    assert replacements(result) == [(fault.rank, "forked") for fault in faults], result.tail()
    assert len(result.workers) == 2, result.tail()


@pytest.mark.nightly
def test_two_compute_threads_forbid_it(jobs: Jobs) -> None:
    """In a copy their pool would have no threads. The reason is among the events."""
    faults = [Fault(0, 5, "bucket", "SIGKILL")]
    result = jobs.run("loop.py", faults=faults, env=SLOW | {"OMP_NUM_THREADS": "2"})
    assert not unconfirmed(result) and result.status == 0, result.tail()
    assert replacements(result) == [(0, "standby")], result.tail()
    reasons = [event.fields["reason"] for event in result.kinds("preparing") if event.rank >= 0]
    assert len([reason for reason in reasons if "2 threads" in reason]) >= 2, result.tail()


# -- what decides ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "found", "word"),
    [
        ({}, {}, ""),
        ({"on_failure": "shrink"}, {}, "on_failure"),
        ({}, {"measured": Measured(3.0, 2 << 20, RESERVE_BYTES + (3 << 20), 0)}, "memory"),
        ({}, {"machines": 2}, "machines"),
        ({}, {"unfit": "no"}, "no"),
        ({}, {"compute_threads": 2}, "2 threads"),
        ({}, {"threads": ("pool",)}, "pool"),
        ({}, {"files": ("/data",)}, "/data"),
    ],
)
def test_why_not(options: dict[str, object], found: dict[str, object], word: str) -> None:
    reason = why_not(SwiftConfig.from_dict(options), Forkable(**(vars(FOUND) | found)))
    assert (word in reason) if word else not reason


_LOOK = """
import os
import socket
import sys
import tempfile
import threading
from pathlib import Path

from shared_core.system import process
from shared_core.worker.program import own_standby

process.become_subreaper()


def files(): return own_standby.other_files(Path("/nowhere"), set())
assert not files(), files()
read, write = os.pipe()
log = open(tempfile.mktemp(), "w")
assert not files(), files()                      # both ends of the pipe are here, and a log is only written
data = open(sys.executable, "rb")
assert len(files()) == 1 and "python" in files()[0], files()
data.close()
os.close(write)
assert files() == (os.readlink(f"/proc/self/fd/{read}"),), files()
os.close(read)
mine, theirs = socket.socketpair()
assert files() == ("a connection",) * 2, files()
assert own_standby.other_files(Path("/nowhere"), {f"pid {os.getpid()}"}) == ()
assert not own_standby.other_threads(), own_standby.other_threads()
over = threading.Event()
thread = threading.Thread(target=over.wait, name="pool")
thread.start()
assert own_standby.other_threads() == ("pool",), own_standby.other_threads()
over.set(); thread.join()

# A copy lets go of connections: the other end sees when the parent ends its own. It waits meanwhile.
until, over = os.pipe()
log.write("once")
own_standby.flush()
if own_standby.fork(os.getpid()):
    os.close(over)
    os.read(until, 1)
    log.close()
    os._exit(0)
mine.close()
theirs.settimeout(20)
assert theirs.recv(1) == b""
os.close(over)
assert os.waitpid(-1, 0)[1] == 0
log.close()
assert Path(log.name).read_text() == "once"
"""


def test_what_a_fork_would_share_is_seen() -> None:
    done = subprocess.run([sys.executable, "-c", _LOOK], capture_output=True, text=True, timeout=60, env=ONE_THREAD)
    assert done.returncode == 0, done.stderr

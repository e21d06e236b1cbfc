"""The system refuses something in the middle of a job: the job ends as it would have, or with one line that says what
to do. Real file systems, limits and processes."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import pytest
from harness import SCRIPTS, Jobs, until

from shared_core.faults import Fault
from shared_core.faults.inject import STRUCK
from shared_core.faults.spec import ANY_STEP, dumps
from tests.support.report import OUT
from tests.support.runner import JobResult, check_clean, collect, compare

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = "refused.py"
FAILED = Fault(1, 5, "collective.before", "SIGKILL")
#: Where a job writes, and what it says when that cannot be written any more.
SAYS = {
    "events": "events are lost",
    "spill": "logged messages stay in memory",
    "logs": "standard output is lost",
    "history": "the job history",
    "checkpoints": "no checkpoint of step",
    "memory": "memory is full",
}


@functools.cache
def _no_mounts() -> str:
    done = subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True, text=True)
    return done.stderr.strip()


def run(
    jobs: Jobs, take: Sequence[str] = (), *, shm: str = "64m", ballast: int = 1, faults: Sequence[Fault] = (FAILED,)
) -> JobResult:
    """A job with file systems of its own for all that it writes.

    Args:
        jobs: starts it.
        take: what worker 0 takes away in its third batch, each ``what:place``.
        shm: size of ``/dev/shm``.
        ballast: numbers of rank-local state.
        faults: to inject.
    """
    if _no_mounts():
        pytest.skip(f"mounting a file system is not allowed here: {_no_mounts()}")
    out = jobs.folder("refused")
    places = {name: out / "places" / name for name in SAYS if name != "memory"}
    setup = [f"mount -t tmpfs -o size={shm},mode=1777 tmpfs /dev/shm"]
    for place in places.values():
        place.mkdir(parents=True)
        room = "256m" if place.name == "checkpoints" and ballast > 1 else "2m"
        setup += [f"mount -t tmpfs -o size={room} tmpfs {place}", f"mkdir {place}/d"]
    at = {name: f"{place}/d" for name, place in places.items()} | {"memory": "/dev/shm"}
    env = {name: value for name, value in os.environ.items() if not name.startswith("SWIFT_")}
    env |= {OUT: str(out), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", STRUCK: str(out / "struck.jsonl")}
    env |= {
        "TMPDIR": at["spill"],
        "SWIFT_RECOVERY_LOG_SPILL_BYTES": "500",
        "SWIFT_RECOVERY_CHECKPOINT_DIR": at["checkpoints"],
        "SWIFT_RECOVERY_CHECKPOINT_HISTORY": f"{at['history']}/history.jsonl",
    }
    if {"full:memory", "full:spill"} <= set(take):  # what does not fit into the one goes to the other
        env["SWIFT_RECOVERY_LOG_DIR"] = at["spill"]
    if not any(each.endswith(":history") for each in take):  # that is read and written where a policy decides
        env["SWIFT_RECOVERY_CHECKPOINT_EVERY_STEPS"] = "2"
    (out / "faults.json").write_text(dumps(faults))
    argv = ["--nproc-per-node=2", f"--faults={out / 'faults.json'}", f"--events={at['events']}/events.jsonl"]
    argv += [f"--log-dir={at['logs']}", "--redirects=1", str(SCRIPTS / SCRIPT), f"--ballast={ballast}"]
    pairs = [each.split(":") for each in take]
    taken = [
        f"{'hidden' if (what, place) == ('full', 'spill') else what}:{at.get(place, place)}" for what, place in pairs
    ]
    argv += ["--take", *taken] if taken else []
    request = {"argv": argv, "env": env, "cwd": str(out), "setup": "\n".join(setup)}
    jobs.warm.start_all([request | {"stdout": str(out / "stdout.txt"), "stderr": str(out / "stderr.txt")}])
    ended = jobs.warm.wait(60.0)
    if ended is None:
        os.kill(jobs.warm.pid, 15)
        ended = jobs.warm.wait(20.0) or (124, [])
        ended = (124, ended[1])
    texts = [(out / name).read_text(errors="replace") for name in ("stdout.txt", "stderr.txt")]
    result = JobResult(["swiftrun", *argv], ended[0], *texts, out, 0.0, list(faults), orphans=ended[1])
    collect(result)
    check_clean(result)
    return result


def check(jobs: Jobs, result: JobResult, *said: str, ballast: int = 1) -> None:
    """The result is that of a run in which nothing is refused; each of these places has one line, no other has one."""
    args = [f"--ballast={ballast}"]
    compare(result, jobs.reference(SCRIPT, args=args))
    lines = {place: result.told(words) for place, words in SAYS.items()}
    assert {place: len(found) for place, found in lines.items() if found} == dict.fromkeys(said, 1), result.tail()


@pytest.mark.parametrize(
    ("what", "said"),
    [
        pytest.param("full", ("events", "spill", "logs", "checkpoints"), marks=pytest.mark.nightly),
        pytest.param("read-only", ("events", "spill", "checkpoints"), marks=pytest.mark.nightly),
        ("gone", ("events", "spill")),  # the folder of checkpoints is made again
    ],
)
def test_no_place_can_be_written_any_more(jobs: Jobs, what: str, said: tuple[str, ...]) -> None:
    result = run(jobs, [f"{what}:{place}" for place in ("events", "spill", "logs", "checkpoints")])
    check(jobs, result, *said)


@pytest.mark.nightly
@pytest.mark.parametrize("place", [place for place in SAYS if place != "memory"])
@pytest.mark.parametrize("what", ["full", "read-only", "gone"])
def test_a_place_cannot_be_written_any_more(jobs: Jobs, what: str, place: str) -> None:
    result = run(jobs, [f"{what}:{place}"])
    # Log files are open already; the folder of checkpoints is made again.
    silent = (what != "full" and place == "logs") or (what, place) == ("gone", "checkpoints")
    check(jobs, result, *(() if silent else (place,)))


def test_the_memory_file_system_fills_up(jobs: Jobs) -> None:
    result = run(jobs, ["full:memory"], ballast=50_000)
    check(jobs, result, "memory", ballast=50_000)
    assert "--shm-size" in result.told(SAYS["memory"])[0]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("shm", "said"),
    [
        ("1m", "has room for 1 MiB only"),
        pytest.param("8m", "has room for 8 MiB only", marks=pytest.mark.nightly),
        pytest.param("16m", SAYS["memory"], marks=pytest.mark.nightly),
        pytest.param("64m", "", marks=pytest.mark.nightly),
    ],
)
def test_a_small_memory_file_system(jobs: Jobs, shm: str, said: str) -> None:
    ballast = 800_000 if said else 200_000
    result = run(jobs, shm=shm, ballast=ballast)
    check(jobs, result, *(("memory",) if said == SAYS["memory"] else ()), ballast=ballast)
    assert len(result.told("--shm-size")) == bool(said), result.tail()
    assert not said or len(result.told(said)) == 1


def test_a_thread_cannot_be_started_in_a_recovery(jobs: Jobs) -> None:
    refused = [Fault(0, ANY_STEP, "thread", "EAGAIN", nth=3), Fault(0, FAILED.step, "device", "EAGAIN")]
    result = run(jobs, faults=[FAILED, *refused])
    check(jobs, result)
    assert len(result.told("cannot start a thread")) == 1, result.tail()
    assert len(result.told("cannot open a device of gloo")) == 1, result.tail()
    assert {record["index"] for record in result.struck} == {0, 1, 2}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("take", "said"),
    [
        (["full:memory", "full:spill"], "No space left on device.*nor to .*--shm-size="),
        (["gone:job"], "its folder was removed while the job ran; start the job again"),
    ],
)
def test_recovery_has_no_place_left(jobs: Jobs, take: list[str], said: str) -> None:
    result = run(jobs, take, ballast=50_000, faults=())
    assert result.status == 1
    (line,) = result.told("the job failed")
    assert re.search(f"OutOfResources: .*{said}", line), result.tail()


@pytest.mark.nightly
@pytest.mark.parametrize("what", ["NOFILE", "AS"])
def test_a_survivor_has_nothing_left(jobs: Jobs, what: str) -> None:
    result = run(jobs, [f"{what}:0"])
    check(jobs, result)


@pytest.mark.nightly
@pytest.mark.parametrize("whom", ["standby", "worker"])
def test_no_process_can_be_started(jobs: Jobs, whom: str) -> None:
    """As another user, whom the limit of processes binds; it is lifted once the user has been told."""
    caps = "+dac_override,+dac_read_search"  # this machine's folders may be private to root
    other = ["setpriv", "--reuid=10001", "--regid=10001", "--clear-groups", f"--inh-caps={caps}"]
    other += [f"--ambient-caps={caps}"]
    if subprocess.run([*other, "true"], capture_output=True).returncode:
        pytest.skip("it is not allowed here to become another user with capabilities")
    out = jobs.folder("refused")
    gate = out / "gate"
    os.mkfifo(gate)
    env = {name: value for name, value in os.environ.items() if not name.startswith("SWIFT_RECOVERY")}
    env |= {OUT: str(out), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HOME": str(out)}
    command = [*other, sys.executable, "-m", "shared_core.cli.swiftrun", "--nproc-per-node=2"]
    command += [f"--events={out / 'events.jsonl'}", str(SCRIPTS / SCRIPT), f"--gate={gate}"]
    with open(out / "stderr.txt", "wb") as stderr, open(out / "stdout.txt", "wb") as stdout:
        job = subprocess.Popen(command, env=env, cwd=out, stdout=stdout, stderr=stderr, start_new_session=True)
    try:
        with _opened(gate, job):  # rank 0 waits at its other end
            standby = next(pid for pid in _children(job.pid) if _title(pid).startswith("swift standby"))
            workers = [json.loads(line) for line in (out / "workers.jsonl").read_text().splitlines()]
            victim = next(one["pid"] for one in workers if one["rank"] == 1)
            _limit(other, (job.pid, standby), "1")
            os.kill(standby if whom == "standby" else victim, signal.SIGKILL)
            said = (out / "stderr.txt").read_text
            until(lambda: "can be started" in said() or job.poll() is not None, said)
            assert job.poll() is None, said()
            _limit(other, (job.pid, standby) if whom == "worker" else (job.pid,), "4096")
        status = job.wait(60.0)
    finally:
        job.kill()
        job.wait()
    text = (out / "stderr.txt").read_text()
    result = JobResult(command, status, "", text, out, 0.0)
    collect(result)
    check(jobs, result)
    what = "no standby" if whom == "standby" else "no process"
    assert len(result.told("can be started")) == len(result.told(f"{what} can be started")) == 1, text
    assert "ulimit -u" in result.told("can be started")[0]


def _limit(other: Sequence[str], pids: Sequence[int], processes: str) -> None:
    """Limit how many processes and threads the user of these may have; only that user may do so."""
    for pid in pids:
        subprocess.run([*other, "prlimit", f"--pid={pid}", f"--nproc={processes}:"], check=True)


def _opened(gate: Path, job: subprocess.Popen[bytes]) -> BinaryIO:
    """The end of a named pipe that is written to, once somebody reads from it."""

    def opened() -> BinaryIO | None:
        assert job.poll() is None, "the job has ended"
        with contextlib.suppress(OSError):
            return os.fdopen(os.open(gate, os.O_WRONLY | os.O_NONBLOCK), "wb")
        return None

    end = until(opened, lambda: "nobody reads from the gate", 60.0)
    assert end is not None
    return end


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        found += map(int, path.read_text().split())
    return found


def _title(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")

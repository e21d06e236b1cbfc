"""One job at a time holds a run: the lock is free when its processes are gone, however they went."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from checkpoint_tools import finish, snapshot, steps_of, writing
from harness import until

from shared_core.checkpoint import run_lock, store
from shared_core.checkpoint.run_lock import FILE, RunLock
from shared_core.checkpoint.spool import Spool
from shared_core.checkpoint.storage import open_storage
from shared_core.errors import RunInUse

ROOT = Path(__file__).parents[2]
#: Holds the lock of argument 1 for the job of argument 2 until it is killed, and renews it where that is needed.
HOLDER = """
import signal, sys
from shared_core.checkpoint import run_lock
from shared_core.checkpoint.storage import open_storage
run_lock.RENEW_S = 0.1
lock = run_lock.RunLock(open_storage(sys.argv[1]), sys.argv[2])
lock.take()
signal.signal(signal.SIGALRM, lambda *_: lock.renew())
signal.setitimer(signal.ITIMER_REAL, run_lock.RENEW_S, run_lock.RENEW_S)
print("held", flush=True)
while True:
    signal.pause()
"""


@contextmanager
def holder(where: str, owner: str) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds a lock."""
    words = [sys.executable, "-c", HOLDER, where, owner]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}) as held:
        try:
            assert held.stdout is not None and held.stdout.readline() == "held\n"
            yield held
        finally:
            held.kill()


def url(kind: str, where: Path) -> str:
    return str(where) if kind == "a folder" else f"local://{where}"


@pytest.fixture(params=["a folder", pytest.param("a url", marks=pytest.mark.nightly)])
def run(request: pytest.FixtureRequest, where: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(run_lock, "LEASE_S", 2.0)
    where.mkdir()
    return url(request.param, where)


def test_a_second_job_is_refused_and_the_first_one_s_processes_share(run: str) -> None:
    with holder(run, "a") as first:
        with pytest.raises(RunInUse, match=f"process {first.pid} on .* writes to {run}.*checkpoint.resume='never'"):
            RunLock(open_storage(run), "b").take(0.5)
        other = RunLock(open_storage(run), "a")
        other.take(0.5)
        other.take()
    if not other.is_lease:  # a lease names the process that renewed it last
        with pytest.raises(RunInUse):
            RunLock(open_storage(run), "b").take()
    other.release()
    RunLock(open_storage(run), "b").take()


def test_a_lease_that_is_just_written_is_not_free(where: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some storages show it as empty for that time."""
    monkeypatch.setattr(run_lock, "LEASE_S", 2.0)
    storage, read = open_storage(f"local://{where}"), store.read_file
    first, second = RunLock(storage, "a"), RunLock(storage, "b")
    first.take()
    empty = iter([b""])
    monkeypatch.setattr(store, "read_file", lambda *args: next(empty, None) or read(*args))
    with pytest.raises(RunInUse, match=f"process {os.getpid()} on "):
        second.take()
    assert next(empty, None) is None
    first.renew()


def test_a_killed_job_holds_nothing(run: str) -> None:
    with holder(run, "a") as first:
        first.send_signal(signal.SIGKILL)
        first.wait()
        RunLock(open_storage(run), "b").take()


def test_a_lease_of_another_machine_ends_when_it_is_no_longer_renewed(
    where: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process cannot be looked at; that this one's clock says another time does not matter."""
    monkeypatch.setattr(run_lock, "LEASE_S", 2.0)
    run = f"local://{where}"
    with holder(run, "a") as first:
        first.send_signal(signal.SIGKILL)
        first.wait()
    said = json.loads((where / FILE).read_text()) | {"place": "another machine"}
    (where / FILE).write_text(json.dumps(said))
    os.utime(where / FILE, (4e9, 4e9))
    with pytest.raises(RunInUse):
        RunLock(open_storage(run), "b").take()
    RunLock(open_storage(run), "b").take(0.1)


def test_a_file_system_without_locks_has_a_lease(where: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As NFS without its lock service: ``flock`` fails, and the lease keeps a second job away."""

    def none(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", none)
    first, second = (RunLock(open_storage(where), each) for each in "ab")
    first.take()
    assert first.is_lease
    with pytest.raises(RunInUse):
        second.take()
    first.release()
    second.take()


def test_who_has_not_renewed_its_lease_for_long_finds_that_another_took_it(
    where: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (RunLock(open_storage(f"local://{where}"), each) for each in "ab")
    first.take()
    (where / FILE).unlink()
    second.take()
    monkeypatch.setattr(run_lock, "RENEW_S", 0.0)
    with pytest.raises(RunInUse):
        first.renew()
    first.release()
    assert json.loads((where / FILE).read_text())["owner"] == "b"


def test_a_writer_does_not_write_to_another_job_s_run(run: str, where: Path, spool: Spool) -> None:
    """It says so once, and writes as soon as the other is gone."""
    with holder(run, "a") as first, writing(spool) as writer:
        snapshot(spool, 10, run, job="b")
        until(lambda: spool.status().failed == 10, "it to be refused")
        assert not store.steps(where)
        first.kill()
        first.wait()
        until(lambda: steps_of(where) == [10], "step 10")
        code, said = finish(writer)
    assert code == 0 and len(said) == 2 and f"process {first.pid}" in said[0] and "can be written again" in said[1]

"""The agent and the writer of checkpoints: started when needed, replaced when failed, given time at the end."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from util import ROOT, Job, run, start, tagged

from shared_core.checkpoint.store import committed, read_part, verify

#: Every rank leaves a snapshot in memory, as jobs do, and can wait for its commit.
PRELUDE = f"""
import os, signal, sys, time
sys.path.insert(0, {str(ROOT / "tests" / "checkpoint")!r})
from checkpoint_tools import snapshot
from shared_core.checkpoint.spool import Spool
from shared_core.checkpoint.spool import FOLDER
from shared_core.protocol import worker_env
me = worker_env.env()
spool = Spool(me.job_dir / FOLDER, me.restart)
where = os.path.join(os.path.dirname(__file__), "storage")
def leave(step):
    snapshot(spool, step, where, only=[me.rank])
"""


def found(folder: Path, step: int) -> None:
    newest = committed(folder / "storage")[-1]
    verify(newest)
    assert newest.step == step
    assert read_part(newest, "rank1") != read_part(newest, "rank0")


@pytest.mark.nightly
def test_without_snapshots_there_is_no_writer(tmp_path: Path) -> None:
    script = "import os; assert b'checkpoint.writer' not in b''.join(open(f'/proc/{p}/cmdline', 'rb').read()"
    script += " for p in open(f'/proc/{os.getppid()}/task/{os.getppid()}/children').read().split())"
    assert run(tmp_path, script).code == 0


@pytest.mark.nightly
def test_a_failed_writer_is_replaced_and_a_last_snapshot_is_written_before_the_job_ends(tmp_path: Path) -> None:
    script = """
leave(10)
assert spool.wait_committed(10, 30)
first = spool.status().pid
if me.rank == 0:
    os.kill(first, signal.SIGKILL)
leave(20)
assert spool.wait_committed(20, 30)
assert spool.status().pid != first
leave(30)
"""
    job = run(tmp_path, PRELUDE + script)
    assert job.code == 0, job.stderr
    found(tmp_path, 30)
    assert job.of("checkpoint")[-1].fields["boundary"] == 30
    assert job.stderr.count("the writer of checkpoints failed (") == 1


WAITS = """
leave(10)
assert spool.wait_committed(10, 30)
if me.rank == 0:
    print("ready", flush=True)
time.sleep(60)
"""
ON_SIGTERM = """
def last(*_):
    leave(20)
    os._exit(0)
signal.signal(signal.SIGTERM, last)
"""


def begun(tmp_path: Path, script: str) -> Job:
    job = start(tmp_path, PRELUDE + script)
    assert job.process.stdout is not None
    for line in job.process.stdout:
        if "ready" in line:
            return job
    raise AssertionError("it ended before it began")


@pytest.mark.nightly
def test_a_snapshot_made_at_sigterm_is_written_within_the_grace(tmp_path: Path) -> None:
    job = begun(tmp_path, ON_SIGTERM + WAITS)
    job.process.send_signal(signal.SIGTERM)
    job.finish(30).check_nothing_left()
    assert job.code == 1
    found(tmp_path, 20)


@pytest.mark.nightly
def test_a_killed_agent_leaves_no_writer(tmp_path: Path) -> None:
    job = begun(tmp_path, WAITS)
    job.process.kill()
    job.finish(30)
    deadline = time.monotonic() + 10
    while (left := tagged(job.tag)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == []
    found(tmp_path, 10)


@pytest.mark.nightly
def test_a_restart_of_all_workers_keeps_snapshots_and_the_writer(tmp_path: Path) -> None:
    script = """
leave(10 + 10 * me.restart)
assert spool.wait_committed(10 + 10 * me.restart, 30)
if me.restart == 0:
    os.kill(os.getpid(), signal.SIGKILL)
before = Spool(spool.folder, 0)
print("pid", spool.status().pid, before.newest_complete(), flush=True)
"""
    job = run(tmp_path, PRELUDE + script, options=["--on-failure", "restart"])
    assert job.code == 0, job.stderr
    found(tmp_path, 20)
    assert job.stderr.count("the writer of checkpoints failed") == 0
    assert os.path.isdir(tmp_path / "storage" / "step-0000000010")

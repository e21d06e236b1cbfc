"""How jobs under ``swiftrun`` end: crash loops, restarts, signals."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import psutil
import pytest
from prelude import PRELUDE, shown
from util import run, run_forked, start, tagged


@pytest.mark.nightly
def test_a_crash_loop_ends_with_the_first_death(tmp_path: Path) -> None:
    script = (
        PRELUDE
        + """
if me.rank == 0:
    os._exit(9)
await_("never", 1)
"""
    )
    job = run(tmp_path, script)
    assert job.code == 1
    assert "died 3 times in a row without progress" in job.stderr
    assert "rank      : 0 (local_rank: 0)" in job.stderr and "exitcode  : 9" in job.stderr
    failed = job.of("failed")
    assert len(failed) == 3
    # back-off: at once, then after half a second
    assert failed[2].time - failed[1].time >= 0.5


@pytest.mark.nightly
def test_a_worker_without_progress_is_replaced(tmp_path: Path) -> None:
    script = (
        PRELUDE
        + """
if me.incarnation == 0:
    progress = progress_file.ProgressFile(me.rank_dir / "progress")
    progress.boundary(1)
    if me.rank == 0:
        progress.waiting(True)  # in a collective: does not count
        generation(1)
    else:
        signal.pause()
"""
    )
    job = run(tmp_path, script, env={"SWIFT_RECOVERY_DETECTION_PROGRESS_TIMEOUT_S": "0.5"})
    assert job.code == 0, job.stderr
    (failed,) = job.of("failed")
    assert failed.rank == 1 and "no progress for 0.5 s" in failed.fields["cause"]


def test_all_workers_failed_restarts_the_job(tmp_path: Path) -> None:
    """The second attempt has its own store, and nothing of what the first one published."""
    script = (
        PRELUDE
        + """
if me.restart == 0:
    (me.rank_dir).mkdir(exist_ok=True)
    reach("up")
    if me.rank == 0:
        pids = [await_("up", 0), await_("up", 1)]
        os.kill(os.getppid(), signal.SIGSTOP)
        os.system(f"(kill -9 {pids[1]} {pids[0]}; sleep 0.2; kill -CONT {os.getppid()}) & ")
    signal.pause()
assert not store.check(["test/up/0"]) and not me.rank_dir.exists()
show(rank=me.rank, restart=me.restart, generation=me.generation, incarnation=me.incarnation)
"""
    )
    job = run_forked(tmp_path, script)
    assert job.code == 0, job.stderr
    assert sorted(one["rank"] for one in shown(job)) == [0, 1]
    assert all((one["restart"], one["generation"], one["incarnation"]) == (1, 0, 0) for one in shown(job))
    assert job.of("restart")[0].fields["reason"] == "all workers failed"
    assert len(job.of("start")) == 2


@pytest.mark.nightly
def test_what_workers_say_is_done(tmp_path: Path) -> None:
    """``divergent`` replaces, ``restart`` restarts all, ``fail`` ends the job with the worker's message."""
    script = (
        PRELUDE
        + """
reach(f"up{me.incarnation}")
if me.rank == 0:
    if me.restart == 0:
        await_("up0", 1)
        link.tell(store, "divergent", [1])
        show(gen=generation(1))
        await_("up1", 1)
        link.tell(store, "restart", {"reason": "nobody can serve rank 1"})
    else:
        store.set(me.prefix + "fail", json.dumps({"rank": 1, "message": "ReplayDivergence: rank 1 differs"}))
signal.pause()
"""
    )
    job = run(tmp_path, script)
    assert job.code == 1
    (said,) = shown(job)
    assert said["gen"]["cause"] == {"1": "its state differs from its replicas'"}
    assert job.of("restart")[0].fields["reason"] == "nobody can serve rank 1"
    assert "rank 1: ReplayDivergence: rank 1 differs" in job.stderr
    assert "rank      : 1" in job.stderr
    assert job.of("end")[0].fields["reason"] == "ReplayDivergence: rank 1 differs"


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_everything(tmp_path: Path, number: signal.Signals) -> None:
    """Workers that will not end by themselves are killed after the grace; exit code 1 is torchrun's."""
    script = (
        PRELUDE
        + """
import subprocess
subprocess.Popen(["sleep", "600"], start_new_session=True)
if me.rank == 1:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
reach("up")
if me.rank == 0:
    await_("up", 1)
    show(agent=os.getppid())
while True:
    signal.pause()
"""
    )
    job = start(tmp_path, script, options=["--shutdown-timeout", "1"])
    assert job.process.stdout is not None
    agent = json.loads(job.process.stdout.readline())["agent"]
    assert agent == job.process.pid
    open_ports = [one for one in psutil.Process(agent).net_connections() if one.status == psutil.CONN_LISTEN]
    assert len(open_ports) == 1, "the store of the attempt, and no rendezvous"
    os.kill(agent, number)
    job.finish(20)
    job.check_nothing_left()
    assert job.code == 1
    assert f"received {number.name}" in job.stderr


@pytest.mark.parametrize("standbys", ["0", pytest.param("1", marks=pytest.mark.nightly)])
def test_a_dead_agent_takes_everything_with_it(standbys: str, tmp_path: Path) -> None:
    script = (
        PRELUDE
        + """
reach("up")
if me.rank == 0:
    await_("up", 1)
    os.kill(os.getppid(), signal.SIGKILL)
while True:
    signal.pause()
"""
    )
    (temporary := tmp_path / "tmp").mkdir()
    job = start(tmp_path, script, options=["--standbys", standbys], env={"TMPDIR": str(temporary)})
    job.finish(75)
    assert job.code == -signal.SIGKILL
    while tagged(job.tag):  # the kernel ends them; the test's time-out is the limit
        os.sched_yield()
    job.check_nothing_left()
    left = [each.name for each in temporary.iterdir() if not each.name.startswith("torchinductor_")]  # torch's cache
    assert job.of("start") and not left

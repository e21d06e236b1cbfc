"""The writer process: kills at every file operation, coalescing, several machines, and its end."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoint_tools import (
    ROOT,
    check,
    finish,
    newest,
    payload,
    run_writer,
    snapshot,
    start_writer,
    steps_of,
    write_part,
    writing,
)
from harness import until

from shared_core.checkpoint.spool import BELL, Spool
from shared_core.errors import CorruptFile
from shared_core.events import read_events
from shared_core.faults import ANY_STEP, Fault


def test_what_workers_leave_is_committed(spool: Spool, where: Path, tmp_path: Path) -> None:
    snapshot(spool, 10, where)
    code, said = run_writer(spool)
    assert (code, said) == (0, [])
    check(newest(where), 10)
    found = newest(where)
    assert found is not None
    assert found.meta == {"run": "r", "version": 10, "attempt": 0, "world_size": 2}
    status = spool.status()
    assert status.committed == {**found.meta, "step": 10} and status.bytes == 2 * len(payload(10, 0))
    assert spool.newest_complete() == 10  # it stays in memory: a restart may take it from there
    assert not list(where.rglob(".tmp-*"))


def test_it_makes_no_folder_for_a_job_that_is_gone(tmp_path: Path) -> None:
    """Its agent was killed, and the next one has swept the folder: one made now would stay for ever."""
    assert run_writer(Spool(tmp_path / "gone" / "checkpoints")) == (0, [])
    assert not (tmp_path / "gone").exists()


def test_it_ends_at_once_where_its_folder_has_gone(spool: Spool, where: Path) -> None:
    with writing(spool) as writer:
        until((spool.folder / BELL).exists, "the writer")
        snapshot(spool, 10, where)
        assert spool.wait_committed(10, 20.0)
        shutil.rmtree(spool.folder)
        assert finish(writer, grace_s=20.0) == (0, [])


def test_it_works_when_the_bell_rings(spool: Spool, where: Path) -> None:
    with writing(spool) as writer:
        until((spool.folder / BELL).exists, "the writer")
        for step in (10, 20, 30):
            snapshot(spool, step, where)
            assert spool.wait_committed(step, 20.0)
        check(newest(where), 30)
        assert finish(writer) == (0, [])
    assert steps_of(where) == [20, 30]
    assert spool.steps() == [30]
    assert len(list((spool.folder / "spare").iterdir())) == 2  # one file of each name may be used again


def test_a_part_that_one_rank_never_sealed_is_not_waited_for(spool: Spool, where: Path) -> None:
    snapshot(spool, 10, where, only=[0])
    assert run_writer(spool) == (0, [])
    assert newest(where) is None and not where.exists()
    snapshot(spool, 20, where)
    assert run_writer(spool) == (0, [])
    check(newest(where), 20)
    assert spool.steps() == [20]


def operations() -> int:
    """Upper bound on the file operations of one checkpoint; the test ends at the first that is not reached."""
    return 100


@pytest.mark.nightly
def test_a_kill_before_every_file_operation(in_memory: Path) -> None:
    """Whatever the writer had done, a checkpoint is found, bitwise, and the next writer finishes the one under way."""
    before, outcomes = in_memory / "before", []
    old = Spool(in_memory / "old")
    for step in (4, 10):
        snapshot(old, step, before)
        assert run_writer(old) == (0, [])
    for nth in range(1, operations()):
        where, spool = in_memory / f"storage{nth}", Spool(in_memory / f"spool{nth}")
        shutil.copytree(before, where)
        snapshot(spool, 20, where)
        code, _ = run_writer(spool, [Fault(0, ANY_STEP, "checkpoint.file", "SIGKILL", nth)])
        found = newest(where)
        assert found is not None
        check(found, found.step)
        outcomes.append(found.step)
        if code == 0:
            assert found.step == 20
            break
        assert code == -signal.SIGKILL and found.step in (10, 20)
        assert run_writer(spool) == (0, [])
        check(newest(where), 20)
        assert steps_of(where) == [10, 20]
        assert not list(where.rglob(".tmp-rank*"))
    assert outcomes == sorted(outcomes) and outcomes.count(10) > 20 and outcomes.count(20) > 1


def test_a_kill_while_older_ones_are_removed(spool: Spool, where: Path) -> None:
    for step in (4, 10):
        snapshot(spool, step, where)
        assert run_writer(spool) == (0, [])
    snapshot(spool, 20, where)
    code, _ = run_writer(spool, [Fault(0, ANY_STEP, "checkpoint.prune", "SIGKILL")])
    assert code == -signal.SIGKILL
    check(newest(where), 20)
    assert run_writer(spool) == (0, [])
    check(newest(where), 20)
    assert spool.status().committed["step"] == 20


def test_kill_in_the_middle_of_a_large_part(spool: Spool, where: Path) -> None:
    """A writer that is killed again and again at random moments gets there in the end."""
    size = 30_000_000
    snapshot(spool, 10, where, size=1000)
    assert run_writer(spool) == (0, [])
    snapshot(spool, 20, where, size=size)
    for _ in range(3):
        with writing(spool):
            until(lambda: list(where.glob("step-0000000020/.tmp-*")), "a part under way")
        check(newest(where), 10, size=1000)
    assert run_writer(spool) == (0, [])
    check(newest(where), 20, size=size)
    assert not list(where.rglob(".tmp-*"))


def damage(how: str, path: Path, other: Path) -> None:
    if how == "flip last":
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    elif how == "gone":
        path.unlink()
    else:
        shutil.copy(other, path)


@pytest.mark.parametrize("how", ["flip last", "gone", "of another step"])
def test_damaged_marks_never_commit(how: str, spool: Spool, where: Path) -> None:
    """The writer died before its manifest; then a mark was damaged: that rank's parts are written again."""
    snapshot(spool, 10, where)
    assert run_writer(spool) == (0, [])
    snapshot(spool, 20, where)
    assert run_writer(spool, [Fault(0, 20, "checkpoint.manifest", "SIGKILL")])[0] == -signal.SIGKILL
    damage(how, where / "step-0000000020/rank1.done", where / "step-0000000010/rank1.done")
    assert run_writer(spool) == (0, [])
    check(newest(where), 20)


def test_parts_of_two_attempts_never_mix(tmp_path: Path, where: Path) -> None:
    """Attempt 0 got one rank's part of step 20 to storage; attempt 1 comes to step 20 again with other state."""
    spool = Spool(tmp_path / "spool")
    snapshot(spool, 20, where, size=1000)
    fault = Fault(0, 20, "checkpoint.manifest", "SIGKILL")
    assert run_writer(spool, [fault])[0] == -signal.SIGKILL
    assert (where / "step-0000000020/rank1.done").exists()
    again = Spool(spool.folder, 1)
    snapshot(again, 20, where, only=[0], size=5000)
    shutil.rmtree(spool.folder / "attempt0")
    assert run_writer(spool) == (0, [])
    assert newest(where) is None
    snapshot(again, 20, where, only=[1], size=5000)
    assert run_writer(spool) == (0, [])
    check(newest(where), 20, size=5000)
    assert newest(where).meta["attempt"] == 1  # type: ignore[union-attr]


@pytest.mark.nightly
def test_a_committed_step_of_an_older_attempt_is_replaced_whole(in_memory: Path) -> None:
    """A kill at any operation of the replacement leaves nothing that is made of both."""
    old = Spool(in_memory / "old")
    for step, size in ((10, 3000), (20, 1000)):
        snapshot(old, step, in_memory / "before", size=size)
        assert run_writer(old) == (0, [])
    for nth in range(1, operations()):
        second, storage = Spool(in_memory / f"spool{nth}", 1), in_memory / f"storage{nth}"
        shutil.copytree(in_memory / "before", storage)
        snapshot(second, 20, storage, size=5000)
        code, _ = run_writer(second, [Fault(0, 20, "checkpoint.file", "SIGKILL", nth)])
        found = newest(storage)
        assert found is not None
        size = 3000 if found.step == 10 else 5000 if found.meta["attempt"] else 1000
        check(found, found.step, size=size)
        if code == 0:
            assert found.meta["attempt"] == 1
            break


def test_several_machines_commit_without_a_coordinator(tmp_path: Path, where: Path) -> None:
    spools = [Spool(tmp_path / name) for name in "ab"]
    with writing(spools[0]) as first, writing(spools[1]) as second:
        for step in (10, 20):
            for rank, spool in enumerate(spools):
                snapshot(spool, step, where, ranks=[rank])
            for spool in spools:
                assert spool.wait_committed(step, 20.0)
        check(newest(where), 20)
        assert finish(first) == (0, []) and finish(second) == (0, [])
    assert [spool.status().committed["step"] for spool in spools] == [20, 20]
    assert json.loads((where / "step-0000000020/begun.json").read_text())["version"] == 20


def test_machines_that_let_different_steps_go_agree_on_the_next(tmp_path: Path, where: Path) -> None:
    """The second machine has only step 20 any more when the first has begun step 10: both continue to 20."""
    spools = [Spool(tmp_path / name) for name in "ab"]
    with writing(spools[0]) as first, writing(spools[1]) as second:
        snapshot(spools[0], 10, where, ranks=[0])
        until((where / "step-0000000010/rank0.done").exists, "the first machine's part of step 10")
        snapshot(spools[1], 20, where, ranks=[1])
        until((where / "step-0000000010/rank1.missed").exists, "the word that step 10 is gone")
        snapshot(spools[0], 20, where, ranks=[0])
        assert spools[0].wait_committed(20, 20.0) and spools[1].wait_committed(20, 20.0)
        check(newest(where), 20)
        assert finish(first) == (0, []) and finish(second) == (0, [])
    assert not (where / "step-0000000010").exists()


def test_an_attempt_that_another_has_followed_is_not_waited_for(tmp_path: Path, where: Path) -> None:
    """The second machine fails with its part of step 10; all start again, and another one has its place."""
    first, other = Spool(tmp_path / "a"), Spool(tmp_path / "c", 1)
    again = Spool(first.folder, 1)
    with writing(first) as one, writing(other) as two:
        snapshot(first, 10, where, ranks=[0])
        until((where / "step-0000000010/rank0.done").exists, "the first machine's part of step 10")
        snapshot(again, 20, where, ranks=[0])
        snapshot(other, 20, where, ranks=[1])
        assert again.wait_committed(20, 20.0) and other.wait_committed(20, 20.0)
        assert finish(one) == (0, []) and finish(two) == (0, [])
    check(newest(where), 20)


@pytest.mark.parametrize(("short", "begun"), [(1, False), (1, True)])
def test_a_machine_that_has_skipped_the_last_step_is_not_waited_for(
    short: int, begun: bool, tmp_path: Path, where: Path
) -> None:
    """One machine had no room for the last snapshot. It may have ended before the other comes to that step."""
    spools = [Spool(tmp_path / name) for name in "ab"]
    with writing(spools[0]) as first, writing(spools[1]) as second:
        for rank, spool in enumerate(spools):
            snapshot(spool, 10, where, ranks=[rank])
        for spool in spools:
            assert spool.wait_committed(10, 20.0)
        writers, long = [first, second], 1 - short
        if begun:
            snapshot(spools[long], 20, where, ranks=[long])
            if long == 0:
                until((where / "step-0000000020/rank0.done").exists, "the first machine's part of step 20")
        assert finish(writers[short]) == (0, [])
        if not begun:
            snapshot(spools[long], 20, where, ranks=[long])
        assert finish(writers[long], grace_s=20.0) == (0, [])
    assert spools[long].status().failed == 20 and spools[long].status().cause == "incomplete"
    check(newest(where), 10)


@pytest.mark.parametrize("here", [0, 1])
def test_ranks_without_which_the_job_ends_are_not_waited_for(here: int, tmp_path: Path, where: Path) -> None:
    """The machine of the other rank has failed, and the job has ended without it. Without the word, a minute."""
    spool = Spool(tmp_path / "a")
    with writing(spool) as writer:
        snapshot(spool, 10, where, ranks=[here])
        assert finish(writer, absent=str(1 - here)) == (0, [])
    assert spool.status().failed == 10 and spool.status().cause == "incomplete"


def test_its_end_waits_for_the_last_write_but_not_longer_than_the_grace(spool: Spool, where: Path) -> None:
    snapshot(spool, 10, where)
    writer = start_writer(spool, [Fault(0, 10, "checkpoint.file", "SIGSTOP", 5)])
    until(lambda: _state(writer.pid) == "T", "the writer to stop")
    os.kill(writer.pid, signal.SIGCONT)
    assert finish(writer) == (0, [])
    check(newest(where), 10)
    os.mkfifo(where / "blocks")  # a write that never ends
    snapshot(spool, 20, "gated://" + str(where))
    writer = start_writer(spool, program="import gated", env={"GATE": str(where / "blocks")})
    code, _ = finish(writer, grace_s=0.2)
    assert code == 1
    check(newest(where), 10)


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]


def test_it_ends_when_whoever_started_it_is_killed(spool: Spool, where: Path) -> None:
    snapshot(spool, 10, where)
    code = "import sys; from checkpoint_tools import *; w = start_writer(Spool(Path(sys.argv[1])));"
    code += "print(w.pid, flush=True); time.sleep(60)"
    path = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    command = [sys.executable, "-c", code, str(spool.folder)]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path})
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.communicate()
    until(lambda: not Path(f"/proc/{pid}").exists() or _state(pid) == "Z", "the writer to end")
    check(newest(where), 10)  # but first it has finished what there was


def test_it_is_small_and_quick() -> None:
    code = (
        "import sys, shared_core.checkpoint.writer; assert 'torch' not in sys.modules and 'fsspec' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})


def test_the_checkpoint_event(spool: Spool, where: Path, tmp_path: Path) -> None:
    snapshot(spool, 10, where)
    command = [sys.executable, "-m", "shared_core.checkpoint.writer", str(spool.folder)]
    command.append(f"--events={tmp_path / 'events.jsonl'}")
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(command, input=b"20\n", check=True, env=env, timeout=30)
    (event,) = read_events(tmp_path / "events.jsonl")
    assert event.kind == "checkpoint" and event.rank == 0
    assert event.fields["boundary"] == 10 and event.fields["version"] == 10 and event.fields["seconds"] > 0


def test_two_ranks_with_a_part_of_one_name(spool: Spool, where: Path) -> None:
    from shared_core.checkpoint import store

    meta = {"world_size": 2}
    for rank in range(2):
        digest = write_part(where, 5, "same", b"x")
        store.write_mark(where, 5, rank, store.StoreMark({"same": (digest, 1)}, meta))
    with pytest.raises(CorruptFile, match="rank 1 and another have written same"):
        store.commit_marked(where, 5, 2, meta)


def test_notices_to_every_process_do_not_end_it(spool: Spool, where: Path) -> None:
    with writing(spool) as writer:
        until((spool.folder / BELL).exists, "the writer")
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            writer.send_signal(number)
        snapshot(spool, 10, where)
        assert spool.wait_committed(10, 20.0)
        assert finish(writer) == (0, [])

"""Storage that is full, read-only, gone, or slow: training would continue, and each cause is told once."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoint_tools import (
    check,
    finish,
    newest,
    payload,
    run_writer,
    snapshot,
    start_writer,
    steps_of,
    writing,
)
from harness import until

from shared_core.checkpoint import store
from shared_core.checkpoint.snapshots import MOST, Snapshots
from shared_core.checkpoint.spool import Spool, Target, available_memory
from shared_core.checkpoint.storage import LocalStorage, UrlStorage, open_storage
from shared_core.errors import MissingExtra
from shared_core.faults import Fault


def failing(spool: Spool, where: Path | str, steps: range, cause: str, size: int = 3000) -> list[str]:
    """Snapshots that a writer cannot write; what it says."""
    with writing(spool) as writer:
        for step in steps:
            snapshot(spool, step, where, size=size)
            until(lambda step=step: spool.status().failed == step, f"step {step} to fail")
            assert spool.status().cause == cause
        code, said = finish(writer)
    assert code == 0
    return said


def test_full_device(small_device: Path, spool: Spool) -> None:
    """The device of 256 KiB holds one checkpoint, then no more; room is made while the writer runs."""
    snapshot(spool, 10, small_device, size=40_000)
    assert run_writer(spool) == (0, [])
    filler = small_device / "filler"
    filler.write_bytes(bytes(120_000))
    with writing(spool) as writer:
        for step in (20, 30, 40):
            snapshot(spool, step, small_device, size=40_000)
            until(lambda step=step: spool.status().failed == step, f"step {step} to fail")
            assert spool.status().cause == "full"
            check(newest(small_device), 10, size=40_000)
        filler.unlink()
        assert spool.status().committed["step"] == 10
        snapshot(spool, 50, small_device, size=40_000)
        until(lambda: spool.status().committed["step"] == 50, "step 50")
        code, said = finish(writer)
    assert code == 0 and len(said) == 2
    assert "no checkpoint of step 20: no room to write 80" in said[0] and "training continues" in said[0]
    assert "checkpoints can be written again: step 50 is committed" in said[1]
    check(newest(small_device), 50, size=40_000)


def test_a_snapshot_that_did_not_fit_is_tried_again(small_device: Path, spool: Spool) -> None:
    filler = small_device / "filler"
    filler.write_bytes(bytes(230_000))
    with writing(spool) as writer:
        snapshot(spool, 10, small_device, size=40_000)
        until(lambda: spool.status().failed == 10, "step 10 to fail")
        filler.unlink()
        until(lambda: spool.status().committed.get("step") == 10, "step 10")
        code, said = finish(writer)
    assert code == 0 and len(said) == 2


def limited() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))


def test_quota(spool: Spool, where: Path) -> None:
    """First there is room for three, then for two only, then not even for one beside the other."""
    size = 2 * len(payload(0, 0, 50_000)) + 2000
    for step, quota in ((10, 3 * size), (20, 3 * size), (30, 3 * size)):
        snapshot(spool, step, where, size=50_000, quota_bytes=quota)
        assert run_writer(spool) == (0, [])
        check(newest(where), step, size=50_000)
    assert steps_of(where) == [20, 30]
    snapshot(spool, 40, where, size=50_000, quota_bytes=2 * size + 3000)
    code, said = run_writer(spool)
    assert code == 0 and len(said) == 1 and "the oldest is removed first" in said[0]
    assert steps_of(where) == [30, 40]
    said = failing_quota(spool, where, size)
    assert len(said) == 1 and "exceed the quota" in said[0] and "raise the quota" in said[0]
    check(newest(where), 40, size=50_000)


def failing_quota(spool: Spool, where: Path, size: int) -> list[str]:
    with writing(spool) as writer:
        for step in (50, 60):
            snapshot(spool, step, where, size=50_000, quota_bytes=size + 3000)
            until(lambda step=step: spool.status().failed == step, f"step {step} to fail")
            assert spool.status().cause == "quota"
        return [line for line in finish(writer)[1] if "the oldest is removed first" not in line]


@pytest.fixture
def read_only(small_device: Path) -> Iterator[Path]:
    subprocess.run(["mount", "-o", "remount,ro", str(small_device)], check=True)
    yield small_device


def test_read_only(read_only: Path, spool: Spool) -> None:
    said = failing(spool, read_only, range(10, 40, 10), "read-only")
    assert len(said) == 1 and f"{read_only} cannot be written to" in said[0]


@pytest.mark.parametrize("nth", [2, 9])
def test_removed_while_it_is_written(nth: int, spool: Spool, where: Path) -> None:
    """The user removes the whole folder between two operations: that checkpoint is written again."""
    snapshot(spool, 10, where)
    assert run_writer(spool) == (0, [])
    snapshot(spool, 20, where)
    writer = start_writer(spool, [Fault(0, 20, "checkpoint.file", "SIGSTOP", nth)])
    until(lambda: Path(f"/proc/{writer.pid}/stat").read_text().rpartition(") ")[2][0] == "T", "it to stop")
    shutil.rmtree(where)
    os.kill(writer.pid, signal.SIGCONT)
    until(lambda: spool.status().committed.get("step") == 20, "step 20")
    code, said = finish(writer)
    check(newest(where), 20)
    assert code == 0 and len(said) in (0, 2)
    assert not said or ("was removed, or is not mounted" in said[0] and "can be written again" in said[1])


def test_slow_storage(spool: Spool, where: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Ten snapshots come in the time of one write: memory holds three at most, and the newest is written next."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    target = Target(f"gated://{where}")
    said: list[str] = []
    snapshots = Snapshots(spool, 0, 1, [0], target, said.append)
    taken = []
    with writing(spool, program="import gated", env={"GATE": str(gate)}) as writer:
        for step in range(10, 120, 10):
            if snapshots.take(step, {"rank0": payload(step, 0, 50_000)}, {}, {"run": "r"}):
                taken.append(step)
            snapshots.fence()
            if step == 10:
                until(lambda: spool.status().writing == 10, "the first write")
            held = sum(path.stat().st_size for path in spool.folder.rglob("rank0*") if path.is_file())
            assert held <= (MOST + 1) * 50_500
            until(lambda step=step: spool.steps() == sorted({10, step}), "older ones to be let go")
        assert taken == list(range(10, 120, 10)) and not said
        until(lambda: spool.status().waiting == 110, "the newest to wait")
        with open(gate, "wb", buffering=0) as opened:  # as many bytes as files will be written
            opened.write(bytes(100))
            assert spool.wait_committed(110, 20.0)
            code, lines = finish(writer)
    assert (code, lines) == (0, [])
    assert [each.step for each in store.committed(where)] == [10, 110]


def test_without_a_writer_memory_is_bounded(spool: Spool, where: Path) -> None:
    said: list[str] = []
    snapshots = Snapshots(spool, 0, 1, [0], Target(str(where)), said.append)
    taken = [snapshots.take(step, {"rank0": b"x"}, {}, {"run": "r"}) for step in range(1, 10)]
    snapshots.fence()
    assert taken == [True] * MOST + [False] * (9 - MOST)
    assert len(said) == 1 and "3 snapshots wait in memory, because the writer" in said[0]


def test_no_memory(spool: Spool, where: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot larger than the machine's memory is refused before anything is written."""
    import torch

    said: list[str] = []
    snapshots = Snapshots(spool, 0, 1, [0], Target(str(where)), said.append)
    large = torch.zeros(1).expand(available_memory())  # one byte of memory, four times the machine's when copied
    for step in (1, 2):
        assert not snapshots.take(step, {}, {"a.safetensors": ({"large": large}, {})}, {"run": "r"})
    assert len(said) == 1 and "does not fit into memory" in said[0] and "training continues" in said[0]
    assert not [path for path in spool.folder.rglob("*") if path.is_file()]
    assert snapshots.take(3, {}, {"a.safetensors": ({"small": torch.zeros(3)}, {})}, {"run": "r"})
    snapshots.fence()
    assert spool.newest_complete() == 3


def test_urls(spool: Spool, where: Path) -> None:
    """``file://`` is a folder; ``local://`` is fsspec's way to the same."""
    url = f"local://{where}"
    assert isinstance(open_storage(f"file://{where}"), LocalStorage) and isinstance(open_storage(url), UrlStorage)
    for step in (10, 20, 30):
        snapshot(spool, step, url)
        assert run_writer(spool) == (0, [])
    check(newest(url), 30)
    assert steps_of(where) == [20, 30]
    os.truncate(where / "step-0000000030" / "rank1", 5)
    check(newest(url), 20)
    assert newest(f"{url}/nothing") is None


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(MissingExtra, match=r"need fsspec: pip install 'swift-recovery\[all\]'"):
        open_storage("s3://bucket/run")


def test_a_writer_that_lacks_the_extra_says_so_once(spool: Spool) -> None:
    said = failing(spool, "nonsense://x", range(10, 40, 10), "config")
    assert len(said) == 1 and "checkpoint.dir='nonsense://x'" in said[0]

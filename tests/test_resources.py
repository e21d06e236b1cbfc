"""What the system refuses: when it is tried again, what is said, and what is written elsewhere."""

from __future__ import annotations

import errno
import os
import selectors
from pathlib import Path

import pytest
import torch

from shared_core.errors import OutOfResources
from shared_core.events import EventLog, read_events
from shared_core.launcher.standby import Preload, Standby
from shared_core.launcher.workers import LiveWorker, WorkerPool
from shared_core.protocol.frontier import StepBoundary
from shared_core.protocol.request import StartRequest
from shared_core.resources import LONGEST_S, Retries, map_file
from shared_core.worker.messages.group_log import RETRY_S, BufferPool, GroupLog, LogEntry, Spilling
from shared_core.worker.state.publication_file import Overflow
from shared_core.worker.state.publications import RecordKey, SharedMemoryPublisher


class Clock:
    """A clock that a test moves."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def refusal(number: int) -> OSError:
    return OSError(number, os.strerror(number))


def fill(folder: Path) -> Path:
    """Leave no room in the file system of a folder."""
    filler = folder / "filler"
    with open(filler, "ab", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue
    return filler


def test_one_line_until_it_works_again_and_longer_and_longer_waits() -> None:
    said: list[str] = []
    clock = Clock()
    retries, waits = Retries(said.append, clock), []
    for _ in range(8):
        begin = clock.now
        retries.refused("no process can be started", refusal(errno.EAGAIN))
        while not retries.due:
            clock.now += 0.05
        waits.append(clock.now - begin)
    assert said == [
        "no process can be started (Resource temporarily unavailable): raise the limit of processes and threads "
        "(ulimit -u, in a container --pids-limit); it is tried again"
    ]
    assert waits == sorted(waits) and waits[0] < 0.2 and LONGEST_S <= waits[-1] < LONGEST_S + 0.1
    retries.worked()
    retries.refused("no process can be started", refusal(errno.ENOMEM))
    assert len(said) == 2 and "free memory" in said[1]


@pytest.mark.parametrize("standbys", [0, 1])
def test_a_process_that_cannot_be_started_is_tried_again_until_the_wait_ends(
    monkeypatch: pytest.MonkeyPatch, standbys: int
) -> None:
    def refuse(*_: object, **__: object) -> int:
        raise refusal(errno.EAGAIN)

    monkeypatch.setattr(Standby, "spawn", staticmethod(refuse))
    monkeypatch.setattr("shared_core.launcher.workers.start_fresh", refuse)
    said: list[str] = []
    with selectors.DefaultSelector() as selector:
        worker_pool = WorkerPool(selector, standbys, {}, Preload(()), said.append, wait_timeout_s=0.5)
        worker_pool.fill_standbys()
        request = StartRequest(1, "script", "x.py", (), {"RANK": "0"}, os.getpid(), "", "", 0)
        worker_pool.start(LiveWorker(0, 0, 0, request))
        with pytest.raises(OutOfResources, match=r"no process could be started \(Resource temp.*ulimit -u"):
            while True:
                assert worker_pool.started() == [] and worker_pool.starting
                worker_pool.look_after_standbys()
    assert len([line for line in said if "can be started" in line]) == 1


def test_no_mapping_without_room(small_device: Path) -> None:
    fill(small_device)
    with pytest.raises(OutOfResources, match="4096 bytes cannot be written.*make room there"):
        map_file(small_device / "mapped", 4096)


def boundary(index: int) -> StepBoundary:
    return StepBoundary(index, index, 0, "batch", {}, {}, {}, {}, [])


def test_publications_that_do_not_fit_into_memory_lie_on_disk(
    small_device: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    memory, disk = small_device / "job" / "rank0" / "attempt0", tmp_path / "disk" / "board0" / "attempt0"
    disk.parent.mkdir(parents=True)
    publisher = SharedMemoryPublisher(memory, disk=Overflow(disk))
    parts = [{"state": torch.full((20_000,), float(number))} for number in range(8)]
    publisher.records.add(RecordKey(0, "a", "", 0), [torch.ones(3)])
    for number, each in enumerate(parts):
        publisher.publish_boundary(boundary(number), each)
        publisher.records.add(RecordKey(0, "b", "", number), [torch.full((3_000,), float(number))])
        publisher.drop_before(number - 1)
    after = SharedMemoryPublisher(memory, disk=Overflow(disk))  # a replacement's
    assert [each.index for each in after.boundaries()] == [6, 7]
    assert all(torch.equal(after.read_boundary(number)["state"], parts[number]["state"]) for number in (6, 7))
    assert [key[1:4] for key, _ in after.records.read()] == [("a", "", 0), *(("b", "", number) for number in range(8))]
    assert capfd.readouterr().err.count("memory is full at") == 1
    after.drop_before(8)
    assert len(list(disk.glob("boundary.*"))) <= 2, "the newest, and one whose room is used again"


def test_nothing_takes_a_publication(small_device: Path) -> None:
    publisher = SharedMemoryPublisher(small_device / "job" / "rank0" / "attempt0")
    with pytest.raises(OutOfResources, match=r"bytes cannot be written to .*boundary.1 \(No space left"):
        publisher.publish_boundary(boundary(1), {"state": torch.zeros(100_000)})


def test_events_are_lost_while_the_disk_is_full(small_device: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path, job = small_device / "events.jsonl", small_device / "job"
    job.mkdir()
    logs = [EventLog(path, "run", job) for _ in range(2)]
    logs[0].emit("start")
    filler = fill(small_device)
    for _ in range(40):  # the last page of the file has some room
        for log in logs:
            log.emit("warning", message="x" * 100)
    filler.unlink()
    logs[1].emit("end")
    said = capfd.readouterr().err
    assert said.count("events are lost") == said.count("\n") == 1 and str(path) in said and "make room" in said
    torn: list[str] = []
    kinds = [event.kind for event in read_events(path, torn)]
    assert kinds[0] == "start" and kinds[-1] == "end" and 1 < len(kinds) < 82 and len(torn) <= 1


def test_a_log_that_cannot_be_spilled_stays_in_memory(
    small_device: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TMPDIR", str(small_device))
    log, clock = GroupLog(BufferPool()), Clock()
    spilling = Spilling(0, clock)
    tensors = [torch.full((25_000,), float(seq)) for seq in range(4)]  # 400 kB; there is room for 256 KiB
    for seq, tensor in enumerate(tensors):
        log.put(seq, LogEntry(("all_reduce", ((25_000,),), ("float32",), 0), seq, [tensor.clone()]))
        spilling.spill(log, 1000)
        clock.now += RETRY_S
    assert 0 < log.nbytes < 400_000
    assert all(torch.equal(log.results(seq)[0], tensor) for seq, tensor in enumerate(tensors))
    said = capfd.readouterr().err
    assert said.count("\n") == 1 and str(small_device) in said and "make room there, or set TMPDIR" in said

"""What is published: plain data only, whole or not at all."""

from __future__ import annotations

import mmap
import os
import pathlib
import shutil
import signal
import struct
from typing import Any

import pytest
import torch

from shared_core.errors import CorruptFile
from shared_core.loaders.reshard import MARK
from shared_core.protocol.frontier import StepBoundary
from shared_core.worker.state import publication_file as slots_module
from shared_core.worker.state.publication_file import HEADER_BYTES, is_blank
from shared_core.worker.state.publications import RecordKey, SharedMemoryPublisher
from tests.support.digest import digest


def test_a_flipped_bit_in_large_tensors_is_noticed(tmp_path: pathlib.Path) -> None:
    """Their checksum is another one: that of sums."""
    publisher = SharedMemoryPublisher(tmp_path / "rank0")
    state = {"a": torch.arange(50_001.0), "b": torch.arange(70_003, dtype=torch.uint8), "c": torch.arange(3.0)}
    publisher.publish_boundary(StepBoundary(1, 0, 0, "batch", {}), state)
    assert all(torch.equal(each, state[name]) for name, each in publisher.read_boundary(1).items())
    path = tmp_path / "rank0" / "boundary.1"
    whole = path.read_bytes()
    size = HEADER_BYTES + sum(struct.unpack_from("<IQ", whole))
    for place in [*range(0, size, 997), *range(size - 70_003, size, 499), size - 1]:
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1 :])
        with pytest.raises(CorruptFile):
            publisher.read_boundary(1)


class Deadly:
    """Mapped memory to which 512 bytes are written at once, whose process is killed before one of these writes."""

    def __init__(self, memory: mmap.mmap, left: list[int]) -> None:
        self.memory, self.left = memory, left

    def __len__(self) -> int:
        return len(self.memory)

    def __setitem__(self, place: slice, data: Any) -> None:
        start = place.start or 0
        for at in range(0, len(data), 512):
            if not self.left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            self.left[0] -= 1
            part = bytes(data[at : at + 512])
            self.memory[start + at : start + at + len(part)] = part


def state_of(index: int) -> dict[str, Any]:
    return {"index": index, "state": torch.full((20_000 + 10_000 * (index % 2),), float(index))}


def publish_until_killed(folder: pathlib.Path, first: int, writes: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Publish boundaries from ``first`` on in a process that dies before its memory is written to for the ``writes``-th
    time. Returns the last one that was published for sure.
    """
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:
        left, room = [writes], slots_module.map_room
        monkeypatch.setattr(slots_module, "map_room", lambda path, size: Deadly(room(path, size), left))
        publisher = SharedMemoryPublisher(folder)
        for index in range(first, first + 100):
            publisher.publish_boundary(StepBoundary(index, index, 0, "batch", {}), state_of(index))
            publisher.publish_mid(index, 0, state_of(index))
            publisher.drop_before(index - 1)
            os.write(theirs, bytes([index]))
        os._exit(1)
    os.close(theirs)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    with open(ours, "rb") as file:
        return (file.read() or bytes([first - 1]))[-1]


def test_a_writer_killed_at_any_moment_leaves_whole_publications(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = SharedMemoryPublisher(tmp_path / "rank0")
    publisher.publish_boundary(StepBoundary(1, 1, 0, "batch", {}), state_of(1))
    seen = set()
    for writes in range(0, 2200, 97):
        folder = tmp_path / f"killed{writes}"
        shutil.copytree(publisher.folder, folder)
        done = publish_until_killed(folder, 2, writes, monkeypatch)
        successor = SharedMemoryPublisher(folder)
        found = [boundary.index for boundary in successor.boundaries()]
        assert found[-1] - done in (0, 1) and found == list(range(found[0], found[-1] + 1))
        assert set(range(max(1, done - 1), done + 1)) <= set(found), "what was kept is there"
        for index in found:
            assert digest(successor.read_boundary(index)) == digest(state_of(index))
            mid = successor.read_mid(index, 0)
            assert mid is None or digest(mid) == digest(state_of(index))
        newest = found[-1]
        successor.publish_boundary(
            StepBoundary(newest, newest, 0, "batch", {}), state_of(newest)
        )  # a replacement publishes it again
        successor.publish_boundary(StepBoundary(newest + 1, 0, 0, "batch", {}), state_of(newest + 1))
        successor.drop_before(newest)
        assert [boundary.index for boundary in successor.boundaries()] == [newest, newest + 1]
        assert digest(successor.read_boundary(newest)) == digest(state_of(newest))
        seen.add((newest - done, len(found)))
    assert len(seen) > 2, "it was killed in different places"


def test_old_boundaries_go_and_the_newest_stays(tmp_path: pathlib.Path) -> None:
    publisher = SharedMemoryPublisher(tmp_path / "rank0")
    for index in range(1, 5):
        publisher.publish_boundary(StepBoundary(index, 0, 0, "batch", {}), {})
        publisher.publish_mid(index, 0, {"n": index})
    publisher.drop_before(3)
    assert [boundary.index for boundary in publisher.boundaries()] == [3, 4]
    assert (
        publisher.read_mid(2, 0) is None and publisher.read_mid(3, 0) == {"n": 3} and publisher.read_mid(3, 1) is None
    )
    publisher.drop_before(100)
    assert [boundary.index for boundary in publisher.boundaries()] == [4]
    assert SharedMemoryPublisher(publisher.folder).read_boundary(4) == {} and publisher.read_mid(3, 0) is None
    files = set(publisher.folder.iterdir())
    publisher.publish_boundary(StepBoundary(5, 0, 0, "batch", {}), {"shorter": 1})  # over what a dropped one has left
    assert len(set(publisher.folder.iterdir())) == len(files) and publisher.read_boundary(5) == {"shorter": 1}
    successor = SharedMemoryPublisher(publisher.folder)
    successor.publish_boundary(StepBoundary(6, 0, 0, "batch", {}), {})
    assert {path.name for path in publisher.folder.iterdir()} == {
        "checks",
        "sources",
        "mid.4.0",
        "records",
        "boundary.4",
        "boundary.5",
        "boundary.6",
    }


def test_what_failed_workers_left_goes_when_nothing_refers_to_it(tmp_path: pathlib.Path) -> None:
    """Every replacement publishes the order of its pass again; one that it continues with stays."""

    def state(order: str) -> dict[str, Any]:
        return {"loop": [{MARK: True, "iterations": [{"order": order}]}]}

    def files() -> set[str]:
        found = {path for path in publisher.folder.iterdir() if not is_blank(path)}
        return {path.name for path in found} - {"checks", "records"}

    publisher = SharedMemoryPublisher(tmp_path / "rank0")
    dealt = publisher.orders.write([1, 2, 3])
    index = 1
    for _ in range(3):
        own = publisher.orders.write([[1, 2], [3]])
        for _ in range(4):
            publisher.publish_boundary(StepBoundary(index, 0, 0, "batch", {}), state(own) | {"dealt": state(dealt)})
            publisher.publish_mid(index, 0, {"n": index})
            publisher.publish_mid(index, 1, {"n": index})
            publisher.drop_before(index - 1)
            assert publisher.orders.read(own) == [[1, 2], [3]] and publisher.orders.read(dealt) == [1, 2, 3]
            assert publisher.read_mid(index - 1, 1) is None or index > 1
            index += 1
        left = {
            f"{kind}.{number}{end}"
            for number in (index - 1, index - 2)
            for kind, end in (("boundary", ""), ("mid", ".0"), ("mid", ".1"))
        }
        assert files() == left | {own, dealt}
        (publisher.folder / "order.0123.tmp").touch()  # it is killed while it writes one
        publisher = SharedMemoryPublisher(tmp_path / "rank0")
        assert publisher.orders.read(own) == [[1, 2], [3]], "its replacement may begin there"
        index -= 1  # it begins at the newest boundary, and publishes it again


def test_records_are_let_go_of_once_they_are_many(tmp_path: pathlib.Path) -> None:
    publisher = SharedMemoryPublisher(tmp_path / "rank0")
    for number in range(5):
        publisher.records.add(RecordKey(0, "w", "broadcast", number), [torch.full((1 << 20,), float(number))])
        publisher.records.forget(lambda key: key.number < 2)
        kept = [key.number for key, _ in SharedMemoryPublisher(tmp_path / "rank0").records.read()]
        assert kept == [*range(0 if number < 3 else 2, number + 1)], "at 16 MiB"
    publisher.records.add(RecordKey(0, "w", "broadcast", 7), [torch.ones(2)])
    assert [float(results[0][0]) for _, results in publisher.records.read()] == [2.0, 3.0, 4.0, 1.0]


def test_records_survive_a_torn_last_one(tmp_path: pathlib.Path) -> None:
    publisher = SharedMemoryPublisher(tmp_path / "rank0")
    for number in range(3):
        publisher.records.add(RecordKey(0, "w", "broadcast", number), [torch.full((2,), float(number))])
    path = tmp_path / "rank0" / "records"
    whole = path.read_bytes()
    for cut in range(1, len(whole) // 3, 5):
        path.write_bytes(whole[:-cut])
        found = SharedMemoryPublisher(tmp_path / "rank0").records.read()
        assert [key.number for key, _ in found] == [0, 1]
        assert found[1][1][0].tolist() == [1.0, 1.0]
    path.write_bytes(whole)
    assert len(publisher.records.read()) == 3


def test_what_is_published_is_private(tmp_path: pathlib.Path) -> None:
    publisher = SharedMemoryPublisher(tmp_path / "job" / "rank0")
    publisher.publish_boundary(StepBoundary(1, 0, 0, "batch", {}), {})
    assert publisher.folder.stat().st_mode & 0o077 == 0
    assert all(path.stat().st_mode & 0o077 == 0 for path in publisher.folder.iterdir())


def test_what_a_checkpoint_has_is_published_once(tmp_path: pathlib.Path) -> None:
    """A replacement may have failed while it did that."""
    records = [(RecordKey(0, "results", str(number), 3), [torch.tensor(float(number))]) for number in range(3)]
    publisher = SharedMemoryPublisher(tmp_path / "rank0")
    publisher.records.add(*records[0])
    publisher.publish_end(0, 1.5, {})
    for _ in range(2):
        publisher.complete(records, {0: (None, {}), 1: (2.5, {"loop": 1})})
    found = SharedMemoryPublisher(tmp_path / "rank0")
    assert [(key, float(results[0])) for key, results in found.records.read()] == [(k, float(r[0])) for k, r in records]
    assert found.read_end(0) == (1.5, {}) and found.read_end(1) == (2.5, {"loop": 1})

"""The log on disk: what comes back is what was put, bit for bit, or is reported missing. Real files, kills, full disks.

Run as a script, this is the process that gets killed.
"""

from __future__ import annotations

import errno
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from shared_core.errors import CorruptFile, WaitTimeout
from shared_core.worker.messages import segments
from shared_core.worker.messages.archive import Archive, Key

WAIT_S = 30.0
A, B, C = "default|0,1,0", "default|1,0,0", "default"


def content(channel: str, index: int, size: int = 40) -> list[torch.Tensor]:
    """What record ``index`` of ``channel`` holds."""
    seeded = torch.Generator().manual_seed(1000 * index + len(channel))
    return [torch.randn(size, generator=seeded), torch.tensor(index)]


def key(channel: str, index: int, top: int = 0) -> Key:
    return Key(channel, index, top, {"version": top, "direction": "forward", "source": 0})


def put(archive: Archive, channel: str, index: int, top: int = 0, size: int = 40) -> None:
    archive.put(key(channel, index, top), content(channel, index, size))


def bits(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (tensor.dtype, tuple(tensor.shape), bytes(segments.view_bytes(tensor)))


def same(archive: Archive, channel: str, index: int, top: int = 0, size: int = 40) -> bool:
    got, tensors = archive.read(channel, index)
    assert got == key(channel, index, top)
    return [bits(t) for t in tensors] == [bits(t) for t in content(channel, index, size)]


def _place(archive: Archive, channel: str, index: int) -> segments.Place:
    place = archive._index.place(channel, index)
    assert place is not None
    return place


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.log"))


class Gated(Archive):
    """An archive whose disk waits for a permit before each write."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.permits = threading.Semaphore(0)
        self.asked = threading.Semaphore(0)
        super().__init__(folder, write=self._append, **options)

    def _append(self, fd: int, parts: Sequence[bytes | memoryview[Any]]) -> None:
        self.asked.release()
        assert self.permits.acquire(timeout=WAIT_S)
        segments.write_all(fd, parts)

    def open_gate(self) -> None:
        self.permits.release(1000)


# -- round trip ------------------------------------------------------------------------------------


def everything() -> list[torch.Tensor]:
    """Tensors of all dtypes with random bits, NaNs of all kinds among them, and of all sorts of shapes."""
    seeded = torch.Generator().manual_seed(5)
    raw = torch.randint(0, 256, (4096,), dtype=torch.uint8, generator=seeded)
    names = [name for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype)]
    dtypes = {getattr(torch, name) for name in names}
    out = [raw.view(d) for d in sorted(dtypes - {torch.bool}, key=str) if not d.is_complex and segments._has_bytes(d)]
    assert len(out) >= 14 and {torch.bfloat16, torch.float8_e5m2} <= {t.dtype for t in out}
    out += [raw.view(torch.complex64), raw.view(torch.complex128).conj(), raw.view(torch.float32).view(-1, 2).t()]
    out += [torch.tensor([True, False, True]), torch.tensor(3.5), torch.tensor(7), torch.empty(0, 4), torch.empty(3, 0)]
    out += [torch.arange(24).view(2, 3, 4).permute(2, 0, 1), torch.arange(9)[::2], torch.ones(1).expand(5, 3)]
    out += [torch.randn(3, requires_grad=True), torch.nn.Parameter(torch.randn(2)), torch.randn(3) * 2j]
    out += [torch.view_as_complex(torch.randn(4, 2)).conj().imag]
    nans = torch.tensor([0x7FC00001, 0x7F800001, -1, 0x7FFFFFFF], dtype=torch.int32)
    return [*out, nans.view(torch.float32)]


def test_every_dtype_and_shape_comes_back_bit_for_bit(tmp_path: Path) -> None:
    tensors = everything()
    expected = [bits(t) for t in tensors]
    archive = Gated(tmp_path / "log")
    archive.put(key(C, 0), tensors)
    for number, tensor in enumerate(tensors, 1):
        archive.put(key(C, number), [tensor])
    archive.put(key(C, len(tensors) + 1), [])
    archive.put(key(C, len(tensors) + 2), [torch.tensor(i) for i in range(3000)])  # more than one system call takes

    def check() -> None:
        assert [bits(t) for t in archive.read(C, 0)[1]] == expected
        for number, want in enumerate(expected, 1):
            assert [bits(t) for t in archive.read(C, number)[1]] == [want]
        assert archive.read(C, len(tensors) + 1) == (key(C, len(tensors) + 1), [])
        assert [int(t) for t in archive.read(C, len(tensors) + 2)[1]] == list(range(3000))

    check()  # from the ring
    mine = archive.read(C, 1)[1][0]
    mine.zero_()
    assert [bits(t) for t in archive.read(C, 1)[1]] == expected[:1], "what is read is the reader's own"
    archive.open_gate()
    archive.flush(WAIT_S)
    assert archive.stats.bytes_waiting == 0
    check()  # from the file
    archive.close()
    archive = Archive.reopen(tmp_path / "log")  # type: ignore[assignment]
    check()
    archive.close()


def test_what_a_log_cannot_keep_is_refused(tmp_path: Path) -> None:
    archive = Archive(tmp_path)
    with pytest.raises(ValueError, match="dense tensors"):
        archive.put(key(C, 0), [torch.eye(3).to_sparse()])
    assert not segments._has_bytes(torch.qint8)
    with pytest.raises(TypeError):
        archive.put(Key(C, 0, 0, {"x": object()}), [])
    with pytest.raises(ValueError, match="too many"):
        archive.put(Key(C, 0, 0, {"x": "x" * segments.HEADER_LIMIT}), [])
    archive.put(key(C, 1), [torch.ones(1)])
    archive.flush(WAIT_S)
    assert archive.first(C) == 1 and archive.stats.failed is None
    archive.close()
    with pytest.raises(ValueError, match="holds a log: reopen it"):
        Archive(tmp_path)


def test_files_are_private_and_tensors_are_let_go(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        archive = Archive(tmp_path / "a" / "log")
        tensor = torch.randn(10)
        gone = weakref.ref(tensor)
        archive.put(key(C, 0), [tensor])
        del tensor
        archive.flush(WAIT_S)
        archive.put(key(C, 1), [])  # the writer is past the first one when this is written
        archive.flush(WAIT_S)
    finally:
        os.umask(old)
    assert gone() is None
    assert archive.folder.stat().st_mode & 0o777 == 0o700
    assert [path.stat().st_mode & 0o777 for path in files(archive.folder)] == [0o600]
    assert archive.stats.bytes_on_disk == sum(path.stat().st_size for path in files(archive.folder))
    archive.remove()
    assert not (tmp_path / "a" / "log").exists()
    archive.put(key(C, 2), [torch.ones(1)])  # nothing happens
    assert archive.first(C) is None


# -- the index -------------------------------------------------------------------------------------


def test_first_indices_and_drops(tmp_path: Path) -> None:
    archive = Archive(tmp_path, segment_bytes=1000)
    assert archive.first(A) is None and archive.indices(A) == [] and archive.channels() == []
    for index in range(20):
        put(archive, A, index, top=index // 4)
        put(archive, B, 100 + index, top=index // 4)
    archive.flush(WAIT_S)
    assert archive.channels() == [A, B]
    assert archive.first(A) == 0 and archive.first(B) == 100 and archive.indices(A) == list(range(20))
    before = len(files(tmp_path))
    assert before >= 5 and archive.stats.records == 40
    archive.drop_before(0)
    archive.flush(WAIT_S)
    assert len(files(tmp_path)) == before
    archive.drop_before(3)  # records 0 to 11
    first = archive.first(A)
    assert first is not None and 8 <= first <= 12, "whole segments, and never a record that is still needed"
    archive.flush(WAIT_S)
    assert len(files(tmp_path)) < before
    assert archive.stats.bytes_on_disk == sum(path.stat().st_size for path in files(tmp_path))
    with pytest.raises(CorruptFile, match="there is no message 0 of default|0,1,0"):
        archive.read(A, 0)
    put(archive, A, 21, top=5)  # 20 is missing
    assert archive.first(A) == 21 and archive.indices(A) == [*range(first, 20), 21]
    assert archive.first(A, before=20) == first and archive.first(A, before=22) == 21
    assert archive.first(A, before=21) is None and archive.first(A, before=30) is None
    archive.flush(WAIT_S)
    archive.drop_before(6)  # the open segment too
    assert archive.first(B) is None
    put(archive, A, 22, top=6)
    archive.flush(WAIT_S)
    assert archive.first(A) == 22 and same(archive, A, 22, top=6)
    archive.drop_before(6)
    archive.flush(WAIT_S)
    assert archive.first(A) == 22 and len(files(tmp_path)) == 1
    archive.close()
    again = Archive.reopen(tmp_path)
    assert again.indices(A) == [22] and same(again, A, 22, top=6)
    again.drop_before(7)
    again.flush(WAIT_S)
    assert files(tmp_path) == [] and again.stats.bytes_on_disk == 0
    again.close()


def test_a_record_that_waits_is_not_lost_by_a_drop(tmp_path: Path) -> None:
    archive = Gated(tmp_path)
    put(archive, A, 0, top=0)
    assert archive.asked.acquire(timeout=WAIT_S)  # the segment's header
    archive.permits.release()
    assert archive.asked.acquire(timeout=WAIT_S)  # record 0
    put(archive, A, 1, top=5)
    archive.drop_before(3)  # record 0 is being written
    archive.open_gate()
    archive.flush(WAIT_S)
    assert archive.indices(A) == [1] and same(archive, A, 1, top=5) and len(files(tmp_path)) == 1
    archive.close()


def test_a_segment_that_gets_a_newer_record_is_not_dropped(tmp_path: Path) -> None:
    archive = Gated(tmp_path)
    archive.permits.release(2)
    put(archive, A, 0, top=0)
    archive.flush(WAIT_S)
    put(archive, A, 1, top=5)
    for _ in range(3):
        assert archive.asked.acquire(timeout=WAIT_S)  # the segment's header, record 0, record 1
    archive.drop_before(3)  # while record 1 is being written behind record 0
    archive.open_gate()
    archive.flush(WAIT_S)
    assert archive.first(A) == 0 and same(archive, A, 1, top=5)
    archive.close()


def test_a_record_is_written_once(tmp_path: Path) -> None:
    archive = Archive(tmp_path)
    for _ in range(2):
        put(archive, A, 0)
    archive.flush(WAIT_S)
    put(archive, A, 0)
    archive.close()
    assert archive.stats.records == 1
    again = Archive.reopen(tmp_path)
    put(again, A, 0)  # a newcomer sends its predecessor's messages again
    put(again, A, 1)
    again.flush(WAIT_S)
    assert again.stats.records == 1 and again.indices(A) == [0, 1] and same(again, A, 0)
    assert [path.name for path in files(tmp_path)] == ["00000000.log", "00000001.log"]
    again.close()


# -- slow disks ------------------------------------------------------------------------------------


def test_back_pressure(tmp_path: Path) -> None:
    archive = Gated(tmp_path, ring_bytes=4000)
    for index in range(3):
        put(archive, A, index, size=250)  # 1 KB and a header each
    assert archive.stats.blocked_times == 0 and archive.stats.bytes_waiting <= 4000
    with pytest.raises(WaitTimeout, match="3 message.* were not written to"):
        archive.flush(0.01)
    through = threading.Event()

    def more() -> None:
        put(archive, A, 3, size=250)
        through.set()
        put(archive, A, 4, size=5000)  # larger than the ring: alone
        put(archive, A, 5)

    thread = threading.Thread(target=more)
    thread.start()
    assert not through.wait(0.05)
    archive.permits.release(2)  # the segment's header and one record
    assert through.wait(WAIT_S)
    assert archive.stats.blocked_times >= 1 and archive.stats.bytes_waiting <= 4000
    assert archive.stats.blocked_s >= 0.04
    archive.open_gate()
    thread.join(WAIT_S)
    archive.flush(WAIT_S)
    assert archive.indices(A) == list(range(6)) and archive.first(A) == 0
    assert all(same(archive, A, i, size=size) for i, size in enumerate([250, 250, 250, 250, 5000, 40]))
    archive.close()


def test_a_disk_that_never_answers_stops_the_log_not_training(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    archive = Gated(tmp_path, ring_bytes=2000, stall_s=0.05)
    for index in range(5):
        put(archive, A, index, size=250)
    assert archive.stats.failed == "the disk is too slow: waited 0.05 s for it" and archive.stats.bytes_waiting == 0
    assert archive.first(A) is None and archive.indices(A) == []
    with pytest.raises(WaitTimeout, match="could not be closed"):
        archive.close(0.01)
    archive.open_gate()
    archive.close()
    assert files(tmp_path) == [], "the write that hung is of no use"
    assert capfd.readouterr().err.count("no longer logged") == 1


# -- reopened --------------------------------------------------------------------------------------


def writer(root: Path, rounds: int, seed: int) -> None:
    """Fork writers one after the other, kill each at some moment, and print what it had flushed and dropped."""
    chance = random.Random(seed)
    for number in range(rounds):
        out, into = os.pipe()
        pid = os.fork()
        if not pid:
            os.close(out)
            archive = Archive(root / str(number), segment_bytes=400_000, ring_bytes=1 << 20)
            for index in range(1_000_000):
                put(archive, A, index, top=index // 8, size=size_of(index))
                if chance.random() < 0.3:
                    archive.flush(WAIT_S)
                    kept = max(0, index // 8 - 6)
                    os.write(into, f"{index} {kept}\n".encode())
                    archive.drop_before(kept)
        os.close(into)
        with open(out) as lines:
            for _ in range(chance.randrange(1, 40)):
                last = lines.readline()
            until = time.perf_counter() + chance.random() * 0.005
            while time.perf_counter() < until:
                pass
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            for last in lines:  # noqa: B007
                pass
        print(last.strip(), flush=True)


def size_of(index: int) -> int:
    return 60_000 if index % 10 == 9 else 100 + index % 700


def test_kills(tmp_path: Path) -> None:
    rounds, seed = 12, random.randrange(1 << 30)
    print(f"seed {seed}")
    command = [sys.executable, __file__, str(tmp_path), str(rounds), str(seed)]
    lines = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=60).stdout.splitlines()
    assert len(lines) == rounds
    for number, line in enumerate(lines):
        flushed, kept = map(int, line.split())
        archive = Archive.reopen(tmp_path / str(number))
        held = archive.indices(A)
        assert held == list(range(held[0], held[-1] + 1)) and archive.first(A) == held[0], number
        assert held[0] <= kept * 8 and held[-1] >= flushed, (number, held[0], held[-1], line)
        assert all(same(archive, A, i, top=i // 8, size=size_of(i)) for i in held) and archive.verify() == []
        put(archive, A, held[-1] + 1, top=held[-1])
        archive.flush(WAIT_S)
        assert archive.first(A) == held[0]
        archive.close()


def test_closed_segments_are_taken_by_their_index(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    archive = Archive(tmp_path, segment_bytes=2000)
    for index in range(12):
        put(archive, A, index)
    archive.close()
    place = _place(archive, A, 4)
    flip(place.segment.path, place.offset + 150)  # in its contents
    again = Archive.reopen(tmp_path)
    assert again.first(A) == 0, "contents of closed segments are not read"
    with pytest.raises(CorruptFile, match=rf"message 4 of .* in {place.segment.path} at offset {place.offset} cannot"):
        again.read(A, 4)
    assert again.first(A) == 5, "once it is known to be damaged, it does not count"
    put(again, A, 4)
    again.flush(WAIT_S)
    assert again.first(A) == 0 and same(again, A, 4)
    again.close()
    again = Archive.reopen(tmp_path)
    assert again.first(A) == 0 and same(again, A, 4) and again.verify() == [], "the one put last counts"
    place = _place(again, A, 11)
    flip(place.segment.path, place.offset + 150)
    assert again.verify() == [(A, 11)]
    assert again.first(A) is None and again.indices(A) == list(range(11)) and again.verify() == []
    again.close()
    assert capfd.readouterr().err == ""
    # Without an index the segment is read through.
    path = files(tmp_path)[-2]
    os.truncate(path, path.stat().st_size - 1)
    again = Archive.reopen(tmp_path)
    assert again.first(A) is None and again.indices(A) == list(range(11))
    assert "1 damaged message(s), left out: 11 of default|0,1,0" in capfd.readouterr().err
    again.close()


def test_reopen_of_nothing(tmp_path: Path) -> None:
    archive = Archive.reopen(tmp_path / "none")
    assert archive.channels() == [] and archive.first(A) is None
    put(archive, A, 5)
    archive.close()
    (tmp_path / "none" / "00000007.log").touch()
    (tmp_path / "none" / "other.log").write_text("not ours")
    again = Archive.reopen(tmp_path / "none")
    put(again, A, 6)
    again.close()
    assert (tmp_path / "none" / "00000008.log").exists(), "numbers are not used again"
    assert again.first(A) == 5


# -- damage ----------------------------------------------------------------------------------------


def flip(path: Path, at: int, bit: int = 0) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << bit]))


TOTAL = {A: range(9), B: range(3, 12), C: range(9)}


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """What a killed process left: closed segments and one that was open."""
    archive = Archive(tmp_path / "live", segment_bytes=1400)
    for step in range(9):
        for channel, indices in TOTAL.items():
            put(archive, channel, indices[step], top=step)
    archive.flush(WAIT_S)
    shutil.copytree(tmp_path / "live", tmp_path / "killed")
    archive.remove()
    assert len(files(tmp_path / "killed")) >= 4
    return tmp_path / "killed"


def readable(folder: Path) -> set[tuple[str, int]]:
    """The records that can be read, each compared with what was put."""
    archive = Archive.reopen(folder)
    good = set()
    for channel in archive.channels():
        for index in archive.indices(channel):
            try:
                assert same(archive, channel, index, top=index - TOTAL[channel][0]), (channel, index)
            except CorruptFile as error:
                assert "offset" in str(error)
            else:
                good.add((channel, index))
    for channel in TOTAL:
        first, held = archive.first(channel), archive.indices(channel)
        assert {(channel, index) for index in held} == {pair for pair in good if pair[0] == channel}
        if first is not None:
            assert held[-(held[-1] - first + 1) :] == list(range(first, held[-1] + 1))
    archive.close()
    for path in files(folder):  # of this reader
        if path.stat().st_size == 0:
            path.unlink()
    return good


EVERY = {(channel, index) for channel, indices in TOTAL.items() for index in indices}


def test_undamaged(killed: Path) -> None:
    assert readable(killed) == EVERY


def test_truncation_at_every_byte_of_the_last_record(killed: Path) -> None:
    last = Archive.reopen(killed)
    place = _place(last, C, 8)
    last.close()
    path = place.segment.path
    data = path.read_bytes()
    assert len(data) == place.segment.size
    for size in range(place.offset, len(data)):
        path.write_bytes(data[:size])
        archive = Archive.reopen(killed)
        assert archive.first(A) == 0 and archive.first(B) == 3 and archive.first(C) == 0, size
        assert archive.indices(C) == list(range(8)), size
        archive.close()
    path.write_bytes(data[: len(data) - 1])
    assert readable(killed) == EVERY - {(C, 8)}
    again = Archive.reopen(killed)
    put(again, C, 8, top=8)
    again.close()
    assert readable(killed) == EVERY


def test_truncation_anywhere(killed: Path, tmp_path: Path) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    chance = random.Random(seed)
    for _ in range(60):
        path = chance.choice(files(killed))
        data = path.read_bytes()
        path.write_bytes(data[: chance.randrange(len(data))])
        assert readable(killed) <= EVERY
        path.write_bytes(data)


@pytest.mark.parametrize("flips", [1, 8])
def test_bit_flips(killed: Path, flips: int) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    chance = random.Random(seed)
    for _ in range(150):
        path = chance.choice(files(killed))
        data = path.read_bytes()
        for _ in range(flips):
            flip(path, chance.randrange(len(data)), chance.randrange(8))
        assert len(readable(killed)) >= len(EVERY) - flips, "damage costs the records it is in and no other"
        path.write_bytes(data)


def test_every_bit_of_a_frame_counts(killed: Path) -> None:
    """Magic, lengths and checksums of a record in a segment without an index, and its first bytes."""
    archive = Archive.reopen(killed)
    channel, index, *_ = archive._index.segments[-1].entries[-1]
    place = _place(archive, channel, index)
    archive.close()
    path = place.segment.path
    data = path.read_bytes()
    assert path == files(killed)[-1] and place.offset > segments.START
    for at in (*range(segments.START), *range(place.offset, place.offset + segments.FIXED)):
        flip(path, at, at % 8)
        lost = set() if at < segments.START else {(channel, index)}
        assert readable(killed) == EVERY - lost, at
        path.write_bytes(data)


def test_missing_swapped_and_copied_segments(killed: Path) -> None:
    paths = files(killed)
    held = {}
    for path in paths:
        data = path.read_bytes()
        path.unlink()
        held[path] = EVERY - readable(killed)
        assert held[path]
        path.write_bytes(data)
    assert set().union(*held.values()) == EVERY and sum(map(len, held.values())) == len(EVERY)
    paths[0].rename(killed / "x")
    paths[1].rename(paths[0])
    (killed / "x").rename(paths[1])
    assert readable(killed) == EVERY, "a segment knows its number"
    shutil.copy(paths[2], killed / "00000020.log")
    assert readable(killed) == EVERY
    flip(paths[0], 16)  # the number: what the name says is wrong for its records
    assert readable(killed) == EVERY - held[paths[1]]


def test_another_owner_and_another_format(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for rank in range(2):
        archive = Archive(tmp_path / str(rank), owner=f"job 1 rank {rank}")
        put(archive, C, rank)
        archive.close()
    shutil.copy(tmp_path / "0" / "00000000.log", tmp_path / "1" / "00000001.log")
    again = Archive.reopen(tmp_path / "1", owner="job 1 rank 1")
    assert again.indices(C) == [1]
    again.close()
    other = Archive.reopen(tmp_path / "1", owner="job 2 rank 1")
    assert other.channels() == []
    other.close()
    assert capfd.readouterr().err.count("or the log of another rank") == 3
    version, segments.FORMAT = segments.FORMAT, 2
    try:
        newer = Archive.reopen(tmp_path / "1", owner="job 1 rank 1")
    finally:
        segments.FORMAT = version
    newer.close()
    assert newer.channels() == [] and "has format 1, this version reads 2" in capfd.readouterr().err


def test_little_is_read_for_each_of_many_bad_records(tmp_path: Path) -> None:
    """A file of another rank consists of them: it is read a few times, not once for each."""

    def read_so_far() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    path = tmp_path / f"{0:08d}{segments.SUFFIX}"
    path.write_bytes(b"\x93SwRecd\n" * 20_000)
    before = read_so_far()
    Archive.reopen(tmp_path).close()
    assert read_so_far() - before < 100 * path.stat().st_size


def test_contents_that_look_like_records(tmp_path: Path) -> None:
    """A record whose tensor is a copy of the log, and its own header damaged: nothing in it is taken for a record."""
    archive = Archive(tmp_path / "live")
    put(archive, A, 0)
    archive.flush(WAIT_S)
    data = files(tmp_path / "live")[0].read_bytes()
    archive.put(key(C, 0), [torch.frombuffer(bytearray(data), dtype=torch.uint8)])
    put(archive, A, 1)
    archive.flush(WAIT_S)
    shutil.copytree(tmp_path / "live", tmp_path / "copy")
    inner = _place(archive, C, 0).offset
    archive.remove()
    path = tmp_path / "copy" / "00000000.log"
    flip(path, segments.START + 60)  # record 0 of A
    flip(path, inner + 40)  # the one with the copy
    again = Archive.reopen(tmp_path / "copy")
    assert again.indices(A) == [1] and again.channels() == [A]
    again.close()


# -- disk errors -----------------------------------------------------------------------------------


class Failing(Archive):
    """An archive whose segments are on a device that fails while ``bad`` is set."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.bad: int | None = None
        super().__init__(folder, write=self._append, **options)

    def _append(self, fd: int, parts: Sequence[bytes | memoryview[Any]]) -> None:
        if self.bad == errno.ENOSPC:
            with open("/dev/full", "wb", buffering=0) as full:
                fd = full.fileno()
                return segments.write_all(fd, parts)
        if self.bad is not None:
            raise OSError(self.bad, os.strerror(self.bad))
        segments.write_all(fd, parts)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_disk_error_stops_the_log_until_restart(
    number: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    archive = Failing(tmp_path, owner="rank 3")
    for index in range(3):
        put(archive, A, index)
    archive.flush(WAIT_S)
    archive.bad = number
    put(archive, A, 3)
    archive.flush(WAIT_S)
    assert archive.stats.failed == os.strerror(number) and archive.stats.stopped_times == 1
    err = capfd.readouterr().err
    assert err.count("\n") == 1 and err.startswith("[swift] rank 3: messages are no longer logged in ")
    assert os.strerror(number) in err and "goes back to its newest checkpoint" in err
    assert ("make room" in err) == (number == errno.ENOSPC)
    gone = torch.randn(4)
    reference = weakref.ref(gone)
    archive.put(key(A, 4), [gone])
    del gone
    assert reference() is None and archive.stats.bytes_waiting == 0
    assert archive.first(A) is None and archive.indices(A) == []
    archive.restart()
    put(archive, A, 5)
    archive.flush(WAIT_S)
    assert archive.stats.stopped_times == 2 and capfd.readouterr().err == "", "the user is told once"
    archive.bad = None
    archive.restart()
    put(archive, A, 6)
    put(archive, A, 7)
    archive.flush(WAIT_S)
    assert archive.stats.failed is None and archive.first(A) == 6 and same(archive, A, 7)
    archive.close()
    assert len(files(tmp_path)) == 1, "what cannot be replayed does not fill the disk"
    assert archive.stats.bytes_on_disk == files(tmp_path)[0].stat().st_size
    again = Archive.reopen(tmp_path, owner="rank 3")
    assert again.indices(A) == [6, 7] and again.first(A) == 6
    again.close()


def test_no_room_for_an_index(tmp_path: Path) -> None:
    archive = Failing(tmp_path)
    put(archive, A, 0)
    archive.flush(WAIT_S)
    archive.bad = errno.ENOSPC
    archive.close()
    again = Archive.reopen(tmp_path)
    assert archive.stats.failed is None and again.first(A) == 0 and same(again, A, 0)
    again.close()


def test_limit_on_file_size(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    archive = Archive(tmp_path)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, hard))
        for index in range(10):
            put(archive, A, index, size=20_000)
        archive.flush(WAIT_S)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert archive.stats.failed == os.strerror(errno.EFBIG) and "make room" in capfd.readouterr().err
    archive.close()
    assert files(tmp_path) == []


def test_full_device(small_device: Path) -> None:
    archive = Archive(small_device / "log", segment_bytes=50_000)
    for index in range(10):
        put(archive, A, index, size=10_000)
    archive.flush(WAIT_S)
    assert archive.stats.failed == os.strerror(errno.ENOSPC)
    archive.restart()  # its own segments filled it, and they are gone
    put(archive, A, 10, size=10_000)
    archive.close()
    assert archive.stats.failed is None and archive.first(A) == 10
    archive.remove()


def test_a_folder_that_cannot_be_written(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    archive = Archive(tmp_path / "log", segment_bytes=300)
    put(archive, A, 0)
    archive.flush(WAIT_S)
    archive.folder.chmod(0o500)
    user = os.geteuid()
    if user == 0:  # whom no mode stops
        os.seteuid(65534)
    try:
        put(archive, A, 1)
        archive.flush(WAIT_S)
    finally:
        os.seteuid(user)
        archive.folder.chmod(0o700)
    assert archive.stats.failed == os.strerror(errno.EACCES)
    assert "no longer logged" in capfd.readouterr().err
    archive.close()


def test_a_folder_that_cannot_be_made(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    archive = Archive(tmp_path / "file" / "log")
    put(archive, A, 0)
    archive.flush(WAIT_S)
    assert archive.stats.failed == os.strerror(errno.ENOTDIR)
    assert capfd.readouterr().err.count("no longer logged") == 1
    (tmp_path / "file").unlink()
    archive.restart()
    put(archive, A, 1)
    archive.flush(WAIT_S)
    assert archive.first(A) == 1 and same(archive, A, 1)
    archive.close()


def test_the_folder_is_removed_while_writing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    archive = Archive(tmp_path / "log")
    put(archive, A, 0)
    archive.flush(WAIT_S)
    shutil.rmtree(tmp_path / "log")
    with pytest.raises(CorruptFile, match="cannot be used"):
        archive.read(A, 0)
    put(archive, A, 1)
    archive.flush(WAIT_S)
    assert archive.stats.failed is not None and "deleted by someone else" in capfd.readouterr().err
    assert archive.first(A) is None
    archive.restart()
    put(archive, A, 2)
    archive.flush(WAIT_S)
    assert archive.first(A) == 2 and same(archive, A, 2)
    archive.close()


def test_an_error_nobody_thought_of_does_not_hang_training(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object) -> bytes:
        raise MemoryError("no memory")

    monkeypatch.setattr(segments, "frame", broken)
    archive = Archive(tmp_path, ring_bytes=1000)
    for index in range(10):
        put(archive, A, index)
    archive.close()
    assert archive.stats.failed == "MemoryError: no memory" and "MemoryError" in capfd.readouterr().err


if __name__ == "__main__":
    writer(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))

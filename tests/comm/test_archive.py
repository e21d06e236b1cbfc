"""The log on disk: what comes back is what was put, bit for bit, or is reported missing. Real files, kills, full disks.

Run as a script, this is the process that gets killed.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch
from archives import WAIT_S, A, B, C, Gated, _place, bits, channels, files, flip, flush, key, put, remove, same

from shared_core.errors import CorruptFile, WaitTimeout
from shared_core.worker.messages import segments
from shared_core.worker.messages.archive import Archive

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
    flush(archive)
    assert archive.stats.bytes_waiting == 0
    check()  # from the file
    archive.close()
    archive = Archive(tmp_path / "log", again=True)  # type: ignore[assignment]
    check()
    archive.close()


def test_files_are_private_and_tensors_are_let_go(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        archive = Archive(tmp_path / "a" / "log")
        tensor = torch.randn(10)
        gone = weakref.ref(tensor)
        archive.put(key(C, 0), [tensor])
        del tensor
        flush(archive)
        archive.put(key(C, 1), [])  # the writer is past the first one when this is written
        flush(archive)
    finally:
        os.umask(old)
    assert gone() is None
    assert archive.folder.stat().st_mode & 0o777 == 0o700
    assert [path.stat().st_mode & 0o777 for path in files(archive.folder)] == [0o600]
    assert archive.stats.bytes_on_disk == sum(path.stat().st_size for path in files(archive.folder))
    remove(archive)
    assert not (tmp_path / "a" / "log").exists()
    archive.put(key(C, 2), [torch.ones(1)])  # nothing happens
    assert archive.first(C) is None


# -- the index -------------------------------------------------------------------------------------


def test_first_indices_and_drops(tmp_path: Path) -> None:
    archive = Archive(tmp_path, segment_bytes=1000)
    assert archive.first(A) is None and archive.indices(A) == [] and channels(archive) == []
    for index in range(20):
        put(archive, A, index, boundary=index // 4)
        put(archive, B, 100 + index, boundary=index // 4)
    flush(archive)
    assert channels(archive) == [A, B]
    assert archive.first(A) == 0 and archive.first(B) == 100 and archive.indices(A) == list(range(20))
    before = len(files(tmp_path))
    assert before >= 5 and archive.stats.records == 40
    archive.drop_before(0)
    flush(archive)
    assert len(files(tmp_path)) == before
    archive.drop_before(3)  # records 0 to 11
    first = archive.first(A)
    assert first is not None and 8 <= first <= 12, "whole segments, and never a record that is still needed"
    flush(archive)
    assert len(files(tmp_path)) < before
    assert archive.stats.bytes_on_disk == sum(path.stat().st_size for path in files(tmp_path))
    with pytest.raises(CorruptFile, match="there is no message 0 of default|0,1,0"):
        archive.read(A, 0)
    put(archive, A, 21, boundary=5)  # 20 is missing
    assert archive.first(A) == 21 and archive.indices(A) == [*range(first, 20), 21]
    assert archive.first(A, before=20) == first and archive.first(A, before=22) == 21
    assert archive.first(A, before=21) is None and archive.first(A, before=30) is None
    flush(archive)
    archive.drop_before(6)  # the open segment too
    assert archive.first(B) is None
    put(archive, A, 22, boundary=6)
    flush(archive)
    assert archive.first(A) == 22 and same(archive, A, 22, boundary=6)
    archive.drop_before(6)
    flush(archive)
    assert archive.first(A) == 22 and len(files(tmp_path)) == 1
    archive.close()
    again = Archive(tmp_path, again=True)
    assert again.indices(A) == [22] and same(again, A, 22, boundary=6)
    again.drop_before(7)
    flush(again)
    assert files(tmp_path) == [] and again.stats.bytes_on_disk == 0
    again.close()


# -- slow disks ------------------------------------------------------------------------------------


def test_back_pressure(tmp_path: Path) -> None:
    archive = Gated(tmp_path, ring_bytes=4000)
    for index in range(3):
        put(archive, A, index, size=250)  # 1 KB and a header each
    assert archive.stats.blocked_times == 0 and archive.stats.bytes_waiting <= 4000
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
    flush(archive)
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
                put(archive, A, index, boundary=index // 8, size=size_of(index))
                if chance.random() < 0.3:
                    flush(archive)
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


@pytest.mark.nightly
def test_kills(tmp_path: Path) -> None:
    rounds, seed = 12, random.randrange(1 << 30)
    print(f"seed {seed}")
    command = [sys.executable, __file__, str(tmp_path), str(rounds), str(seed)]
    lines = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=60).stdout.splitlines()
    assert len(lines) == rounds
    for number, line in enumerate(lines):
        flushed, kept = map(int, line.split())
        archive = Archive(tmp_path / str(number), again=True)
        held = archive.indices(A)
        assert held == list(range(held[0], held[-1] + 1)) and archive.first(A) == held[0], number
        assert held[0] <= kept * 8 and held[-1] >= flushed, (number, held[0], held[-1], line)
        assert all(same(archive, A, i, boundary=i // 8, size=size_of(i)) for i in held) and archive.verify() == []
        put(archive, A, held[-1] + 1, boundary=held[-1])
        flush(archive)
        assert archive.first(A) == held[0]
        archive.close()


def test_closed_segments_are_taken_by_their_index(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    archive = Archive(tmp_path, segment_bytes=2000)
    for index in range(12):
        put(archive, A, index)
    archive.close()
    place = _place(archive, A, 4)
    flip(place.segment.path, place.offset + 150)  # in its contents
    again = Archive(tmp_path, again=True)
    assert again.first(A) == 0, "contents of closed segments are not read"
    with pytest.raises(CorruptFile, match=rf"message 4 of .* in {place.segment.path} at offset {place.offset} cannot"):
        again.read(A, 4)
    assert again.first(A) == 5, "once it is known to be damaged, it does not count"
    put(again, A, 4)
    flush(again)
    assert again.first(A) == 0 and same(again, A, 4)
    again.close()
    again = Archive(tmp_path, again=True)
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
    again = Archive(tmp_path, again=True)
    assert again.first(A) is None and again.indices(A) == list(range(11))
    assert "1 damaged message(s), left out: 11 of default|0,1,0" in capfd.readouterr().err
    again.close()


if __name__ == "__main__":
    writer(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))

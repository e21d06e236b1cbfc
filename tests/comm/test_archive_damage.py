"""The log on disk, damaged or on a disk that fails: every bit of it is noticed, and training continues."""

from __future__ import annotations

import errno
import os
import shutil
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from archives import A, B, C, _place, channels, files, flip, flush, key, put, remove, same

from shared_core.errors import CorruptFile
from shared_core.worker.messages import segments
from shared_core.worker.messages.archive import Archive

TOTAL = {A: range(9), B: range(3, 12), C: range(9)}


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """What a killed process left: closed segments and one that was open."""
    archive = Archive(tmp_path / "live", segment_bytes=1400)
    for step in range(9):
        for channel, indices in TOTAL.items():
            put(archive, channel, indices[step], boundary=step)
    flush(archive)
    shutil.copytree(tmp_path / "live", tmp_path / "killed")
    remove(archive)
    assert len(files(tmp_path / "killed")) >= 4
    return tmp_path / "killed"


def readable(folder: Path) -> set[tuple[str, int]]:
    """The records that can be read, each compared with what was put."""
    archive = Archive(folder, again=True)
    good = set()
    for channel in channels(archive):
        for index in archive.indices(channel):
            try:
                assert same(archive, channel, index, boundary=index - TOTAL[channel][0]), (channel, index)
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


def test_every_bit_of_a_frame_counts(killed: Path) -> None:
    """Magic, lengths and checksums of a record in a segment without an index, and its first bytes."""
    archive = Archive(killed, again=True)
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
    again = Archive(tmp_path / "1", owner="job 1 rank 1", again=True)
    assert again.indices(C) == [1]
    again.close()
    other = Archive(tmp_path / "1", owner="job 2 rank 1", again=True)
    assert channels(other) == []
    other.close()
    assert capfd.readouterr().err.count("or the log of another rank") == 3
    version, segments.FORMAT = segments.FORMAT, 2
    try:
        newer = Archive(tmp_path / "1", owner="job 1 rank 1", again=True)
    finally:
        segments.FORMAT = version
    newer.close()
    assert channels(newer) == [] and "has format 1, this version reads 2" in capfd.readouterr().err


# -- disk errors -----------------------------------------------------------------------------------


class Failing(Archive):
    """An archive whose segments are on a device that fails while ``bad`` is set."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.bad: int | None = None
        super().__init__(folder, **options)

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
    flush(archive)
    archive.bad = number
    put(archive, A, 3)
    flush(archive)
    assert archive.stats.failed == os.strerror(number) and archive.stats.stopped_times == 1
    err = capfd.readouterr().err
    assert err.count("\n") == 1 and err.startswith("[swift] rank 3: messages are no longer logged in ")
    assert os.strerror(number) in err and "all workers start again" in err
    assert ("make room" in err) == (number == errno.ENOSPC)
    gone = torch.randn(4)
    reference = weakref.ref(gone)
    archive.put(key(A, 4), [gone])
    del gone
    assert reference() is None and archive.stats.bytes_waiting == 0
    assert archive.first(A) is None and archive.indices(A) == []
    archive.restart()
    put(archive, A, 5)
    flush(archive)
    assert archive.stats.stopped_times == 2 and capfd.readouterr().err == "", "the user is told once"
    archive.bad = None
    archive.restart()
    put(archive, A, 6)
    put(archive, A, 7)
    flush(archive)
    assert archive.stats.failed is None and archive.first(A) == 6 and same(archive, A, 7)
    archive.close()
    assert len(files(tmp_path)) == 1, "what cannot be replayed does not fill the disk"
    assert archive.stats.bytes_on_disk == files(tmp_path)[0].stat().st_size
    again = Archive(tmp_path, owner="rank 3", again=True)
    assert again.indices(A) == [6, 7] and again.first(A) == 6
    again.close()


def test_the_folder_is_removed_while_writing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    archive = Archive(tmp_path / "log")
    put(archive, A, 0)
    flush(archive)
    shutil.rmtree(tmp_path / "log")
    with pytest.raises(CorruptFile, match="cannot be used"):
        archive.read(A, 0)
    put(archive, A, 1)
    flush(archive)
    assert archive.stats.failed is not None and "deleted by someone else" in capfd.readouterr().err
    assert archive.first(A) is None
    archive.restart()
    put(archive, A, 2)
    flush(archive)
    assert archive.first(A) == 2 and same(archive, A, 2)
    archive.close()

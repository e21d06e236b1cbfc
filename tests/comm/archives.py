"""Logs on disk for tests: what is put, and whether it comes back."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from shared_core.worker.messages import segments
from shared_core.worker.messages.archive import Archive, Key

WAIT_S = 30.0
A, B, C = "default|0,1,0", "default|1,0,0", "default"


def content(channel: str, index: int, size: int = 40) -> list[torch.Tensor]:
    """What record ``index`` of ``channel`` holds."""
    seeded = torch.Generator().manual_seed(1000 * index + len(channel))
    return [torch.randn(size, generator=seeded), torch.tensor(index)]


def key(channel: str, index: int, boundary: int = 0) -> Key:
    return Key(channel, index, boundary, {"version": boundary, "direction": "forward", "source": 0})


def put(archive: Archive, channel: str, index: int, boundary: int = 0, size: int = 40) -> None:
    archive.put(key(channel, index, boundary), content(channel, index, size))


def flush(archive: Archive) -> None:
    """Return when what was put is in the files, and what was dropped is deleted, or when logging has stopped."""

    def over() -> bool:
        return bool(archive.stats.failed) or not (archive.stats.bytes_waiting or archive._index.doomed)

    with archive._changed:
        assert archive._changed.wait_for(over, WAIT_S), "the log was not written"


def remove(archive: Archive) -> None:
    archive.close()
    shutil.rmtree(archive.folder)


def channels(archive: Archive) -> list[str]:
    """Those of which there are records."""
    return [channel for channel in (A, B, C) if archive.indices(channel)]


def bits(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (tensor.dtype, tuple(tensor.shape), bytes(segments.view_bytes(tensor)))


def same(archive: Archive, channel: str, index: int, boundary: int = 0, size: int = 40) -> bool:
    got, tensors = archive.read(channel, index)
    assert got == key(channel, index, boundary)
    return [bits(t) for t in tensors] == [bits(t) for t in content(channel, index, size)]


def _place(archive: Archive, channel: str, index: int) -> segments.SegmentPlace:
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
        super().__init__(folder, **options)

    def _append(self, fd: int, parts: Sequence[bytes | memoryview[Any]]) -> None:
        self.asked.release()
        assert self.permits.acquire(timeout=WAIT_S)
        segments.write_all(fd, parts)

    def open_gate(self) -> None:
        self.permits.release(1000)


def flip(path: Path, at: int, bit: int = 0) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << bit]))

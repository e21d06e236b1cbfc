"""The files that publications lie in: each is whole, or counts as absent.

Those that replace each other stay mapped: to publish is to write to memory. Such a file has the name of its
publication, and its header, which is written last, is zero while there is none. So a writer that dies at any moment
leaves a file that is whole or one that counts as absent, and what was published before it is not touched.
"""

from __future__ import annotations

import mmap
import os
import struct
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TypeVar

import numpy as np

from shared_core.encoding.plain import Piece
from shared_core.errors import CorruptFile
from shared_core.events import console_once
from shared_core.faults import inject
from shared_core.protocol.worker_env import WorkerEnv
from shared_core.resources import FULL, OF_PROCESS, map_room, reason, unwritable, write_all
from shared_core.system.jobdir import DISK, ON_DISK

_HEADER = struct.Struct("<IQI")  # length of what is before the payload, length of that, checksum of all of this
HEADER_BYTES = _HEADER.size
_COUNT = struct.Struct("<I")  # of pieces in the payload; their lengths follow, 8 bytes each, and the head
#: Of pieces from this size on, the checksum is that of sums of blocks of so many 64-bit words.
_LARGE, _WORDS = 1 << 16, 1 << 10
#: Pieces that the system is given in one call.
_AT_ONCE = 64
_LENGTHS = struct.Struct("<IQ")


def packed(head: bytes, payload: Sequence[Piece]) -> list[Piece]:
    """The content of a file, in pieces; the first begins with a header of :data:`HEADER_BYTES`. ``head`` can be read
    without the payload, which is not copied.
    """
    sizes = np.array([len(piece) for piece in payload], np.uint64)
    head = _COUNT.pack(len(payload)) + sizes.tobytes() + head
    return [_HEADER.pack(len(head), int(sizes.sum()), _checksum(head, payload)) + head, *payload]


def _checksum(head: bytes, payload: Sequence[Piece]) -> int:
    """Of a file. The lengths count too: where one piece begins and the other ends is nowhere else."""
    crc = zlib.crc32(head, zlib.crc32(_LENGTHS.pack(len(head), sum(map(len, payload)))))
    for piece in payload:
        crc = _add_large(piece, crc) if len(piece) >= _LARGE else zlib.crc32(piece, crc)
    return crc


def _add_large(piece: Piece, crc: int) -> int:
    """At the speed of memory, ten times that of the CRC: a changed word changes the sum of its block."""
    end = len(piece) // (8 * _WORDS) * 8 * _WORDS
    words = np.frombuffer(piece, np.uint64, count=end // 8)
    sums = words.reshape(-1, _WORDS).sum(axis=1, dtype=np.uint64)
    return zlib.crc32(memoryview(piece)[end:], zlib.crc32(sums.tobytes(), crc))


def write_file(path: Path, data: Sequence[Piece]) -> None:
    """Write under another name, and rename it. Nothing is left of it where that raises OSError."""
    temporary = f"{path}.tmp"
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        _write_all(fd, data)
        os.rename(temporary, path)
    except OSError:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    finally:
        os.close(fd)


def _write_all(fd: int, data: Sequence[Piece]) -> None:
    """In one call of the system where it takes all pieces at once."""
    done = os.writev(fd, data) if len(data) <= _AT_ONCE else 0
    for each in data:
        write_all(fd, memoryview(each)[done:])
        done = max(0, done - len(each))


def append_whole(fd: int, data: bytes) -> None:
    """Append all of ``data`` or, raising OSError, nothing: what follows half a record cannot be read."""
    before = os.fstat(fd).st_size
    try:
        write_all(fd, data)
    except OSError:
        os.ftruncate(fd, before)
        raise


def is_blank(path: Path) -> bool:
    """Whether a file holds no publication, but room for one, or is gone."""
    with suppress(FileNotFoundError), open(path, "rb") as file:
        header = file.read(HEADER_BYTES)
        return len(header) == HEADER_BYTES and not any(header)
    return True


def read_file(path: Path, *, payload: bool = True) -> tuple[bytes, Piece]:
    """Head and payload of what :func:`packed` has made; the payload is a view, empty with ``payload=False``. There may
    be room behind it in the file.

    Raises:
        FileNotFoundError: also where there is only room for a publication.
        CorruptFile: if its checksum does not match.
    """
    data = memoryview(path.read_bytes())
    if len(data) < HEADER_BYTES:
        raise CorruptFile(f"{path} is damaged: it is cut off")
    head_len, payload_len, crc = _HEADER.unpack_from(data)
    if not any(data[:HEADER_BYTES]):
        raise FileNotFoundError(f"{path} holds no publication")
    head = bytes(data[HEADER_BYTES : HEADER_BYTES + head_len])
    body = data[HEADER_BYTES + head_len :][:payload_len]
    at = _COUNT.size + 8 * _COUNT.unpack_from(head)[0] if len(head) >= _COUNT.size else -1
    ends = [0, *accumulate(map(int, np.frombuffer(head[_COUNT.size : at], np.uint64)))] if 0 < at <= len(head) else [-1]
    if not len(body) == payload_len == ends[-1] or _checksum(head, [body[a:b] for a, b in pairwise(ends)]) != crc:
        raise CorruptFile(f"{path} is damaged: its checksum does not match")
    return head[at:], body if payload else b""


_NOTHING = bytes(HEADER_BYTES)
_PAGE = 4096
#: A file is not used for what is this much smaller than it.
_MOST, _SMALL = 4, 1 << 16


@dataclass
class _Slot:
    path: str
    memory: mmap.mmap

    def clear(self) -> None:
        self.memory[:HEADER_BYTES] = _NOTHING

    def fill(self, data: Sequence[Piece]) -> None:
        """Write to a slot that is clear; the header last."""
        memory, first, at = self.memory, data[0], len(data[0])
        memory[HEADER_BYTES:at] = first[HEADER_BYTES:]
        for piece in data[1:]:
            end = at + len(piece)
            memory[at:end] = piece
            at = end
        memory[:HEADER_BYTES] = first[:HEADER_BYTES]


class Slots:
    """The mapped files of one writer, whose names begin with one of ``names``. Not thread-safe."""

    def __init__(self, folder: Path, names: tuple[str, ...]) -> None:
        self._folder, self._names = str(folder), names
        self._used: dict[str, _Slot] = {}
        self._free: list[_Slot] = []
        self._looked = False
        self._others: set[str] = set()

    def write(self, name: str, size: int, data: Sequence[Piece]) -> None:
        """Publish ``data``, which begins with a header and has ``size`` bytes, under a name. Raises OSError if there is
        no room; what had the name before still has it then.
        """
        if not self._looked:
            self._looked = True
            self._look()
        slot, path = self._clear_slot(size), f"{self._folder}/{name}"
        taken = name in self._used or name in self._others  # a replacement publishes the failed worker's again
        _rename(slot, f"{path}.tmp" if taken else path)
        slot.fill(data)
        if taken:
            _rename(slot, path)
            self._others.discard(name)
        if name in self._used:
            self._used[name].memory.close()
        self._used[name] = slot

    def retire(self, name: str) -> bool:
        """End the publication of this name, and use its memory again. False if it was not written here."""
        slot = self._used.pop(name, None)
        if slot is None:
            return False
        slot.clear()
        self._free.append(slot)
        if len(self._free) > max(1, len(self._used)):
            self._drop(self._free.pop(0))
        return True

    def _clear_slot(self, size: int) -> _Slot:
        fitting = [slot for slot in self._free if size <= len(slot.memory) <= _MOST * size + _SMALL]
        if fitting:
            best = min(fitting, key=lambda slot: len(slot.memory))
            self._free.remove(best)
            return best
        path, room = f"{self._folder}/new.tmp", -(-(size + size // 8) // _PAGE) * _PAGE
        try:
            made = _Slot(path, map_room(path, room))
        except OSError:
            with suppress(OSError):
                os.unlink(path)
            raise
        made.clear()  # a failed worker may have died while it wrote there
        return made

    def _drop(self, slot: _Slot) -> None:
        slot.memory.close()
        with suppress(OSError):
            os.unlink(slot.path)

    def _look(self) -> None:
        """Note what a failed worker has left, and remove what is no publication of it."""
        for each in os.scandir(self._folder):
            if not each.name.startswith(self._names):
                continue
            if each.is_file(follow_symlinks=False) and is_blank(Path(each.path)):
                os.unlink(each.path)
            else:
                self._others.add(each.name)


def _rename(slot: _Slot, path: str) -> None:
    os.rename(slot.path, path)
    slot.path = path


T = TypeVar("T")


def overflow(env: WorkerEnv) -> Overflow:
    """For the publisher of a worker: beside the logs on disk, whose folder the agent has made and removes."""
    logs = env.job_dir / DISK
    return Overflow(logs / f"{ON_DISK}{env.rank}" / f"attempt{env.restart}" if logs.is_dir() else None)


class Overflow:
    """The disk behind one rank's publisher. Readers follow the links and need not know. ``folder``: on disk, private to
    the job; made when first needed. None: there is none.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder, self._told = folder, False
        self.used = folder is not None and folder.exists()

    def write(self, path: Path, size: int, write: Callable[[Path], T]) -> T:
        """Have ``write`` make the file ``path``, or, where that does not fit, a file on disk to which ``path`` links.

        Args:
            size: in bytes, about, for the error.
            write: makes a file, and leaves nothing where it raises.

        Raises:
            OutOfResources: it cannot be written at all.
            OSError: this process may do no more.
        """
        try:
            inject.point("publish")
            return write(path)
        except OSError as error:
            return self.elsewhere(path, size, write, error)

    def elsewhere(self, path: Path, size: int, write: Callable[[Path], T], full: OSError) -> T:
        """As :meth:`write`, after the memory has refused the file with the error ``full``."""
        if full.errno in OF_PROCESS:
            raise full
        if full.errno not in FULL or self._folder is None:
            raise unwritable(path, size, full) from full
        there = self._folder / f"{path.name}.{os.urandom(4).hex()}"
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.used = True
            done = write(there)
            link = path.with_name(f"{path.name}.link.tmp")
            link.unlink(missing_ok=True)
            link.symlink_to(os.path.relpath(there, path.parent))
            os.rename(link, path)
        except OSError as error:
            with suppress(OSError):
                there.unlink()
            raise unwritable(path, size, full, f", nor to {there.parent} ({reason(error)})") from error
        if not self._told:
            self._told = True
            disk = there.resolve().parents[1]
            console_once(
                "memory",
                f"memory is full at {path.parent}: what workers publish at each batch goes to {disk} where "
                "it does not fit, which takes longer. For more memory: docker run --shm-size=..., or "
                "mount -o remount,size=... /dev/shm",
            )
        return done

    def remove(self, path: Path) -> None:
        """Remove a file, and what it links to; nothing if it is not there."""
        if self.used:
            with suppress(OSError):  # no link, or not there
                os.unlink(path.parent / os.readlink(path))
        path.unlink(missing_ok=True)

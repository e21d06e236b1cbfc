"""The files that publications lie in: each is whole, or counts as absent."""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np

from shared_core.encoding.plain import Piece
from shared_core.errors import CorruptFile
from shared_core.resources import write_all

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
    """Write what :func:`packed` made under another name, and rename it. Nothing is left of it where that
    raises OSError.
    """
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
    """Append all of ``data``, or nothing: what follows half a record cannot be read. Raises OSError if
    it does not fit.
    """
    before = os.fstat(fd).st_size
    try:
        write_all(fd, data)
    except OSError:
        os.ftruncate(fd, before)
        raise


def write_bare(path: Path, pieces: Sequence[bytes]) -> None:
    """Write a file whole, with nothing added. Nothing is left where that raises OSError."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.write_bytes(b"".join(pieces))
        os.rename(temporary, path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
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

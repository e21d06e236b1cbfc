"""The files that publications lie in: each is whole, or not there."""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from shared_core.encoding.plain import Piece
from shared_core.errors import CorruptFile
from shared_core.worker.mirror import Mirror

_HEADER = struct.Struct("<IQI")  # length of the header, length of the payload, checksum of all of this
#: Pieces that the system is given in one call.
_AT_ONCE = 64
_LENGTHS = struct.Struct("<IQ")


def write_file(
    path: Path,
    head: bytes,
    payload: Sequence[Piece],
    mirror: Mirror | None = None,
    spare: Path | None = None,
    name: str = "",
) -> int:
    """Write a file whole, with a checksum. Returns the size of the payload in bytes.

    Args:
        path: of the file.
        head: read without the payload.
        payload: in pieces.
        mirror: where a copy goes.
        spare: a file that is overwritten and renamed, if it exists: writing to memory that a file already has costs
            less than a third.
        name: what the copy is called; as the file by default.

    Raises:
        OSError: it cannot be written; nothing of it is left.
    """
    temporary = f"{path}.tmp"
    if spare is not None:
        with suppress(FileNotFoundError):
            os.rename(spare, temporary)
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT, 0o600)
    size = sum(map(len, payload))
    crc = zlib.crc32(head, zlib.crc32(_LENGTHS.pack(len(head), size)))
    for piece in payload:
        crc = zlib.crc32(piece, crc)
    data = [_HEADER.pack(len(head), size, crc) + head, *payload]
    try:
        _write_all(fd, data)
        os.ftruncate(fd, sum(map(len, data)))
        os.rename(temporary, path)
    except OSError:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    finally:
        os.close(fd)
    if mirror is not None:
        mirror.write(name or path.name, data)
        mirror.sync()
    return size


def _write_all(fd: int, data: Sequence[Piece]) -> None:
    """Write all pieces, in one call of the system where it takes them at once."""
    done = os.writev(fd, data) if len(data) <= _AT_ONCE else 0
    for each in data:
        left = memoryview(each)[done:]
        done = max(0, done - len(each))
        while left:  # the kernel takes at most 2 GiB at once
            left = left[os.write(fd, left) :]


def append_whole(fd: int, data: bytes) -> None:
    """Append all of ``data``, or nothing: what follows half a record cannot be read.

    Raises:
        OSError: it does not fit.
    """
    before = os.fstat(fd).st_size
    try:
        left = memoryview(data)
        while left:
            left = left[os.write(fd, left) :]
    except OSError:
        os.ftruncate(fd, before)
        raise


def write_bare(path: Path, pieces: Sequence[bytes]) -> None:
    """Write a file whole, with nothing added. Nothing is left where that fails."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.write_bytes(b"".join(pieces))
        os.rename(temporary, path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        raise


def read_file(path: Path, *, payload: bool = True) -> tuple[bytes, Piece]:
    """What :func:`write_file` was given.

    Raises:
        CorruptFile: if its checksum does not match.
    """
    data = memoryview(path.read_bytes())
    if len(data) < _HEADER.size:
        raise CorruptFile(f"{path} is damaged: it is cut off")
    head_len, payload_len, crc = _HEADER.unpack_from(data)
    head = bytes(data[_HEADER.size : _HEADER.size + head_len])
    body = data[_HEADER.size + head_len :]
    # The lengths count too: where one begins and the other ends is nowhere else.
    if len(body) != payload_len or zlib.crc32(body, zlib.crc32(head, zlib.crc32(data[: _LENGTHS.size]))) != crc:
        raise CorruptFile(f"{path} is damaged: its checksum does not match")
    return head, body if payload else b""

"""Files of snapshots from machine to machine, in frames of :mod:`~shared_core.system.wire`."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shared_core.system.wire import Link

#: Kinds of frames: a copy comes, a list of what is there, one file of it; a part of a file.
PUT, LIST, GET, PART = b"P", b"L", b"G", b"D"
#: Head of a file: its bytes; -1 if it is not there.
SIZE = struct.Struct("<q")
_CHUNK, _DIGEST_BYTES = 1 << 20, 32
Key = tuple[int, int]


def send_file(link: Link, path: Path, size: int) -> bytes:
    """Send ``size`` bytes of a file; returns their SHA-256."""
    digest, buffer = hashlib.sha256(), bytearray(_CHUNK)
    with open(path, "rb") as file:
        for length in _chunks(size):
            piece = memoryview(buffer)[:length]
            if file.readinto(piece) != length:
                raise ConnectionError(f"{path.name} has become shorter")
            digest.update(piece)
            link.send(PART, data=[piece])
    return digest.digest()


def receive_bytes(link: Link, size: int) -> bytes:
    """``size`` bytes of a file, compared with the SHA-256 that follows; ConnectionError if they are damaged."""
    data = b"".join(link.data(PART, length) for length in _chunks(size))
    if hashlib.sha256(data).digest() != link.data(PART, _DIGEST_BYTES):
        raise ConnectionError("its checksum is wrong")
    return data


def receive_file(link: Link, path: Path, size: int) -> str:
    """Write ``size`` bytes into a new file and compare the SHA-256 that follows; damaged, ConnectionError."""
    digest = hashlib.sha256()
    with open(path, "xb", buffering=0) as file:
        for length in _chunks(size):
            piece = link.data(PART, length)
            digest.update(piece)
            file.write(piece)
    if link.data(PART, _DIGEST_BYTES) != digest.digest():
        raise ConnectionError(f"{path.name} was damaged on its way")
    return digest.hexdigest()


def _chunks(size: int) -> Iterator[int]:
    while size:
        length = min(size, _CHUNK)
        yield length
        size -= length


def ask(link: Link, kind: bytes, header: Any) -> None:
    link.send(kind, data=[json.dumps(header).encode()])

"""How files of snapshots go from machine to machine, and a worker's view of what the machines' memories hold of
checkpoints. The agents' part is :mod:`~shared_core.launcher.neighbour`.
"""

from __future__ import annotations

import hashlib
import json
import socket
import struct
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared_core.errors import CorruptFile
from shared_core.plain_json import is_count, parse
from shared_core.system.wire import connect, frames, receive, send_frame

#: Kinds of frames: a copy comes, what is there, one file of it.
PUT, LIST, GET = b"P", b"L", b"G"
#: Bytes of a file, before it; -1 if it is not there.
SIZE = struct.Struct("<q")
_CHUNK, _DIGEST_BYTES = 1 << 20, 32
#: Longest wait for another machine's list, in seconds.
_LIST_S = 10.0
#: Machines that are asked at once.
_AT_ONCE = 16

#: Attempt and step of a snapshot.
Key = tuple[int, int]


def send_file(sock: socket.socket, path: Path, size: int) -> bytes:
    """Send ``size`` bytes of a file; gives their SHA-256."""
    digest, buffer = hashlib.sha256(), bytearray(_CHUNK)
    with open(path, "rb", buffering=0) as file:
        while size:
            piece = memoryview(buffer)[: file.readinto(memoryview(buffer)[:size])]
            if not piece:
                raise ConnectionError(f"{path.name} has become shorter")
            digest.update(piece)
            sock.sendall(piece)
            size -= len(piece)
    return digest.digest()


def receive_file(sock: socket.socket, path: Path, size: int) -> str:
    """Write ``size`` bytes and compare the SHA-256 that follows; gives it."""
    digest = hashlib.sha256()
    with open(path, "xb", buffering=0) as file:
        while size:
            piece = receive(sock, min(size, _CHUNK))
            digest.update(piece)
            file.write(piece)
            size -= len(piece)
    if receive(sock, _DIGEST_BYTES) != digest.digest():
        raise ConnectionError(f"{path.name} was damaged on its way")
    return digest.hexdigest()


def ask(sock: socket.socket, kind: bytes, header: Any) -> None:
    """Send a request."""
    send_frame(sock, kind, 0, 0, "", [json.dumps(header).encode()])


@dataclass(frozen=True)
class _Source:
    """One rank's part of a snapshot in some machine's memory."""

    machine: str
    secret: bytes | None
    where: str
    key: Key
    rank: int
    world_size: int
    files: tuple[str, ...]
    meta: Mapping[str, Any]

    def read(self, name: str) -> bytes:
        with connect(self.machine, self.secret) as sock:
            ask(sock, GET, {"where": self.where, "key": self.key, "name": name})
            size = SIZE.unpack(receive(sock, SIZE.size))[0]
            if size < 0:
                raise ConnectionError("it is gone")
            data = receive(sock, size)
            if hashlib.sha256(data).digest() != receive(sock, _DIGEST_BYTES):
                raise ConnectionError("its checksum is wrong")
            return data


def find(
    machines: Iterable[str | None], rank: int, world_size: int, secret: bytes | None = None
) -> list[tuple[int, Mapping[str, Any], Callable[[str], bytes]]]:
    """Snapshots in the memory of any machine that hold a rank's part, oldest first.

    Args:
        machines: to ask; those that do not answer are passed over.
        rank: logical rank.
        world_size: of the job.
        secret: the job's key; None where the user has given none.

    Returns:
        For each its step, its meta, and what reads a file of it from whoever has it, which raises CorruptFile.
    """
    names = [machine for machine in machines if machine is not None]
    if not names:
        return []
    with ThreadPoolExecutor(min(len(names), _AT_ONCE), "swift-near") as pool:
        held = [source for found in pool.map(lambda name: _held_by(name, secret), names) for source in found]
    mine = {
        json.dumps([each.key, each.meta]): each for each in held if (each.rank, each.world_size) == (rank, world_size)
    }
    found = []
    for each in sorted(mine.values(), key=lambda each: each.key):
        sources = [other for other in held if other.key == each.key and other.meta == each.meta]
        found.append((each.key[1], each.meta, _reader(sources)))
    return found


def _held_by(machine: str, secret: bytes | None) -> list[_Source]:
    """All that a machine's memory holds; nothing if it cannot be asked, which takes a few seconds at most."""
    try:
        with connect(machine, secret) as sock:
            sock.settimeout(_LIST_S)
            ask(sock, LIST, {})
            return [_source(machine, secret, one) for one in parse(next(frames(sock))[4])]
    except (OSError, KeyError, TypeError, ValueError):
        return []


def _source(machine: str, secret: bytes | None, one: dict[str, Any]) -> _Source:
    """One entry of a machine's list.

    Raises:
        ValueError, TypeError, KeyError: it is none.
    """
    found = _Source(machine, secret, **(one | {"key": tuple(one["key"])}))
    whole = (*found.key, found.rank, found.world_size)
    if not (len(found.key) == 2 and all(map(is_count, whole)) and isinstance(found.meta, dict)):
        raise ValueError("no snapshot of ours")
    if not isinstance(found.files, list) or not all(isinstance(name, str) for name in found.files):
        raise ValueError("no files of a snapshot")
    return found


def _reader(sources: list[_Source]) -> Callable[[str], bytes]:
    def read(name: str) -> bytes:
        why = "no machine has it"
        for source in sources:
            if name in source.files:
                try:
                    return source.read(name)
                except OSError as error:
                    why = f"{source.machine}: {error}"
        raise CorruptFile(f"{name} cannot be read from any machine's memory ({why})")

    return read

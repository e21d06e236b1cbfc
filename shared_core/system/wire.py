"""Frames between machines: kind, rank, attempt, length of a name, length of the data; then both.

A connection begins with a proof of the job's secret (:mod:`~shared_core.system.secret`). Memory is taken as data
comes, never by what a length says.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Iterator, Sequence

from shared_core.system import secret

#: Longest wait for another machine, in seconds; a loss that is announced ends it before.
WAIT_S = 30.0
CONNECT_S = 3.0
_HEAD = struct.Struct("<cIIHQ")
_LONGEST_NAME = 255
_PIECE = 1 << 20


def place_of(machine: str) -> tuple[str, int]:
    """Where a machine's agent takes copies; it is part of the machine's name, ``HOST:PORT#...``.

    Raises:
        OSError: it is no machine's name.
    """
    host, _, port = machine.partition("#")[0].rpartition(":")
    if not (
        host.isascii() and host.isprintable() and port.isdecimal() and port.isascii() and 0 < int(port[:6]) < 65536
    ):
        raise OSError(f"{machine!r:.80} is no machine's name")
    return host, int(port)


def connect(machine: str, key: bytes | None = None) -> socket.socket:
    """A connection to a machine's agent.

    Args:
        machine: its name.
        key: the job's; None where the user has given no secret.

    Raises:
        OSError: there is none.
    """
    sock = socket.create_connection(place_of(machine), CONNECT_S)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        secret.prove(sock, key)
        sock.settimeout(WAIT_S)
    except BaseException:
        sock.close()
        raise
    return sock


def send_frame(
    sock: socket.socket, kind: bytes, rank: int, attempt: int, name: str = "", data: Sequence[bytes | memoryview] = ()
) -> None:
    """Send one frame."""
    raw = name.encode()
    length = sum(map(len, data))
    head = _HEAD.pack(kind, rank, attempt, len(raw), length) + raw
    if length < 65536:
        sock.sendall(b"".join((head, *data)))
    else:
        for each in (head, *data):  # in pieces: a time-out is for each
            for at in range(0, len(each), _PIECE):
                sock.sendall(memoryview(each)[at : at + _PIECE])


def receive(sock: socket.socket, count: int) -> bytes:
    """Exactly ``count`` bytes.

    Raises:
        OSError: the other side has gone.
    """
    buffer, at = bytearray(min(count, _PIECE)), 0
    while at < count:
        if at == len(buffer):
            buffer.extend(bytes(min(count, 2 * at) - at))
        with memoryview(buffer) as view:
            got = sock.recv_into(view[at:])
        if not got:
            raise ConnectionError("the other side has gone")
        at += got
    return bytes(buffer)


def frames(
    sock: socket.socket, most: Callable[[bytes], int] | None = None, idle: Callable[[bool], None] = lambda _: None
) -> Iterator[tuple[bytes, int, int, str, bytes]]:
    """What comes: kind, rank, attempt, name and data of each frame.

    Args:
        sock: the connection.
        most: gives the longest data of a frame of this kind; None for no limit.
        idle: called with True before a frame is awaited, and with False once it has begun.

    Raises:
        OSError: the other side has gone, or sends what is no frame.
    """
    while True:
        idle(True)
        head = receive(sock, 1)
        idle(False)
        kind, rank, attempt, name_length, length = _HEAD.unpack(head + receive(sock, _HEAD.size - 1))
        if name_length > _LONGEST_NAME or (most is not None and length > most(kind)):
            raise ConnectionError(f"a frame of {length} bytes is too long")
        try:
            name = receive(sock, name_length).decode()
        except UnicodeDecodeError as error:
            raise ConnectionError("the name of a frame is no text") from error
        yield kind, rank, attempt, name, receive(sock, length)

"""Frames between machines: kind, rank, attempt, length of a name, length of the data; then both.

A connection begins with a proof of the job's secret (:mod:`~shared_core.system.secret`), which gives a key for this
connection alone. With it every frame has two MACs (HMAC-SHA256): one of the head, which is checked before a length in
it is believed, and one of all, which is checked before anything of it is used. Both cover who sends and the frame's
number, so a frame that is changed, repeated, left out, moved or sent back is refused. Memory is taken as data comes,
never by what a length says.
"""

from __future__ import annotations

import functools
import hmac
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from types import TracebackType
from typing import NamedTuple

from shared_core.events import console
from shared_core.system import secret

#: Longest wait for another machine, in seconds; a failure that is announced ends it before.
WAIT_S = 30.0
CONNECT_S = 3.0
_HEAD = struct.Struct("<cIIHQ")
_NUMBER = struct.Struct("<Q")
_MAC_BYTES = 32
_LONGEST_NAME = 255
_PIECE = 1 << 20
#: Bytes up to which a frame is sent at once.
_SMALL = 65536


class Altered(ConnectionError):
    """What has come is not what the other side sent next on this connection."""


class Frame(NamedTuple):
    kind: bytes
    rank: int
    attempt: int
    name: str
    data: bytes


def place_of(machine: str) -> tuple[str, int]:
    """Host and port of a machine's agent, from the machine's name, ``HOST:PORT#...``; OSError for other names."""
    host, _, port = machine.partition("#")[0].rpartition(":")
    is_port = port.isascii() and port.isdecimal() and len(port) <= 5 and 0 < int(port) < 65536
    if not (is_port and host.isascii() and host.isprintable()):
        raise OSError(f"{machine!r:.80} is not the name of a machine")
    return host, int(port)


class _Seals:
    """The MACs of the frames that go one way on a connection."""

    def __init__(self, key: bytes, way: bytes) -> None:
        self._key, self._way, self._number = key, way, 0
        self._frame = b""

    def head(self, head: bytes) -> bytes:
        """The MAC of the next frame's head."""
        self._frame = self._way + _NUMBER.pack(self._number) + head
        self._number += 1
        return hmac.digest(self._key, b"head" + self._frame, "sha256")

    def body(self) -> hmac.HMAC:
        """What makes the MAC of all of this frame; it is given the name and the data."""
        return hmac.new(self._key, b"body" + self._frame, "sha256")


class Link:
    """A connection on which both sides have proved that they know the job's secret. One thread may send, one receive.

    Args:
        sock: the connection; it is closed with this object.
        key: of this connection; None where the kernel keeps others out: frames then have no MACs.
        serves: this is the side that was connected to.
    """

    def __init__(self, sock: socket.socket, key: bytes | None, *, serves: bool) -> None:
        self._sock = sock
        ways = (b"s", b"c") if serves else (b"c", b"s")
        self._out, self._in = (_Seals(key, way) if key is not None else None for way in ways)

    def __enter__(self) -> Link:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._sock.close()

    def shutdown(self) -> None:
        """Have whoever waits on this connection, on any thread, return with an error. OSError if it is closed."""
        self._sock.shutdown(socket.SHUT_RDWR)

    def fileno(self) -> int:
        return self._sock.fileno()

    def settimeout(self, seconds: float | None) -> None:
        """Longest wait for the next bytes, in seconds; None waits for ever."""
        self._sock.settimeout(seconds)

    def send(
        self, kind: bytes, rank: int = 0, attempt: int = 0, name: str = "", data: Sequence[bytes | memoryview] = ()
    ) -> None:
        """Send one frame; its data are given in pieces. Raises OSError if the other side has gone."""
        raw = name.encode()
        length = sum(map(len, data))
        head = _HEAD.pack(kind, rank, attempt, len(raw), length)
        sealed = head if self._out is None else head + self._out.head(head)
        mac = self._out.body() if self._out is not None and (raw or length) else None
        if length < _SMALL:
            body = b"".join((raw, *data))
            if mac is not None:
                mac.update(body)
                body += mac.digest()
            self._sock.sendall(sealed + body)
            return
        self._sock.sendall(sealed)
        for each in (raw, *data):
            for at in range(0, len(each), _PIECE):  # in pieces: a time-out is for each
                piece = memoryview(each)[at : at + _PIECE]
                if mac is not None:
                    mac.update(piece)
                self._sock.sendall(piece)
        if mac is not None:
            self._sock.sendall(mac.digest())

    def receive(
        self, most: Callable[[bytes], int] | None = None, idle: Callable[[bool], None] = lambda _: None
    ) -> Frame:
        """The next frame.

        Args:
            most: gives the longest data of a frame of this kind; None for no limit.
            idle: called with True before a frame is awaited, and with False once its head has come.

        Raises:
            Altered: it is not what the other side sent next.
            OSError: the other side has gone, or sends what is no frame.
        """
        idle(True)
        head = self._bytes(_HEAD.size if self._in is None else _HEAD.size + _MAC_BYTES)
        idle(False)
        if self._in is not None:
            head, mac_of_head = head[: _HEAD.size], head[_HEAD.size :]
            self._check(mac_of_head, self._in.head(head))
        kind, rank, attempt, name_length, length = _HEAD.unpack(head)
        if name_length > _LONGEST_NAME or (most is not None and length > most(kind)):
            raise ConnectionError(f"a frame of {length} bytes is too long")
        mac = self._in.body() if self._in is not None and (name_length or length) else None
        raw = self._bytes(name_length, mac) if name_length else b""
        data = self._bytes(length, mac) if length else b""
        if mac is not None:
            self._check(self._bytes(_MAC_BYTES), mac.digest())
        try:
            return Frame(kind, rank, attempt, raw.decode(), data)
        except UnicodeDecodeError as error:
            raise ConnectionError("the name of a frame is not text") from error

    def frames(
        self, most: Callable[[bytes], int] | None = None, idle: Callable[[bool], None] = lambda _: None
    ) -> Iterator[Frame]:
        """All that comes, without end; see :meth:`receive`."""
        while True:
            yield self.receive(most, idle)

    def answer(self) -> bytes:
        """The kind of the next frame, which must have no data; raises as :meth:`receive`."""
        return self.receive(lambda _: 0).kind

    def data(self, kind: bytes, length: int) -> bytes:
        """The data of the next frame; OSError if it is of another kind or length, or as :meth:`receive`."""
        frame = self.receive(lambda _: length)
        if (frame.kind, len(frame.data)) != (kind, length):
            raise ConnectionError("another frame was to come")
        return frame.data

    def _check(self, found: bytes, mac: bytes) -> None:
        if not hmac.compare_digest(found, mac):
            with suppress(OSError):
                if peer := self._sock.getpeername():
                    _tell(str(peer[0]))
            raise Altered("what has come was changed, repeated, left out or moved on its way")

    def _bytes(self, count: int, mac: hmac.HMAC | None = None) -> bytes:
        buffer, at = bytearray(min(count, _PIECE)), 0
        while at < count:
            if at == len(buffer):
                buffer.extend(bytes(min(count, 2 * at) - at))
            with memoryview(buffer) as view:
                got = self._sock.recv_into(view[at:])
                if mac is not None:
                    mac.update(view[at : at + got])
            if not got:
                raise ConnectionError("the other side has gone")
            at += got
        return bytes(buffer)


@functools.cache
def _tell(peer: str) -> None:
    """Once for each address."""
    console(
        f"somebody on the way from {peer} changes what is sent between the machines of this job: the connection is "
        "closed, and nothing of what has come is used (docs/machines.md#security)"
    )


def connect(machine: str, key: bytes) -> Link:
    """A connection to the agent of the machine of this name. ``key`` is the job's. Raises OSError if there is none."""
    sock = socket.create_connection(place_of(machine), CONNECT_S)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link = Link(sock, secret.prove(sock, key), serves=False)
        sock.settimeout(WAIT_S)
    except BaseException:
        sock.close()
        raise
    return link


def accept(sock: socket.socket, key: bytes) -> Link:
    """The other side of :func:`connect`, for ``sock`` from a listener; OSError without a proof of the key."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return Link(sock, secret.ask(sock, key), serves=True)

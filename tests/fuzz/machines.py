"""Connections between machines with the fuzzers on one side."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from unittest.mock import patch

from shared_core.system import secret
from shared_core.system.wire import Link

KEY = b"k" * 32
#: What :meth:`Link.send` takes.
Said = tuple[bytes, int, int, str, Sequence[bytes]]
_MOST = 1 << 16


def frames(says: Sequence[Said], key: bytes | None = None, *, serves: bool = False) -> list[bytes]:
    """The bytes of each frame that one side of a connection sends.

    Args:
        says: what.
        key: of the connection; None for frames without MACs.
        serves: it is the side that was connected to.
    """
    mine, theirs = socket.socketpair()
    with mine, theirs:
        link, found = Link(mine, key, serves=serves), []
        for one in says:
            link.send(*one)
            found.append(theirs.recv(_MOST))
    return found


@contextmanager
def heard(data: bytes) -> Iterator[socket.socket]:
    """A connection whose other side has sent this and no more; it takes what it is told."""
    mine, theirs = socket.socketpair()
    with mine, theirs:
        theirs.sendall(data[:_MOST])
        theirs.shutdown(socket.SHUT_WR)
        yield mine


def answered(data: bytes, serve: Callable[[socket.socket], None]) -> bytes:
    """What ``serve`` says on a connection whose other side has sent this."""
    mine, theirs = socket.socketpair()
    with mine, theirs:
        theirs.sendall(data[:_MOST])
        theirs.shutdown(socket.SHUT_WR)
        serve(mine)
        mine.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: theirs.recv(_MOST), b""))


@contextmanager
def unproved() -> Iterator[None]:
    """Who connects is believed to know the secret, without MACs: any bytes reach what is behind the proof."""
    with patch.object(secret, "ask", lambda sock, key: None), patch.object(secret, "prove", lambda sock, key: None):
        yield


@contextmanager
def machine(reply: Callable[[Link, bytes | None], bytes], key: bytes | None = None) -> Iterator[str]:
    """The name of a machine that proves itself and then answers each connection with ``reply(link, key)``, bytes as
    they are; ``key`` is the connection's, and ``link`` is for reading."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    sock, _ = listener.accept()
                except OSError:  # it is over
                    return
                with suppress(OSError), sock:
                    own = secret.ask(sock, key) if key is not None else None
                    sock.sendall(reply(Link(sock, own, serves=True), own)[:_MOST])
                    sock.shutdown(socket.SHUT_WR)
                    while sock.recv(_MOST):
                        pass

        server = threading.Thread(target=serve, name="fuzz-machine", daemon=True)
        server.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}#x"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            server.join(5.0)


def join(name: str) -> None:
    """Wait for the threads of this name."""
    for thread in threading.enumerate():
        if thread.name == name and thread is not threading.current_thread():
            thread.join(5.0)

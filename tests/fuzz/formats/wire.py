"""Frames between machines: what the agent's server takes, what a worker fetches, and the proof before them."""

from __future__ import annotations

import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from shared_core.launcher.mirror import MirrorServer, fetch
from shared_core.system import secret
from shared_core.system.wire import connect, frames, send_frame

from ..harness import Target, only_errors

_KEY = b"k" * 32
names = st.sampled_from(["top.1", "top.2", "records", "end.0", "order.0123456789ab", ""])
stored = st.lists(st.tuples(st.sampled_from([b"w", b"a", b"r", b"s", b"g"]), names, st.binary(max_size=40)), max_size=5)


def _record(send: Callable[[socket.socket], None]) -> bytes:
    """All that is sent."""
    mine, theirs = socket.socketpair()
    with mine, theirs:
        send(mine)
        mine.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: theirs.recv(1 << 16), b""))


@contextmanager
def _said(data: bytes) -> Iterator[socket.socket]:
    """A connection whose other side has sent this and no more."""
    mine, theirs = socket.socketpair()
    with mine, theirs:
        theirs.sendall(data[: 1 << 16])
        theirs.shutdown(socket.SHUT_WR)
        yield mine


def _published(value: Any, _folder: Path) -> bytes:
    def send(sock: socket.socket) -> None:
        send_frame(sock, b"b", 0, 0)
        for kind, name, data in value:
            send_frame(sock, kind, 0, 0, name, [data])
        send_frame(sock, b"e", 0, 0)
        send_frame(sock, b"s", 0, 0)

    return _record(send)


def _frames(data: bytes, _folder: Path) -> Any:
    found = []
    with _said(data) as sock, suppress(ConnectionError):  # how it always ends
        for frame in frames(sock, lambda kind: 1 << 20):
            found.append(frame)
    return found


def _serve(data: bytes, folder: Path) -> Any:
    """To a server, which closes when it has had enough."""
    shutil.rmtree(folder / "job", ignore_errors=True)
    kept = folder / "job" / "mirror"
    kept.mkdir(parents=True)
    server = MirrorServer(kept)
    try:
        with connect(f"127.0.0.1:{server.port}#x") as sock, suppress(OSError):
            sock.sendall(data[: 1 << 16])
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(1 << 16):
                pass
    finally:
        server.close()
        _join("swift-mirror")
    return sorted(str(path.relative_to(kept)) for path in kept.rglob("*"))


def _within(value: Any, _data: bytes, _corpus: Any) -> str:
    """Nothing lies elsewhere than in a rank's folder."""
    strange = [path for path in value if not path.startswith("rank")]
    return f"files {strange}" if strange else ""


def _join(name: str) -> None:
    for thread in threading.enumerate():
        if thread.name == name and thread is not threading.current_thread():
            thread.join(5.0)


def _given(value: Any, _folder: Path) -> bytes:
    def send(sock: socket.socket) -> None:
        for _, name, data in value:
            send_frame(sock, b"w", 0, 0, name or "top.3", [data])
        send_frame(sock, b"e", 0, 0)

    return _record(send)


def _fetch(data: bytes, folder: Path) -> Any:
    """From a machine that gives this."""
    job = folder / "fetch"
    shutil.rmtree(job, ignore_errors=True)
    job.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            with suppress(OSError):
                sock, _ = listener.accept()
                with sock:
                    secret.ask(sock, None)
                    next(frames(sock))
                    sock.sendall(data[: 1 << 16])
                    sock.shutdown(socket.SHUT_WR)
                    while sock.recv(1 << 12):
                        pass

        server = threading.Thread(target=answer, name="fuzz-answer", daemon=True)
        server.start()
        try:
            fetch([f"127.0.0.1:{listener.getsockname()[1]}#x"], [0], 0, job)
        finally:
            server.join(5.0)
    return sorted(str(path.relative_to(job)) for path in job.rglob("*"))


def _proved(_value: Any, _folder: Path) -> bytes:
    """What a client without the key can know of an answer."""
    return b"n" * 64


def _ask(data: bytes, _folder: Path) -> Any:
    with _said(data) as sock:
        secret.ask(sock, _KEY)
    return "let in"


def _greeting(with_key: bool, _folder: Path) -> bytes:
    return b"swift-1" + (b"s" if with_key else b"o") + b"n" * 32 + (b"m" * 32 if with_key else b"")


def _prove(data: bytes, _folder: Path) -> Any:
    with _said(data) as sock:
        secret.prove(sock, _KEY)
    return "let in"


def _never(_value: Any, _data: bytes, _corpus: Any) -> str:
    return "who does not know the secret was let in"


TARGETS = [
    Target("wire.frames", stored, _published, _frames, only_errors),
    Target("wire.server", stored, _published, _serve, _within),
    Target("wire.fetch", stored, _given, _fetch, _within),
    Target("wire.proof", st.none(), _proved, _ask, _never, count=1, refusable=True),
    Target("wire.proof_of_server", st.booleans(), _greeting, _prove, _never, count=2, refusable=True),
]

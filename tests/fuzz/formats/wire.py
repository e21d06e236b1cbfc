"""Frames between machines: what the agent's server takes, what a worker fetches, and the proof before them.

Without a secret they are given any bytes. With one, what arrives is what was sent before the first change on the way.
"""

from __future__ import annotations

import hashlib
import shutil
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from shared_core.launcher.mirror import MirrorServer, fetch
from shared_core.protocol.mirroring import APPEND, BEGIN, END, GET, REMOVE, SYNC, WRITE
from shared_core.system import secret
from shared_core.system.wire import Frame, Link
from shared_core.worker.state.publications import Mirror

from ..harness import Target, only_errors
from ..machines import KEY, Said, frames, heard, join, machine, unproved

names = st.sampled_from(["boundary.1", "boundary.2", "records", "end.0", "order.0123456789ab", ""])
stored = st.lists(
    st.tuples(st.sampled_from([WRITE, APPEND, REMOVE, SYNC, GET]), names, st.binary(max_size=40)), max_size=5
)


def _says(value: Any) -> list[Said]:
    middle: list[Said] = [(kind, 0, 0, name, [data]) for kind, name, data in value]
    return [(BEGIN, 0, 0, "", []), *middle, (END, 0, 0, "", []), (SYNC, 0, 0, "", [])]


def _published(value: Any, _folder: Path) -> bytes:
    return b"".join(frames(_says(value)))


def _sealed(value: Any, _folder: Path) -> bytes:
    key = hashlib.sha256(repr(value).encode()).digest()  # no two connections have the same
    return key + b"".join(frames(_says(value), key))


def _received(data: bytes, key: bytes | None) -> list[Frame]:
    found = []
    with heard(data) as sock, suppress(ConnectionError):  # how it always ends
        for frame in Link(sock, key, serves=True).frames(lambda kind: 1 << 20):
            found.append(frame)
    return found


def _as_sent(found: list[Frame], key: bytes | None) -> bytes:
    return b"".join(frames([(*frame[:4], [frame.data]) for frame in found], key))


def _begins(value: list[Frame], data: bytes, _corpus: Any) -> str:
    return "" if data.startswith(_as_sent(value, None)) else f"received {value!r:.200}, which was not sent"


def _begins_sealed(value: list[Frame], data: bytes, corpus: Any) -> str:
    """What is received is the beginning of what was sent under this key."""
    again = data[:32] + _as_sent(value, data[:32])
    if not value or (data.startswith(again) and any(one.startswith(again) for one in corpus.encoded)):
        return ""
    return f"received {value!r:.200}, which was not sent"


# -- the agent's server ---------------------------------------------------------------------------


def _server(folder: Path) -> tuple[MirrorServer, Path]:
    shutil.rmtree(folder / "job", ignore_errors=True)
    kept = folder / "job" / "mirror"
    kept.mkdir(parents=True)
    return MirrorServer(kept, key=KEY), kept


def _serve(data: bytes, folder: Path) -> Any:
    server, kept = _server(folder)
    try:
        with unproved():
            with socket.create_connection(("127.0.0.1", server.port), 5.0) as sock, suppress(OSError):
                sock.sendall(data[: 1 << 16])
                sock.shutdown(socket.SHUT_WR)
                while sock.recv(1 << 16):
                    pass
            server.close()
            join("swift-server")
    finally:
        server.close()
    return sorted(str(path.relative_to(kept)) for path in kept.rglob("*"))


def _within(value: Any, _data: bytes, _corpus: Any) -> str:
    """Nothing lies elsewhere than in a rank's folder."""
    strange = [path for path in value if not path.startswith("rank")]
    return f"files {strange}" if strange else ""


# -- a worker -------------------------------------------------------------------------------------


def _given(value: Any, _folder: Path) -> bytes:
    given: list[Said] = [(WRITE, 0, 0, name or "boundary.3", [data]) for _, name, data in value]
    return b"".join(frames([*given, (END, 0, 0, "", [])], serves=True))


def _job(folder: Path) -> Path:
    job = folder / "fetch"
    shutil.rmtree(job, ignore_errors=True)
    job.mkdir()
    secret.leave(job, KEY)
    return job


def _fetch(data: bytes, folder: Path) -> Any:
    """From a machine that gives this."""

    def reply(link: Link, _key: bytes | None) -> bytes:
        link.receive()
        return data

    job = _job(folder)
    with unproved(), machine(reply) as name:
        fetch([name], [0], 0, job)
    (job / secret.FILE).unlink()
    return sorted(str(path.relative_to(job)) for path in job.rglob("*"))


def _answered(_value: Any, _folder: Path) -> bytes:
    return b"".join(frames([(b".", 0, 0, "", [])] * 2, serves=True))


def _copy(data: bytes, folder: Path) -> Any:
    """A worker's copies go to a machine that answers so."""
    own = folder / "own"
    own.mkdir(exist_ok=True)
    (own / "boundary.1").write_bytes(b"boundary")
    mirror = Mirror(0, 0, 0, own, KEY)
    with unproved(), machine(lambda _link, _key: data) as name:
        try:
            mirror.follow(["127.0.0.1:1#own", name])
            mirror.sync()
            mirror.write("boundary.2", [b"two"])
            mirror.sync()
        finally:
            mirror.follow(["127.0.0.1:1#own"])
            join("swift-mirror")
    return None


# -- the proof ------------------------------------------------------------------------------------


def _proved(_value: Any, _folder: Path) -> bytes:
    """What a client without the key can know of an answer."""
    return b"n" * 64


def _ask(data: bytes, _folder: Path) -> Any:
    with heard(data) as sock:
        secret.ask(sock, KEY)
    return "admitted"


def _greeting(_value: Any, _folder: Path) -> bytes:
    return b"swift-3" + b"n" * 32 + b"m" * 32


def _prove(data: bytes, _folder: Path) -> Any:
    with heard(data) as sock:
        secret.prove(sock, KEY)
    return "admitted"


def _never(_value: Any, _data: bytes, _corpus: Any) -> str:
    return "who does not know the secret was admitted"


TARGETS = [
    Target("wire.frames", stored, _published, lambda data, _: _received(data, None), _begins),
    Target(
        "wire.frames_with_key",
        stored,
        _sealed,
        lambda data, _: _received(data[32:], data[:32]),
        _begins_sealed,
    ),
    Target("wire.server", stored, _published, _serve, _within),
    Target("wire.fetch", stored, _given, _fetch, _within),
    Target("wire.answers", st.none(), _answered, _copy, only_errors, count=1),
    Target("wire.proof", st.none(), _proved, _ask, _never, count=1, refusable=True),
    Target("wire.proof_of_server", st.none(), _greeting, _prove, _never, count=1, refusable=True),
]

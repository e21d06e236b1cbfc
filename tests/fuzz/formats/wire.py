"""Frames between machines: what the agent's server takes, what a worker fetches, and the proof before them.

Without a secret they are given any bytes. With one, somebody on the way changes what is sent: what arrived as it was
sent before the first change has its effect, and nothing else.
"""

from __future__ import annotations

import hashlib
import shutil
import socket
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from shared_core.launcher.mirror import MirrorServer, fetch
from shared_core.protocol.mirroring import APPEND, BEGIN, END, GET, REMOVE, SYNC, WRITE
from shared_core.system import secret
from shared_core.system.wire import Frame, Link
from shared_core.worker.state.publications import Mirror

from ..harness import Target, only_errors
from ..machines import KEY, Said, changed, changes, frames, heard, join, machine, packed, unproved, whole

names = st.sampled_from(["boundary.1", "boundary.2", "records", "end.0", "order.0123456789ab", ""])
stored = st.lists(
    st.tuples(st.sampled_from([WRITE, APPEND, REMOVE, SYNC, GET]), names, st.binary(max_size=40)), max_size=5
)
#: A machine that has copies already, and what another one sends it then.
_BEFORE: list[Said] = [(BEGIN, 0, 1, "", []), (WRITE, 0, 1, "boundary.4", [b"4"]), (END, 0, 1, "", [])]
_SESSION: list[Said] = [
    (BEGIN, 0, 1, "", []),
    (WRITE, 0, 1, "boundary.5", [b"five"]),
    (WRITE, 0, 1, "records", [b"r"]),
    (END, 0, 1, "", []),
    (WRITE, 0, 1, "boundary.6", [b"s", b"ix"]),
    (APPEND, 0, 1, "records", [b"s"]),
    (REMOVE, 0, 1, "boundary.5", []),
    (SYNC, 0, 1, "", []),
]
_GIVEN: list[Said] = [(WRITE, 0, 0, "boundary.3", [b"three"]), (WRITE, 0, 0, "records", [b"r"]), (END, 0, 0, "", [])]


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


def _tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _server(folder: Path) -> tuple[MirrorServer, Path]:
    shutil.rmtree(folder / "job", ignore_errors=True)
    kept = folder / "job" / "mirror"
    kept.mkdir(parents=True)
    return MirrorServer(kept, key=KEY), kept


def _tell(server: MirrorServer, data: bytes, how: bytes | None = None) -> int:
    """Send bytes to a server until it has had enough; with ``how``, the session with these changes.

    Returns:
        How many frames of the session arrive as they were sent.
    """
    count = 0
    with socket.create_connection(("127.0.0.1", server.port), 5.0) as sock, suppress(OSError):
        own = secret.prove(sock, KEY)
        if how is not None:
            pieces = frames(_SESSION, own)
            data = changed(b"".join(pieces), how)
            count = whole(pieces, data)
        sock.sendall(data[: 1 << 16])
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(1 << 16):
            pass
    return count


def _serve(data: bytes, folder: Path) -> Any:
    server, kept = _server(folder)
    try:
        with unproved():
            _tell(server, data)
            server.close()
            join("swift-server")
    finally:
        server.close()
    return sorted(str(path.relative_to(kept)) for path in kept.rglob("*"))


@lru_cache
def _after(count: int, folder: Path) -> dict[str, bytes]:
    """What a server has when so many frames of the session have come."""
    _serve(b"".join((*frames(_BEFORE), *frames(_SESSION[:count]))), folder)
    return _tree(folder / "job")


def _serve_changed(data: bytes, folder: Path) -> Any:
    server, _ = _server(folder)
    try:
        with socket.create_connection(("127.0.0.1", server.port), 5.0) as sock:
            own = secret.prove(sock, KEY)
            sock.sendall(b"".join(frames([*_BEFORE, (SYNC, 0, 1, "", [])], own)))
            Link(sock, own, serves=False).answer()
        count = _tell(server, b"", data)
    finally:
        server.close()
        join("swift-server")
    return _tree(folder / "job"), _after(count, folder)


def _as_expected(value: Any, _data: bytes, _corpus: Any) -> str:
    found, expected = value
    return "" if found == expected else f"{found!r:.300} instead of {expected!r:.300}"


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


def _fetch_changed(data: bytes, folder: Path) -> Any:
    """All that the machine has, or nothing."""
    came = []

    def reply(link: Link, key: bytes | None) -> bytes:
        link.receive()
        pieces = frames(_GIVEN, key, serves=True)
        stream = changed(b"".join(pieces), data)
        came.append(whole(pieces, stream) == len(pieces))
        return stream

    job = _job(folder)
    with machine(reply, KEY) as name:
        fetch([name], [0], 0, job)
    (job / secret.FILE).unlink()
    expected = {f"rank0/attempt0/{name}": b"".join(data) for kind, _, _, name, data in _GIVEN if kind == WRITE}
    return _tree(job), expected if came == [True] else {}


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


def _packed(value: Any, _folder: Path) -> bytes:
    return packed(value)


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
    Target("wire.server_with_key", changes, _packed, _serve_changed, _as_expected),
    Target("wire.fetch", stored, _given, _fetch, _within),
    Target("wire.fetch_with_key", changes, _packed, _fetch_changed, _as_expected),
    Target("wire.answers", st.none(), _answered, _copy, only_errors, count=1),
    Target("wire.proof", st.none(), _proved, _ask, _never, count=1, refusable=True),
    Target("wire.proof_of_server", st.none(), _greeting, _prove, _never, count=1, refusable=True),
]

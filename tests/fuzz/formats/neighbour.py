"""Copies of snapshots in another machine's memory: requests for them, and the lists and files that come back."""

from __future__ import annotations

import hashlib
import json
import shutil
import socket
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from shared_core.worker.near import GET, LIST, PUT, SIZE, find

from shared_core.checkpoint.spool import SEALED, Sealed
from shared_core.launcher.mirror import MirrorServer
from shared_core.launcher.neighbour import Copies
from shared_core.system.wire import send_frame

from ..harness import Target, only_errors
from .wire import _join

_STEP = 40
contents = st.dictionaries(st.sampled_from(["rank0", "replicated0.safetensors"]), st.binary(max_size=30), max_size=2)
#: Between a request's header and what follows it.
_BREAK = b"\0BREAK\0"


def _note(files: dict[str, bytes]) -> str:
    return json.dumps(asdict(Sealed(_STEP, 0, 1, (0,), tuple(files), {"attempt": 0})))


def _put(files: dict[str, bytes], _folder: Path) -> bytes:
    header = {
        "attempt": 0,
        "step": _STEP,
        "files": {name: len(data) for name, data in files.items()},
        "notes": {f"rank0{SEALED}": _note(files)},
    }
    rest = b"".join(data + hashlib.sha256(data).digest() for data in files.values()) + b"."
    return json.dumps(header).encode() + _BREAK + rest


def _serve(kind: bytes, data: bytes, copies: Copies) -> bytes:
    header, _, rest = data.partition(_BREAK)
    mine, theirs = socket.socketpair()
    with mine, theirs:
        theirs.sendall(rest[: 1 << 16])
        theirs.shutdown(socket.SHUT_WR)
        copies.serve(mine, kind, header)
        mine.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: theirs.recv(1 << 16), b""))


def _fresh(folder: Path) -> Copies:
    shutil.rmtree(folder / "copies", ignore_errors=True)
    return Copies(folder / "copies")


def _take(data: bytes, folder: Path) -> Any:
    """And then say what is there, as to another machine, and give each file."""
    copies = _fresh(folder)
    _serve(PUT, data, copies)
    _serve(LIST, b"{}", copies)
    if copies.kept is None:
        return None
    header = data.partition(_BREAK)[0]
    return {
        name: _serve(GET, json.dumps({"where": "kept", "key": copies.kept, "name": name}).encode(), copies)
        for name in json.loads(header)["files"]
    }


def _whole(value: Any, _data: bytes, _corpus: Any) -> str:
    """A file comes with its length and checksum, or is said not to be there."""
    for name, answer in (value or {}).items():
        (size,) = SIZE.unpack(answer[: SIZE.size])
        body, digest = answer[SIZE.size : -32], answer[-32:]
        if size >= 0 and (len(body) != size or hashlib.sha256(body).digest() != digest):
            return f"{name} is given as {answer!r:.200}"
    return ""


def _get(name: str, _folder: Path) -> bytes:
    return json.dumps({"where": "kept", "key": [0, _STEP], "name": name}).encode()


def _give(data: bytes, folder: Path) -> bytes:
    copies = _fresh(folder)
    files = {"rank0": b"part"}
    _serve(PUT, _put(files, folder), copies)
    return _serve(GET, data, copies)


def _list(files: dict[str, bytes], _folder: Path) -> bytes:
    one = {"where": "own", "key": [0, _STEP], "rank": 0, "files": list(files), "meta": {"x": 1}, "world_size": 1}
    return json.dumps([one, one | {"where": "kept", "key": [0, 41]}]).encode()


def _find(data: bytes, folder: Path) -> Any:
    """Ask a machine that answers so, and read each file that it names."""

    def answer(sock: socket.socket, kind: bytes, _data: bytes) -> None:
        if kind == LIST:
            send_frame(sock, LIST, 0, 0, "", [data[: 1 << 16]])
        elif kind == GET:
            sock.sendall(SIZE.pack(4) + b"part" + hashlib.sha256(b"part").digest())

    server = MirrorServer(folder / "mirror", answer)
    try:
        found = find([f"127.0.0.1:{server.port}#x", None], 0, 1)
        for _, _, read in found:
            read("rank0")
        return [(step, meta) for step, meta, _ in found]
    finally:
        server.close()
        _join("swift-mirror")


TARGETS = [
    Target("neighbour.put", contents, _put, _take, _whole),
    Target("neighbour.get", st.sampled_from(["rank0", "other"]), _get, _give, only_errors, count=2),
    Target("neighbour.list", contents, _list, _find, only_errors, count=5),
]

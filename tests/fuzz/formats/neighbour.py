"""Copies of snapshots in another machine's memory: requests for them, and the lists and files that come back."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from shared_core.checkpoint.spool import SEALED, Sealed
from shared_core.launcher.neighbour import NeighbourCopies
from shared_core.system.snapshot_wire import GET, LIST, PART, PUT, SIZE, receive_bytes
from shared_core.system.wire import Link
from shared_core.worker.checkpoints.in_memory import find_in_memory

from ..harness import Target, only_errors
from ..machines import KEY, Said, answered, frames, heard, machine, unproved

_STEP = 40
contents = st.dictionaries(st.sampled_from(["rank0", "replicated0.safetensors"]), st.binary(max_size=30), max_size=2)
#: Between a request's header and what follows it.
_BREAK = b"\0BREAK\0"
_FILES = {"rank0": b"part", "replicated0.safetensors": b"replicated"}


def _said(*parts: bytes) -> list[Said]:
    return [(PART, 0, 0, "", [part]) for part in parts]


def _file(data: bytes) -> list[Said]:
    return _said(*filter(None, [data]), hashlib.sha256(data).digest())


def _header(files: Mapping[str, bytes], step: int) -> bytes:
    note = json.dumps(asdict(Sealed(step, 0, 1, (0,), tuple(files), {"attempt": 0})))
    sizes = {name: len(data) for name, data in files.items()}
    return json.dumps({"attempt": 0, "step": step, "files": sizes, "notes": {f"rank0{SEALED}": note}}).encode()


def _rest(files: Mapping[str, bytes]) -> list[Said]:
    return [*(one for data in files.values() for one in _file(data)), (b".", 0, 0, "", [])]


def _put(files: Mapping[str, bytes], _folder: Path) -> bytes:
    return _header(files, _STEP) + _BREAK + b"".join(frames(_rest(files)))


def _apart(call: Callable[[], None]) -> None:
    """Run this on another thread: serving lowers the priority of the thread that does it."""
    with ThreadPoolExecutor(1) as own:
        own.submit(call).result()


def _serve(kind: bytes, data: bytes, copies: NeighbourCopies) -> bytes:
    header, _, rest = data.partition(_BREAK)
    return answered(rest, lambda sock: _apart(lambda: copies.serve(Link(sock, None, serves=True), kind, header)))


def _given(answer: bytes) -> bytes | None:
    """The file in an answer, as a worker takes it; None if it is not there."""
    with heard(answer) as sock:
        link = Link(sock, None, serves=False)
        size = SIZE.unpack(link.data(PART, SIZE.size))[0]
        return receive_bytes(link, size) if size >= 0 else None


def _fresh(folder: Path) -> NeighbourCopies:
    shutil.rmtree(folder / "copies", ignore_errors=True)
    return NeighbourCopies(folder / "copies")


def _ask(copies: NeighbourCopies, name: str) -> bytes:
    return _serve(GET, json.dumps({"where": "kept", "key": copies.kept, "name": name}).encode(), copies)


def _take(data: bytes, folder: Path) -> Any:
    """And then say what is there, as to another machine, and give each file."""
    copies = _fresh(folder)
    _serve(PUT, data, copies)
    _serve(LIST, b"{}", copies)
    if copies.kept is None:
        return None
    header = data.partition(_BREAK)[0]
    return {name: _ask(copies, name) for name in json.loads(header)["files"]}


def _whole(value: Any, _data: bytes, _corpus: Any) -> str:
    """A file comes with its length and checksum, or is said not to be there."""
    for answer in (value or {}).values():
        _given(answer)
    return ""


def _get(name: str, _folder: Path) -> bytes:
    return json.dumps({"where": "kept", "key": [0, _STEP], "name": name}).encode()


def _give(data: bytes, folder: Path) -> bytes:
    copies = _fresh(folder)
    _serve(PUT, _put({"rank0": b"part"}, folder), copies)
    return _serve(GET, data, copies)


# -- a worker -------------------------------------------------------------------------------------


def _list(files: Mapping[str, bytes], _folder: Path) -> bytes:
    one = {"where": "own", "key": [0, _STEP], "rank": 0, "files": list(files), "meta": {"x": 1}, "world_size": 1}
    return json.dumps([one, one | {"where": "kept", "key": [0, 41]}]).encode()


def _find(data: bytes, _folder: Path) -> Any:
    """Ask a machine that answers so, and read each file that it names."""

    def reply(link: Link, _key: bytes | None) -> bytes:
        if link.receive().kind == LIST:
            return b"".join(frames([(LIST, 0, 0, "", [data[: 1 << 15]])], serves=True))
        return b"".join(frames([*_said(SIZE.pack(4)), *_file(b"part")], serves=True))

    with unproved(), machine(reply) as name:
        found = find_in_memory([name, None], 0, 1, KEY)
        for _, _, read in found:
            read("rank0")
    return [(step, meta) for step, meta, _ in found]


TARGETS = [
    Target("neighbour.put", contents, _put, _take, _whole),
    Target("neighbour.get", st.sampled_from(["rank0", "other"]), _get, _give, only_errors, count=2),
    Target("neighbour.list", contents, _list, _find, only_errors, count=5),
]

"""Notes in the folder in memory where snapshots wait for the writer."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from shared_core.checkpoint.spool import SEALED, Sealed, Spool, Status
from shared_core.checkpoint.spool import Target as Where
from shared_core.checkpoint.writer import CheckpointWriter
from shared_core.errors import CorruptFile
from shared_core.events import EventLog
from shared_core.plain_json import parse

from ..harness import Target, only_errors, stable
from ..json_values import plain_json, text_keys

_STEP = 40
sealed = st.builds(
    lambda meta, files, where: Sealed(_STEP, 0, 1, (0,), tuple(files), meta, where),
    st.dictionaries(text_keys, plain_json, max_size=3),
    st.lists(st.sampled_from(["rank0", "replicated0.safetensors"]), unique=True, max_size=2),
    st.none() | st.builds(lambda keep, quota: Where("/nowhere", keep, quota), st.integers(2, 4), st.integers(0, 9)),
)
statuses = st.builds(
    Status,
    pid=st.integers(0, 9),
    committed=st.fixed_dictionaries({"attempt": st.integers(0, 3), "step": st.integers(0, 99)}) | st.just({}),
    writing=st.integers(-1, 99),
    failed=st.integers(-1, 99),
    cause=st.sampled_from(["", "full", "quota"]),
    message=st.text(max_size=9),
    seconds=st.floats(0, 99),
)
held = st.sets(st.tuples(st.integers(0, 3), st.integers(0, 99)), max_size=4)


def _spool(folder: Path) -> Spool:
    return Spool(folder / "spool", 0)


def _write_sealed(part: Sealed, folder: Path) -> bytes:
    spool = _spool(folder)
    spool.folder_of(part.step)
    spool.seal(part)
    return (spool.folder_of(part.step) / f"rank{part.rank}{SEALED}").read_bytes()


def _read_sealed(data: bytes, folder: Path) -> Any:
    spool = _spool(folder)
    (spool.folder_of(_STEP) / f"rank0{SEALED}").write_bytes(data)
    parts = spool.parts(_STEP)
    if not parts:
        raise CorruptFile("not sealed")
    if spool.complete(_STEP):
        spool.newest_complete()
    for part in parts.values():
        for name in part.files:
            spool.path_of(part, name)
    return parts


def _sealed_again(parts: Mapping[int, Sealed]) -> bytes:
    """What is read has no rank but 0, and no step but that of its folder."""
    (part,) = parts.values()
    return json.dumps(asdict(part)).encode()


def _sealed_decoded(data: bytes) -> Any:
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        return _read_sealed(data, Path(folder))


def _write_status(status: Status, folder: Path) -> bytes:
    spool = _spool(folder)
    spool.folder_of(_STEP)
    spool.set_status(status)
    return (spool.folder / "status.json").read_bytes()


def _read_status(data: bytes, folder: Path) -> Status:
    (_spool(folder).folder / "status.json").write_bytes(data)
    spool = _spool(folder)
    spool.news()
    spool.wait_committed(3, 0.0)
    return spool.status()


def _write_held(keys: Any, folder: Path) -> bytes:
    spool = _spool(folder)
    spool.folder_of(_STEP)
    spool.hold(keys)
    return (spool.folder / "held.json").read_bytes()


def _read_held(data: bytes, folder: Path) -> Any:
    (_spool(folder).folder / "held.json").write_bytes(data)
    return _spool(folder).held()


def _inside(data: bytes, folder: Path) -> bytes:
    """The same note; its checkpoints go into the folder, wherever else they were to go."""
    try:
        note = parse(data)
        where = note["target"]["where"]
    except (ValueError, TypeError, LookupError):
        return data
    if not isinstance(where, str):
        return data
    note["target"]["where"] = f"{folder}{os.path.normpath('/' + where)}"
    try:
        return json.dumps(note).encode()
    except RecursionError as error:
        raise CorruptFile("too deep") from error


def _work(data: bytes, folder: Path) -> None:
    """The writer finds such a note when it starts, and takes it for what is to be written."""
    data = _inside(data, folder / "written")
    where = folder / "writing"
    spool = Spool(where, 0)
    (spool.folder_of(_STEP) / f"rank0{SEALED}").write_bytes(data)
    (spool.folder_of(_STEP) / "rank0").write_bytes(b"part")
    CheckpointWriter(Spool(where), EventLog(None)).work(hurry=True)


TARGETS = [
    Target("spool.sealed", sealed, _write_sealed, _read_sealed, stable(_sealed_again, _sealed_decoded)),
    Target(
        "spool.status",
        statuses,
        _write_status,
        _read_status,
        stable(lambda status: json.dumps(asdict(status)).encode(), lambda data: Status(**json.loads(data))),
    ),
    Target(
        "spool.held",
        held,
        _write_held,
        _read_held,
        stable(lambda keys: json.dumps(sorted(keys)).encode(), lambda data: {(a, b) for a, b in json.loads(data)}),
    ),
    Target("spool.writer", sealed, _write_sealed, _work, only_errors, count=10),
]

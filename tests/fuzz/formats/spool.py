"""Notes in the folder in memory where snapshots wait for the writer."""

from __future__ import annotations

import json
import os
from pathlib import Path

from hypothesis import strategies as st

from shared_core.checkpoint.spool import SEALED, Sealed, Spool
from shared_core.checkpoint.spool import Target as Where
from shared_core.checkpoint.writer import CheckpointWriter
from shared_core.errors import CorruptFile
from shared_core.events import EventLog
from shared_core.plain_json import parse

from ..harness import Target, only_errors
from ..json_values import plain_json, text_keys

_STEP = 40
sealed = st.builds(
    lambda meta, files, where: Sealed(_STEP, 0, 1, (0,), tuple(files), meta, where),
    st.dictionaries(text_keys, plain_json, max_size=3),
    st.lists(st.sampled_from(["rank0", "replicated0.safetensors"]), unique=True, max_size=2),
    st.none() | st.builds(lambda keep, quota: Where("/nowhere", keep, quota), st.integers(2, 4), st.integers(0, 9)),
)


def _spool(folder: Path) -> Spool:
    return Spool(folder / "spool", 0)


def _write_sealed(part: Sealed, folder: Path) -> bytes:
    spool = _spool(folder)
    spool.folder_of(part.step)
    spool.seal(part)
    return (spool.folder_of(part.step) / f"rank{part.rank}{SEALED}").read_bytes()


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


TARGETS = [Target("spool.writer", sealed, _write_sealed, _work, only_errors, count=10)]

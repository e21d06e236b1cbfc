"""What a folder of checkpoints holds: manifests, marks, parts; and who reads what they say."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from shared_core.checkpoint import history, lineage, store
from shared_core.checkpoint.command import Command
from shared_core.errors import CorruptFile

from ..harness import Target, exact, only_errors, stable
from ..json_values import plain_json, text_keys

_STEP = 40
_COMMAND = Command.of("train.py", ["--lr", "0.1"])
metas = st.builds(
    lambda size, run, more: (
        lineage.meta_of(_STEP, 39, session="s", run=run, command=_COMMAND, world_size=size, continues=True, adopted="")
        | more
    ),
    st.integers(1, 4),
    st.sampled_from(["20261122T083801-9c01d2", "0123456789ab", ""]),
    st.dictionaries(text_keys, plain_json, max_size=3),
)


def _folder_of(folder: Path) -> Path:
    made = folder / "checkpoints" / f"train-{_COMMAND.key[:8]}-20261122T083801-9c01d2"
    made.mkdir(parents=True, exist_ok=True)
    return made


def _commit(meta: Any, folder: Path) -> bytes:
    where = _folder_of(folder)
    digests = {f"rank{rank}": store.copy_part(where, _STEP, f"rank{rank}", [b"part"], 4) for rank in range(2)}
    store.commit(where, _STEP, digests, meta, {"rank0": 4, "rank1": 4})
    return (where / store.folder_name(_STEP) / store.MANIFEST).read_bytes()


def _load(data: bytes, folder: Path) -> Any:
    where = _folder_of(folder)
    (where / store.folder_name(_STEP) / store.MANIFEST).write_bytes(data)
    found = store.load_manifest(where, _STEP)
    return found.parts, found.meta, found.sizes, found.time


def _use(data: bytes, folder: Path) -> Any:
    """As ``swiftctl checkpoints`` and the next start of the command do."""
    where = _folder_of(folder)
    _load(data, folder)
    store.survey(where)
    store.committed(where)
    contents = lineage.contents(folder / "checkpoints")
    for command in (*contents.commands(), _COMMAND):
        str(lineage.next_start(contents, command))
    lineage.left_behind(str(folder / "checkpoints"), _COMMAND.key, "--adopt", continues=True, again="--resume")
    lineage.to_adopt(str(where))
    store.prune(where, 2, lambda found: found.run == "x")
    return lineage.first_whole(contents.saved)


def _sealed(text: bytes) -> bytes:
    """As :mod:`shared_core.checkpoint.store` writes JSON."""
    import hashlib

    said = text.decode(errors="replace")
    return json.dumps({"sha256": hashlib.sha256(said.encode()).hexdigest(), "manifest": said}).encode()


def _inner(meta: Any, folder: Path) -> bytes:
    return str(json.loads(_commit(meta, folder))["manifest"]).encode()


def _mark(meta: Any, folder: Path) -> bytes:
    where = _folder_of(folder)
    store.write_mark(where, _STEP, 0, store.StoreMark({"rank0": ("a" * 64, 12)}, meta))
    return (where / store.folder_name(_STEP) / f"rank0{store.DONE}").read_bytes()


def _read_mark(data: bytes, folder: Path) -> Any:
    where = _folder_of(folder)
    (where / store.folder_name(_STEP)).mkdir(exist_ok=True)
    (where / store.folder_name(_STEP) / f"rank0{store.DONE}").write_bytes(data)
    found = store.read_mark(where, _STEP, 0)
    if found is None:
        raise CorruptFile("no mark")
    return found


def _commit_marked(data: bytes, folder: Path) -> Any:
    mark = _read_mark(data, folder)
    (_folder_of(folder) / store.folder_name(_STEP) / "rank0").write_bytes(b"")
    return store.commit_marked(_folder_of(folder), _STEP, 1, mark.meta)


def _inner_mark(meta: Any, folder: Path) -> bytes:
    return str(json.loads(_mark(meta, folder))["manifest"]).encode()


def _part(payload: bytes, folder: Path) -> bytes:
    where = folder / "parts"
    shutil.rmtree(where, ignore_errors=True)
    store.commit(where, _STEP, {"rank0": store.copy_part(where, _STEP, "rank0", [payload], len(payload))}, {})
    return payload


def _read_part(data: bytes, folder: Path) -> bytes:
    where = folder / "parts"
    (where / store.folder_name(_STEP) / "rank0").write_bytes(data)
    return store.read_part(store.load_manifest(where, _STEP), "rank0")


# -- the job history ------------------------------------------------------------------------------

runs = st.lists(
    st.builds(
        history.Run,
        st.text(max_size=6),
        st.sampled_from(history.ENDS),
        st.floats(0, 1e9),
        st.floats(0, 1e9),
        st.dictionaries(st.text(max_size=4), st.integers(0, 9), max_size=2),
        st.text(max_size=4),
        st.floats(1, 1e9),
    ),
    max_size=4,
)


def _write_history(value: Any, folder: Path) -> bytes:
    path = folder / "history"
    path.write_bytes(b"")
    for run in value:
        history.append(path, run)
    return path.read_bytes()


def _read_history(data: bytes, folder: Path) -> Any:
    path = folder / "history"
    path.write_bytes(data)
    found = history.read(path, now=2e9)
    from shared_core.checkpoint.history import from_history

    from_history(found)
    return tuple(replace(run, time=max(run.time, 1.0)) for run in found)  # 0 is written as now


def _history_again(value: Any) -> bytes:
    import tempfile

    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        return _write_history(value, Path(folder))


def _history_decoded(data: bytes) -> Any:
    import tempfile

    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        return _read_history(data, Path(folder))


TARGETS = [
    Target("checkpoints.manifest", metas, _commit, _load, exact),
    Target("checkpoints.manifest_sealed", metas, _inner, _use, only_errors, seal=_sealed),
    Target("checkpoints.mark", metas, _mark, _read_mark, exact),
    Target("checkpoints.mark_sealed", metas, _inner_mark, _commit_marked, only_errors, seal=_sealed),
    Target("checkpoints.part", st.binary(max_size=200), _part, _read_part, exact, count=1),
    Target("checkpoints.history", runs, _write_history, _read_history, stable(_history_again, _history_decoded)),
]

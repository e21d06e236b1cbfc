"""The log on disk: files of framed records, as a worker's replacement opens them."""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st

from shared_core.errors import CorruptFile
from shared_core.worker.messages import segments
from shared_core.worker.messages.archive import Archive, Key

from ..harness import Target, exact_parts, only_errors
from ..json_values import plain_json, text_keys

_OWNER = "job rank 0 attempt 0"
_NAME = f"{0:08d}{segments.SUFFIX}"
_PAYLOAD = bytes(range(64))

records = st.lists(
    st.tuples(
        st.sampled_from(["default", "default|0,1,0", "pipe|1,0,2"]),
        st.integers(0, 5),
        st.integers(0, 9),
        st.dictionaries(text_keys, plain_json, max_size=2),
        st.lists(
            st.builds(
                lambda size, byte, kind: torch.full((8 * size,), byte, dtype=torch.uint8).view(kind),
                st.integers(0, 6),
                st.integers(0, 255),
                st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]),
            ),
            max_size=2,
        ),
    ),
    max_size=5,
    unique_by=lambda record: record[:2],
)


def _fresh(folder: Path) -> Path:
    shutil.rmtree(folder / "log", ignore_errors=True)
    return folder / "log"


def _write(value: Any, folder: Path, *, killed: bool = False) -> bytes:
    """Records in one file; without its index where the writer was killed."""
    log = Archive(_fresh(folder), owner=_OWNER)
    for channel, index, boundary, note, tensors in value:
        log.put(Key(channel, index, boundary, note), tensors)
    with log._changed:
        assert log._changed.wait_for(lambda: not log.stats.bytes_waiting, 30.0), "the log was not written"
    path = folder / "log" / _NAME
    data = path.read_bytes() if value else segments.segment_header(segments.owner_seed(_OWNER), 0)
    log.close()
    return data if killed or not value else path.read_bytes()


def _read(data: bytes, folder: Path) -> Any:
    log_folder = _fresh(folder)
    log_folder.mkdir()
    (log_folder / _NAME).write_bytes(data)
    log = Archive(log_folder, owner=_OWNER, again=True)
    found = []
    try:
        log.verify()
        for channel in sorted({channel for channel, _, _ in log._index.in_files()}):
            log.first(channel)
            for index in log.indices(channel):
                with suppress(CorruptFile):
                    found.append(log.read(channel, index))
    finally:
        log.close()
        shutil.rmtree(log_folder)
    return found


def _segment() -> tuple[int, segments.Segment]:
    return segments.owner_seed(_OWNER), segments.Segment(Path(_NAME), 0)


def _of_header(header: bytes) -> bytes:
    """A file with one record whose header is this, all checksums right; then its index."""
    seed, segment = _segment()
    record = segments.frame(seed, segment, header, [memoryview(_PAYLOAD)]) + _PAYLOAD
    segment.entries.append(("default", 1, 2, segment.size, len(header), len(_PAYLOAD)))
    segment.size += len(record)
    return segments.segment_header(seed, 0) + record + segments.index_bytes(seed, segment)


def _of_index(index: bytes) -> bytes:
    """A file with a good record and this index, all checksums right."""
    seed, segment = _segment()
    header = segments.encode(Key("default", 1, 2), [torch.arange(64, dtype=torch.uint8)])
    record = segments.frame(seed, segment, header, [memoryview(_PAYLOAD)]) + _PAYLOAD
    segment.size += len(record)
    tail = segments._INDEX_TAIL.pack(segment.size, segments._TAIL)
    frame = segments.frame(seed, segment, index, [], segments._INDEX)
    return segments.segment_header(seed, 0) + record + frame + tail


def _header(value: Any, _folder: Path) -> bytes:
    tensors = [torch.zeros(16, dtype=torch.float32)] if value else [torch.zeros((2, 4, 8), dtype=torch.uint8)]
    return segments.encode(Key("default", 1, 2, {"kind": "x"}), tensors)


def _index(value: Any, _folder: Path) -> bytes:
    return json.dumps([["default", 1, 2, segments.START, 40, 64]] * (1 + bool(value))).encode()


TARGETS = [
    Target("segments.closed", records, _write, _read, exact_parts),
    Target("segments.open", records, lambda value, folder: _write(value, folder, killed=True), _read, exact_parts),
    Target("segments.header_sealed", st.booleans(), _header, _read, only_errors, seal=_of_header),
    Target("segments.index_sealed", st.booleans(), _index, _read, only_errors, seal=_of_index),
]

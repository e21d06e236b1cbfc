"""The files of an archive: numbered segments of framed records, each bound to its place by checksums.

A segment file is

- a segment header: magic, format, number, CRC32 of these;
- records: magic, length of the header, length of the payload, CRC32 of the payload, CRC32 of all of this and of the
  header; the header as JSON; the payload, the tensors' bytes one after the other in the dtype they were sent in;
- once it is closed, an index: framed as a record, but with its own magic and no payload, and after it its offset.

Every CRC32 of a header starts from the owner, the segment's number and the offset, so that a record counts only where
it was written: not a copy elsewhere, not another rank's, not bytes of a payload that look like one.
"""

from __future__ import annotations

import json
import math
import os
import struct
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch

from shared_core.errors import CorruptFile
from shared_core.plain_json import is_count, parse

FORMAT = 1
SUFFIX = ".log"
#: Bytes of a record's header at most; bounds what a damaged length can make a reader do.
HEADER_LIMIT = 1 << 20
_SEGMENT_MAGIC, _RECORD, _INDEX, _TAIL = b"\x93SwSegm\n", b"\x93SwRecd\n", b"\x93SwIndx\n", b"\x93SwTail\n"
_SEGMENT = struct.Struct("<8sIQ")  # magic, format, number
_FRAME = struct.Struct("<8sIQI")  # magic, length of the header, length of the payload, CRC32 of the payload
_CRC = struct.Struct("<I")
_INDEX_TAIL = struct.Struct("<Q8s")  # offset of the index, magic
_PLACE = struct.Struct("<QQ")  # number of the segment, offset
#: Bytes before the first record.
START = _SEGMENT.size + _CRC.size
#: Bytes of a record before its header.
FIXED = _FRAME.size + _CRC.size
_CHUNK = 1 << 20
_LEAST = 512  # of a file of many bad records little is read for each
_BUFFERS = 1024  # the system takes so many in one call


@dataclass(frozen=True)
class Key:
    """Names a record: unique by (channel, index).

    Attributes:
        channel: group and channel of a message, as ``"default|0,2,0"``; a group's name for its collectives.
        index: number of the message in its channel, or sequence number of the collective.
        boundary: index of the step boundary before it.
        note: plain data that JSON can hold; tuples come back as lists.
    """

    channel: str
    index: int
    boundary: int
    note: Mapping[str, Any] = field(default_factory=dict)


@dataclass(eq=False)
class Segment:
    """One segment file.

    Attributes:
        number: names it and is part of its checksums.
        size: bytes of whole records in it, its header included.
        taken: bytes that are counted for it: also those that are being written.
        boundary: newest step boundary of its records; -1 without any.
        fd: open for writing, else -1.
        gone: its records are dropped and the file is deleted soon, or is already.
        entries: ``[channel, index, boundary, offset, bytes of header, bytes of payload]`` of each record.
    """

    path: Path
    number: int
    size: int = START
    taken: int = 0
    boundary: int = -1
    fd: int = -1
    gone: bool = False
    entries: list[tuple[str, int, int, int, int, int]] = field(default_factory=list)

    def add(self, key: Key, offset: int, header: int, payload: int) -> None:
        self.entries.append((key.channel, key.index, key.boundary, offset, header, payload))
        self.boundary = max(self.boundary, key.boundary)

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


class SegmentPlace(NamedTuple):
    """Where a record is: its segment, offset, and the bytes of its header and payload."""

    segment: Segment
    offset: int
    header: int
    payload: int


class _Frame(NamedTuple):
    header: bytes
    payload: int
    payload_crc: int


# -- bytes of tensors ------------------------------------------------------------------------------


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` on the CPU, without a graph; the same memory where it was there. Raises ValueError for sparse and
    quantized tensors, and those whose elements are no whole bytes.
    """
    if tensor.layout != torch.strided or not _has_bytes(tensor.dtype):
        raise ValueError(f"a log keeps dense tensors of whole bytes, not {tensor.layout} ones of {tensor.dtype}")
    return tensor.detach().cpu()


@cache
def _has_bytes(dtype: torch.dtype) -> bool:
    """Whether a tensor of ``dtype`` is its bytes: quantized ones are more, and several elements may share a byte."""
    if str(dtype).startswith("torch.q"):
        return False
    try:
        return torch.empty(8, dtype=dtype).untyped_storage().nbytes() == 8 * dtype.itemsize
    except (RuntimeError, TypeError):
        return False


def view_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a CPU tensor in its dtype; copied only where its elements do not lie one after the other."""
    if not tensor.numel():
        return memoryview(b"")
    dense = tensor.resolve_conj().resolve_neg().contiguous()
    return dense.reshape(-1).view(torch.uint8).numpy().data


def encode(key: Key, tensors: Sequence[torch.Tensor]) -> bytes:
    """The header of a record. Raises TypeError if JSON cannot hold the note, ValueError if it would be too long."""
    kinds = [[str(t.dtype).removeprefix("torch."), list(t.shape)] for t in tensors]
    text = json.dumps([key.channel, key.index, key.boundary, dict(key.note), kinds], separators=(",", ":")).encode()
    if len(text) > HEADER_LIMIT:
        raise ValueError(f"the description of message {key.index} of {key.channel} has {len(text)} bytes, too many")
    return text


def decode(header: bytes, payload: int) -> tuple[Key, list[torch.Tensor]]:
    """Inverse of :func:`encode`; the tensors' contents are undefined. ``payload`` is the bytes of all of them. Raises
    ValueError if this is no such header, or that of other tensors.
    """
    key, kinds = _parsed(header)
    try:
        dtypes = [getattr(torch, name) for name, _ in kinds]
        if not all(map(_has_bytes, dtypes)):
            raise ValueError(f"not the dtypes of a log: {dtypes}")
        shapes = [shape for _, shape in kinds]
        if not all(is_count(size) for shape in shapes for size in shape):
            raise ValueError(f"not the shapes of tensors: {shapes}")
        if sum(math.prod(shape) * dtype.itemsize for dtype, shape in zip(dtypes, shapes, strict=True)) != payload:
            raise ValueError(f"its tensors do not have {payload} bytes")
        return key, [torch.empty(shape, dtype=dtype) for dtype, shape in zip(dtypes, shapes, strict=True)]
    except (TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(f"not a record's header: {error}") from error


def _parsed(header: bytes) -> tuple[Key, list[Any]]:
    """What a header says: the key, and dtype and shape of each tensor, which are not looked at."""
    try:
        channel, index, boundary, note, kinds = parse(header)
        good = _is_place(channel, index, boundary) and isinstance(note, dict) and isinstance(kinds, list)
    except TypeError as error:
        raise ValueError(f"not a record's header: {error}") from error
    if not good:
        raise ValueError("not a record's header: its parts are of other types")
    return Key(channel, index, boundary, note), kinds


def _is_place(channel: Any, index: Any, boundary: Any) -> bool:
    return isinstance(channel, str) and type(index) is int and type(boundary) is int


# -- writing ---------------------------------------------------------------------------------------


def owner_seed(owner: str) -> int:
    return zlib.crc32(owner.encode())


def write_all(fd: int, parts: Sequence[bytes | memoryview]) -> None:
    _vectored(parts, lambda buffers, _: os.writev(fd, buffers))


def segment_header(seed: int, number: int) -> bytes:
    fixed = _SEGMENT.pack(_SEGMENT_MAGIC, FORMAT, number)
    return fixed + _CRC.pack(zlib.crc32(fixed, seed))


def frame(seed: int, segment: Segment, header: bytes, parts: Sequence[memoryview], magic: bytes = _RECORD) -> bytes:
    """What stands before the payload ``parts`` of the next record of ``segment``."""
    crc = 0
    for part in parts:
        crc = zlib.crc32(part, crc)
    fixed = _FRAME.pack(magic, len(header), sum(part.nbytes for part in parts), crc)
    return fixed + _CRC.pack(_header_crc(seed, segment.number, segment.size, fixed, header)) + header


def index_bytes(seed: int, segment: Segment) -> bytes:
    text = json.dumps(segment.entries, separators=(",", ":")).encode()
    return frame(seed, segment, text, [], _INDEX) + _INDEX_TAIL.pack(segment.size, _TAIL)


# -- reading ---------------------------------------------------------------------------------------


def read_record(seed: int, place: SegmentPlace, channel: str, index: int) -> tuple[Key, list[torch.Tensor]]:
    """The record at ``place``, in new CPU tensors. Raises CorruptFile if it is not what was written; the message names
    the file and the offset.
    """
    segment = place.segment

    def damaged(why: object) -> CorruptFile:
        return CorruptFile(
            f"message {index} of {channel} in {segment.path} at offset {place.offset} cannot be used: {why}"
        )

    try:
        with segment.path.open("rb", buffering=0) as file:
            found = _frame_at(file, seed, segment.number, place.offset, _RECORD, HEADER_LIMIT)
            if found is None:
                raise damaged("the checksum of its header does not match")
            key, tensors = decode(found.header, found.payload)
            parts = [view_bytes(tensor) for tensor in tensors]
            if (key.channel, key.index) != (channel, index):
                raise damaged("another record is there")
            at = place.offset + FIXED + len(found.header)
            _vectored(parts, lambda buffers, done: os.preadv(file.fileno(), buffers, at + done))
    except (OSError, ValueError) as error:
        raise damaged(error) from error
    crc = 0
    for part in parts:
        crc = zlib.crc32(part, crc)
    if crc != found.payload_crc:
        raise damaged("the checksum of its contents does not match")
    return key, tensors


def load_segment(path: Path, seed: int, number: int) -> tuple[Segment, list[Key]]:
    """What a segment file holds, by its index or, without a good one, by reading all of it.

    Returns the segment and the keys of records whose header is good and whose contents are not. A record that the file
    ends in counts as never written.

    Args:
        seed: of its owner.
        number: of the segment by its name, for a file whose header is damaged; else the header's counts.

    Raises:
        CorruptFile: it is of another format.
        OSError: it cannot be read.
    """
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        head = _read(file, 0, START)
        if len(head) == START:
            magic, version, written = _SEGMENT.unpack_from(head)
            if magic == _SEGMENT_MAGIC and _CRC.unpack_from(head, _SEGMENT.size)[0] == zlib.crc32(head[:-4], seed):
                if version != FORMAT:
                    raise CorruptFile(f"{path} has format {version}, this version reads {FORMAT}")
                number = written
        segment = Segment(path, number, size, size)
        if _load_index(file, seed, segment):
            return segment, []
        return segment, _scan(file, seed, segment)


def _load_index(file: BinaryIO, seed: int, segment: Segment) -> bool:
    """Fill ``segment`` from its index. False if there is no good one."""
    tail = _read(file, max(0, segment.size - _INDEX_TAIL.size), _INDEX_TAIL.size)
    if len(tail) < _INDEX_TAIL.size:
        return False
    offset, magic = _INDEX_TAIL.unpack(tail)
    if magic != _TAIL or offset > segment.size:
        return False
    found = _frame_at(file, seed, segment.number, offset, _INDEX, segment.size)
    if found is None or offset + FIXED + len(found.header) + _INDEX_TAIL.size != segment.size:
        return False
    entries = _index_entries(found.header, offset)
    for channel, index, boundary, at, header, payload in entries or ():
        segment.add(Key(channel, index, boundary), at, header, payload)
    return entries is not None


def _index_entries(text: bytes, end: int) -> list[Any] | None:
    """What the index at ``end`` says of the records before it; None if it is none."""
    try:
        entries = parse(text)
        good = all(
            _is_place(*entry[:3]) and len(entry) == 6 and all(map(is_count, entry[3:])) and sum(entry[3:]) <= end
            for entry in entries
        )
    except (ValueError, TypeError):
        return None
    return entries if isinstance(entries, list) and good else None


def _scan(file: BinaryIO, seed: int, segment: Segment) -> list[Key]:
    """Fill ``segment`` record by record, past damage. Returns the keys of damaged records."""
    at, damaged = START, []
    while 0 <= at <= segment.size - FIXED:
        found = _frame_at(file, seed, segment.number, at, _RECORD, HEADER_LIMIT)
        if found is None:
            at = _next_magic(file, at + 1)
            continue
        key, _ = _parsed(found.header)
        start = at + FIXED + len(found.header)
        if start + found.payload > segment.size:
            break
        if _payload_crc(file, start, found.payload) == found.payload_crc:
            segment.add(key, at, len(found.header), found.payload)
        else:
            segment.boundary = max(segment.boundary, key.boundary)
            damaged.append(key)
        at = start + found.payload
    return damaged


def _frame_at(file: BinaryIO, seed: int, number: int, at: int, magic: bytes, limit: int) -> _Frame | None:
    """The frame at an offset, without its payload; None where there is no good one."""
    fixed = _read(file, at, FIXED)
    if len(fixed) < FIXED:
        return None
    found, length, payload, payload_crc = _FRAME.unpack_from(fixed)
    if found != magic or length > limit:
        return None
    header = _read(file, at + FIXED, length)
    if len(header) < length:
        return None
    if _header_crc(seed, number, at, fixed[: _FRAME.size], header) != _CRC.unpack_from(fixed, _FRAME.size)[0]:
        return None
    return _Frame(header, payload, payload_crc)


def _header_crc(seed: int, number: int, at: int, fixed: bytes, header: bytes) -> int:
    return zlib.crc32(header, zlib.crc32(fixed, zlib.crc32(_PLACE.pack(number, at), seed)))


def _read(file: BinaryIO, at: int, length: int) -> bytes:
    """At most ``length`` bytes from an offset on; fewer only at the end of the file."""
    parts = []
    while length and (part := os.pread(file.fileno(), length, at)):
        parts.append(part)
        at, length = at + len(part), length - len(part)
    return b"".join(parts)


def _payload_crc(file: BinaryIO, at: int, length: int) -> int:
    crc = 0
    for done in range(0, length, _CHUNK):
        crc = zlib.crc32(_read(file, at + done, min(_CHUNK, length - done)), crc)
    return crc


def _next_magic(file: BinaryIO, at: int) -> int:
    """Offset of the next bytes that look like the beginning of a record, -1 without any."""
    size = _LEAST
    while len(chunk := _read(file, at, size)) >= len(_RECORD):
        found = chunk.find(_RECORD)
        if found >= 0:
            return at + found
        at += len(chunk) - len(_RECORD) + 1
        size = min(2 * size, _CHUNK)
    return -1


def _vectored(parts: Sequence[bytes | memoryview], call: Callable[[list[memoryview], int], int]) -> None:
    """Move all bytes of ``parts`` by calls that may move fewer; ``call`` gets buffers and the bytes moved so far.
    Raises OSError when nothing moves any more.
    """
    rest = deque(memoryview(part) for part in parts if len(part))
    done = 0
    while rest:
        moved = call(list(islice(rest, _BUFFERS)), done)
        if not moved:
            raise OSError("the file ends too early")
        done += moved
        while rest and moved >= rest[0].nbytes:
            moved -= rest.popleft().nbytes
        if moved:
            rest[0] = rest[0][moved:]

"""Results that are appended to a rank's publications: of start-up operations, what DDP agreed on, and what a job keeps
for its replacements.
"""

from __future__ import annotations

import os
import struct
import threading
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from shared_core.encoding.plain import dumps, loads
from shared_core.errors import CorruptFile, SwiftError
from shared_core.worker.comm.listener import Part, RecordKey
from shared_core.worker.mirror import Mirror
from shared_core.worker.state.overflow import Overflow
from shared_core.worker.state.publication_file import append_whole, write_bare

_RECORD = struct.Struct("<II")  # length, checksum
#: Bytes that are added before old ones are let go of.
_FORGET_BYTES = 16 << 20
_APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT
#: Keys and results.
Records = list[tuple[RecordKey, list[torch.Tensor]]]


class RecordFile:
    """The file ``records`` of a rank, in ``folder``. On another machine there is a copy, and on disk what does not fit
    into memory.
    """

    def __init__(self, folder: Path, mirror: Mirror | None, disk: Overflow) -> None:
        self._path, self._mirror, self._disk = folder / "records", mirror, disk
        self._whole = False
        self._added = 0
        self._lock = threading.Lock()
        self._file = os.open(self._path, _APPEND, 0o600)

    def open_again(self) -> None:
        self._whole, self._lock = False, threading.Lock()  # a forked copy may have a lock that nobody lets go of
        os.close(self._file)
        self._file = os.open(self._path, _APPEND, 0o600)

    def add(self, key: RecordKey, results: Any) -> None:
        """Append results, which are serialised at once. On any thread."""
        data = _packed(key, results)
        with self._lock:
            self._added += len(data)
            if not self._whole:
                self._cut()
            try:
                append_whole(self._file, data)
            except OSError:
                self._move([self._path.read_bytes(), data])
            if self._mirror is not None:
                self._mirror.append(self._path.name, data)

    def forget(self, gone: Callable[[RecordKey], bool]) -> None:
        """Drop results, once so much was added that it is worth writing the others again. Where that fails, all
        are kept.
        """
        with self._lock, suppress(SwiftError, OSError):
            if self._added < _FORGET_BYTES:
                return
            self._added = 0
            kept = [_packed(key, results) for key, results in self.read() if not gone(key)]
            self._move(kept)
            if self._mirror is not None:
                self._mirror.write(self._path.name, kept)

    def read(self) -> Records:
        """All of them, in order; a torn last one is left out. Raises CorruptFile if one is damaged, or is none."""
        data = self._path.read_bytes()
        found: Records = []
        at = 0
        while (end := _end_of_record(data, at)) <= len(data):
            payload = data[at + _RECORD.size : end]
            if zlib.crc32(payload) != _RECORD.unpack_from(data, at)[1]:
                raise CorruptFile(f"{self._path} is damaged: the checksum at offset {at} does not match")
            found.append(_read(payload))
            at = end
        return found

    def _move(self, payload: list[bytes]) -> None:
        """Write the file anew, to disk where memory is full."""
        self._disk.write(self._path, sum(map(len, payload)), lambda there: write_bare(there, payload))
        self.open_again()

    def _cut(self) -> None:
        """Take off what a failed worker has not finished: records behind it could not be found."""
        self._whole = True
        data = self._path.read_bytes()
        at = 0
        while (end := _end_of_record(data, at)) <= len(data):
            at = end
        if at < len(data):
            os.ftruncate(self._file, at)
            if self._mirror is not None:
                self._mirror.write(self._path.name, [data[:at]])


def plain(records: Records) -> list[tuple[tuple[Any, ...], list[torch.Tensor]]]:
    return [(tuple(key), results) for key, results in records]


def from_plain(stored: Sequence[tuple[Sequence[Any], list[torch.Tensor]]]) -> Records:
    """Inverse of :func:`plain`. Raises CorruptFile if these are none."""
    try:
        return [(_key(*key), results) for key, results in stored]
    except (TypeError, ValueError) as error:
        raise CorruptFile(f"a record that was kept for replacements is none: {error}") from error


def _key(entry: int, kind: str, name: str, number: int, part: Part) -> RecordKey:
    return RecordKey(entry, kind, name, number, tuple(part))


def _read(payload: bytes) -> tuple[RecordKey, list[torch.Tensor]]:
    [record] = from_plain([loads(payload)])
    return record


def _packed(key: RecordKey, results: Any) -> bytes:
    payload = dumps((tuple(key), results))
    return _RECORD.pack(len(payload), zlib.crc32(payload)) + payload


def _end_of_record(data: bytes, at: int) -> int:
    """Where the record at an offset ends; behind the end of the file if it is torn, or there is none."""
    if at + _RECORD.size > len(data):
        return len(data) + 1
    return at + _RECORD.size + int(_RECORD.unpack_from(data, at)[0])

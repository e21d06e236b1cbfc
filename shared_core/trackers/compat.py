"""Which rows of a failed process are in the file of Weights & Biases: its public interface does not say that.

Offline there is nobody else to ask. The file is a log in the format of LevelDB with a header of seven bytes; its
entries are ``Record`` messages of the package's own protocol.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

_HEADER, _BLOCK = 7, 32768
#: Checksum, length, and whether the entry is whole (1) or its first (2), middle (3) or last (4) piece.
_PIECE = struct.Struct("<IHB")


def committed_steps(file: str) -> Iterator[int]:
    """Numbers of the rows in a file; none where it cannot be read, or from where it is damaged."""
    from google.protobuf.message import DecodeError
    from wandb.proto import wandb_internal_pb2

    protocol: Any = wandb_internal_pb2
    with suppress(OSError, DecodeError):  # what was torn off, or damaged, is written again
        for entry in entries(Path(file).read_bytes()):
            record = protocol.Record.FromString(entry)
            if record.HasField("history"):
                yield int(record.history.step.num)


def entries(data: bytes) -> Iterator[bytes]:
    """Whole entries of a file; what was torn off at the end is left out."""
    at, entry = _HEADER, b""
    while at + _PIECE.size <= len(data):
        room = _BLOCK - at % _BLOCK
        if room < _PIECE.size:  # the rest of a block is padding
            at += room
            continue
        _, length, kind = _PIECE.unpack_from(data, at)
        at += _PIECE.size
        if not 1 <= kind <= 4 or at + length > len(data):
            return
        entry += data[at : at + length]
        at += length
        if kind in (1, 4):
            yield entry
            entry = b""


def wait_closed(file: str, timeout_s: float) -> None:
    """Wait until no process has a file open, for ``timeout_s`` seconds at most.

    The process that writes it outlives the worker that it writes for, by about a tenth of a second.
    """
    deadline = time.monotonic() + timeout_s
    while _is_open(file) and time.monotonic() < deadline:
        time.sleep(0.02)


def _is_open(file: str) -> bool:
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):
                for descriptor in (entry / "fd").iterdir():
                    with suppress(OSError):
                        if os.readlink(descriptor) == file:
                            return True
    return False

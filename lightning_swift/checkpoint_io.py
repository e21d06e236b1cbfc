"""``SwiftCheckpointIO``: Lightning's own checkpoint files, durable and with a checksum."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import pickle
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

from shared_core.checkpoint import CHUNK, TEMPORARY, LocalStorage, Storage, open_storage
from shared_core.errors import CorruptFile, StorageFull

#: The comment of a sealed zip archive of ``torch.save``: this, and the SHA-256 of what is before the comment.
_SEAL = b"swift-sha256:"
_SEAL_BYTES = len(_SEAL) + 64
#: Bytes of the comment's length, little-endian, before it.
_LENGTH_BYTES = 2
#: Start of an archive's end record, and its length without a comment.
_END, _END_BYTES = b"PK\5\6", 22
_BEGIN = b"PK\3\4"
#: Errors that torch raises for a file that is none of its own.
_UNREADABLE = (RuntimeError, EOFError, ValueError, LookupError, OSError, struct.error, pickle.UnpicklingError)
_WHOLE, _DAMAGED, _CUT_OFF, _NO_SEAL, _NO_ARCHIVE = "whole", "damaged", "cut off", "no seal", "no archive"


class SwiftCheckpointIO(CheckpointIO):
    """``Trainer(plugins=[SwiftCheckpointIO()])``: Lightning's checkpoint files, which a crash cannot spoil.

    A file is written under a temporary name, flushed to the device and renamed, and its folder is flushed. Whatever
    interrupts that, and where the device is full, the file that was there before stays whole. It has a checksum inside
    (the comment of the zip archive that ``torch.save`` makes), so a damaged one is not loaded; ``torch.load`` reads it
    as any other.

    Args:
        asynchronous: training continues while a file is written: the file is made in memory first, so nothing in it is
            newer than the rest. One is written at a time. An error is raised by the next save, or at the end of the
            fit; from an error on until it is raised no file is removed.

    Example::

        trainer = Trainer(accelerator="cpu", devices=1, plugins=[lightning_swift.SwiftCheckpointIO()])
    """

    def __init__(self, asynchronous: bool = False) -> None:
        self._asynchronous = asynchronous
        self._thread: ThreadPoolExecutor | None = None
        self._error: BaseException | None = None
        self._room = threading.Semaphore(1)

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Write a file; see the class.

        Raises:
            StorageFull: no room; what was there before is as it was.
            OSError: anything else. With ``asynchronous`` these are those of an earlier file.
            TypeError: ``storage_options`` was given.
        """
        if storage_options is not None:
            raise TypeError(
                "SwiftCheckpointIO has no storage_options: configure fsspec, or use a CheckpointIO of yours"
            )
        buffer = io.BytesIO()
        torch.save(checkpoint, buffer)
        if not self._asynchronous:
            _write(buffer, path)
            return
        self._room.acquire()  # one file in memory is being written at most
        if self._error is not None:
            self._room.release()
            self._raise_error()
        self._later(lambda: _write(buffer, path), self._room.release)

    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Callable[..., Any] | None = lambda storage, loc: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Read a file as ``TorchCheckpointIO`` does, but no damaged one; after the files that are being written.

        Raises:
            FileNotFoundError: it is not there.
            CorruptFile: it is damaged.
        """
        self.wait()
        if str(path).startswith("http"):
            fetched: dict[str, Any] = TorchCheckpointIO().load_checkpoint(path, map_location, weights_only)
            return fetched
        storage, name = _place(path)
        try:
            state = _check(storage.chunks(name), storage.size(name))
        except FileNotFoundError as error:
            raise FileNotFoundError(f"Checkpoint file not found: {path}") from error
        if state == _DAMAGED:
            raise CorruptFile(f"{path} is damaged: its checksum does not match. Load an earlier checkpoint")
        if state == _CUT_OFF:
            raise CorruptFile(f"{path} is truncated, or not a checkpoint: load an earlier one")
        try:
            loaded: dict[str, Any] = TorchCheckpointIO().load_checkpoint(path, map_location, weights_only)
            return loaded
        except _UNREADABLE as error:
            # Without a seal it may be another's, in which torch finds what it must not read; that it says itself.
            if state == _WHOLE or (state == _NO_SEAL and isinstance(error, OSError | pickle.UnpicklingError)):
                raise
            raise CorruptFile(f"{path} is truncated, or not a checkpoint: load an earlier one ({error})") from error

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove a file or folder, after the files that are being written."""
        if self._thread is None:
            TorchCheckpointIO().remove_checkpoint(path)
        else:
            self._later(lambda: TorchCheckpointIO().remove_checkpoint(path))

    def teardown(self) -> None:
        """Wait for files that are being written.

        Raises:
            StorageFull: one could not be written, and nobody was told yet.
            OSError: the same, for another reason.
        """
        self.wait()
        self._raise_error()

    def wait(self) -> None:
        """Until nothing is being written; errors are told by the next save or at the end."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.shutdown(wait=True)

    # -- in the background --------------------------------------------------------------------------------------------

    def _later(self, what: Callable[[], None], after: Callable[[], None] = lambda: None) -> None:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="swift-checkpoint-io")

        def run() -> None:
            try:
                # What replaces a file that is to be removed may be the one that could not be written.
                if self._error is None:
                    what()
            except BaseException as error:  # raised where somebody hears it
                self._error = error
            finally:
                after()

        self._thread.submit(run)

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error


def _seal(buffer: io.BytesIO) -> None:
    """Put the checksum of the file that ``torch.save`` has made at its end, as the archive's comment."""
    view = buffer.getbuffer()
    if bytes(view[-_END_BYTES : -_END_BYTES + 4]) != _END or bytes(view[-_LENGTH_BYTES:]) != b"\0\0":
        return  # torch was told to use its old format, which is no archive
    digest = hashlib.sha256(view[:-_LENGTH_BYTES]).hexdigest().encode()
    view.release()
    buffer.seek(-_LENGTH_BYTES, os.SEEK_END)
    buffer.write(_SEAL_BYTES.to_bytes(_LENGTH_BYTES, "little") + _SEAL + digest)


def _check(chunks: Iterator[bytes], size: int) -> str:
    digest, tail, rest = hashlib.sha256(), b"", size - _SEAL_BYTES - _LENGTH_BYTES
    begin = b""
    for chunk in chunks:
        begin = begin or chunk[: len(_BEGIN)]
        digest.update(chunk[: max(rest, 0)])
        tail += chunk[max(rest, 0) :]
        rest -= len(chunk)
    seal = tail[_LENGTH_BYTES:]
    if seal.startswith(_SEAL):
        return _WHOLE if seal.removeprefix(_SEAL) == digest.hexdigest().encode() else _DAMAGED
    if tail[-_END_BYTES:].startswith(_END) and tail.endswith(b"\0\0"):
        return _NO_SEAL
    # torch writes no comment: what is left of one is left of a seal.
    return _DAMAGED if _END in tail else _CUT_OFF if begin == _BEGIN else _NO_ARCHIVE


def _write(buffer: io.BytesIO, path: str | Path) -> None:
    _seal(buffer)
    data = buffer.getbuffer()
    storage, name = _place(path)
    if isinstance(storage, LocalStorage):
        for each in storage.names():
            if each.startswith(f"{TEMPORARY}{name}-"):  # of a process that was killed
                with contextlib.suppress(OSError):
                    storage.remove(each)
    try:
        storage.write(name, (data[at : at + CHUNK] for at in range(0, len(data), CHUNK)), len(data))
    except StorageFull as error:
        raise StorageFull(
            f"no room for the {len(data)} bytes of {path}: make room; what was there is as it was"
        ) from error


def _place(path: str | Path) -> tuple[Storage, str]:
    """The folder and the name in it."""
    folder, slash, name = os.fspath(path).rpartition("/")
    storage = open_storage(folder or slash or ".")
    # As for any file of the user: others may read it if the umask lets them.
    return (LocalStorage(storage.root, 0o666) if isinstance(storage, LocalStorage) else storage), name


__all__ = ["SwiftCheckpointIO"]

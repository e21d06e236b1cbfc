"""A snapshot of named tensors in host memory, which is a safetensors file.

Eight bytes give the length of a JSON header, the header says where each tensor lies, and the bytes follow. The file is
made in the job's folder in memory by writing, not through a mapping: a full device is then an error and no signal, and
no page is cleared before it is filled. It has its name only once it is whole.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shared_core.errors import CorruptFile, StorageFull, SwiftError, Unsupported
from shared_core.faults import inject
from shared_core.kinds import open_regular
from shared_core.plain_json import is_count, parse
from shared_core.resources import FULL

if TYPE_CHECKING:
    import torch

#: Element types of the format, with torch's names and their sizes in bytes.
DTYPES: dict[str, tuple[str, int]] = {
    "BOOL": ("bool", 1),
    "U8": ("uint8", 1),
    "I8": ("int8", 1),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "U16": ("uint16", 2),
    "I16": ("int16", 2),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "U32": ("uint32", 4),
    "I32": ("int32", 4),
    "F32": ("float32", 4),
    "U64": ("uint64", 8),
    "I64": ("int64", 8),
    "F64": ("float64", 8),
    "C64": ("complex64", 8),
}
_NAMES = {f"torch.{torch_name}": name for name, (torch_name, _) in DTYPES.items()}
_LENGTH = struct.Struct("<Q")
#: Longest header that readers of the format accept, in bytes.
_LONGEST = 100 << 20
#: Metadata key: names of tensors that are the same as another, as JSON ``{name: stored name}``.
SHARED = "shared"
#: Tensors are copied in pieces of this size, in bytes.
_CHUNK = 16 << 20


@dataclass(frozen=True)
class ImageEntry:
    """Where a tensor lies in an image, in bytes from the beginning of the file. ``dtype``: a key of :data:`DTYPES`."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class Changed(SwiftError):
    """A tensor was changed while its snapshot was taken; the snapshot is useless."""


class Image:
    """A file that is being filled with the values that tensors have when they are copied.

    Tensors that are one and the same (shared parameters) are stored once; the header's metadata names the others.
    Making an image waits for the work enqueued on the tensors' devices.

    Args:
        path: where to put it; its folder exists.
        tensors: by name; any device, not changed. No copy is kept.
        metadata: text that goes with them.

    Raises:
        Unsupported: the format has no place for a tensor (sparse, quantised, complex128, without data).
    """

    def __init__(
        self, path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
    ) -> None:
        self.path = path
        self._temporary = temporary_of(path)
        self._tensors, shared = _unique(tensors)
        extra = dict(metadata or {}) | ({SHARED: json.dumps(shared)} if shared else {})
        self._head, self._entries = _layout(self._tensors, extra)
        self.nbytes = max((entry.end for entry in self._entries.values()), default=len(self._head))
        self._versions = {name: _version(tensor) for name, tensor in self._tensors.items()}
        _await(self._tensors.values())
        self._fd = -1

    def begin(self) -> None:
        """Make the file with its header. Raises StorageFull if there is no room; :meth:`discard` it then."""
        with _says_full(self.path, self.nbytes):
            inject.point("checkpoint.stage")
            self._fd = os.open(self._temporary, os.O_RDWR | os.O_CREAT, 0o600)
            inject.point("checkpoint.stage")
            os.ftruncate(self._fd, self.nbytes)  # a reused file may be longer
            inject.point("checkpoint.stage")
            _write_at(self._fd, self._head, 0)

    def seal(self) -> None:
        """Copy the present values and give the file its name; mostly without the GIL. Raises StorageFull, or Changed
        for a tensor changed in place since this was made; :meth:`discard` it then.
        """
        if self._fd < 0:
            self.begin()
        with _says_full(self.path, self.nbytes):
            for name, tensor in self._tensors.items():
                at = self._entries[name].start
                for piece in _pieces(tensor):
                    inject.point("checkpoint.stage")
                    at += _write_at(self._fd, piece, at)
                if _version(tensor) != self._versions[name]:
                    raise Changed(f"{name!r} was changed before it was copied, outside of an optimizer's update")
        self._close()
        inject.point("checkpoint.stage")
        os.rename(self._temporary, self.path)

    def discard(self) -> None:
        """Remove what was written. Does nothing to a sealed image."""
        self._close()
        self._temporary.unlink(missing_ok=True)

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._tensors = {}


def write_file(path: Path, payload: bytes) -> None:
    """Put ``payload`` into the job's folder in memory, with its name once it is whole. Raises StorageFull if the memory
    file system is full; nothing is left then.
    """
    temporary = temporary_of(path)
    with _says_full(path, len(payload)):
        inject.point("checkpoint.stage")
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            inject.point("checkpoint.stage")
            _write_at(fd, payload, 0)
            inject.point("checkpoint.stage")
            os.rename(temporary, path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)


def temporary_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.part")


def read_header(file: mmap.mmap | bytes | bytearray) -> tuple[dict[str, ImageEntry], dict[str, str]]:
    """Where each tensor lies, and the metadata. Raises CorruptFile if this is no whole image."""
    try:
        (length,) = _LENGTH.unpack_from(file)
        if length > min(_LONGEST, len(file) - _LENGTH.size):
            raise ValueError(f"the header is said to have {length} bytes")
        first = _LENGTH.size + length
        header = parse(file[_LENGTH.size : first])
        metadata = header.pop("__metadata__", {})
        if not all(isinstance(text, str) for text in metadata.values()):
            raise ValueError("its metadata is not text")
        entries, at = {}, first
        for name, one in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            if not all(map(is_count, (*one["data_offsets"], *one["shape"]))):
                raise ValueError(f"tensor {name!r} has no place or no shape")
            start, end = (first + offset for offset in one["data_offsets"])
            entry = ImageEntry(one["dtype"], tuple(one["shape"]), start, end)
            if start != at or end - start != math.prod(entry.shape) * DTYPES[entry.dtype][1]:
                raise ValueError(f"tensor {name!r} is not where it should be")
            entries[name], at = entry, end
        if at != len(file):
            raise ValueError(f"it has {len(file)} bytes, not {at}")
        return entries, metadata
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptFile(f"this is not a complete safetensors file: {error}") from error


def load(source: str | os.PathLike[str] | bytes) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Tensors by name and metadata of an image, given as a file or as its bytes. CPU tensors.

    The tensors of a file are views of a private mapping: pages are read when they are used, so copy what you need
    before the next snapshot is taken, which may reuse the file's memory. Those of bytes are views of a copy. Shared
    parameters are one tensor under each of their names. Raises CorruptFile if it is no whole image.
    """
    data: mmap.mmap | bytearray
    if isinstance(source, bytes):
        data = bytearray(source)
    else:
        try:
            with open_regular(source) as file:
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            raise CorruptFile(f"image {os.fspath(source)} cannot be read: {error}") from error
    try:
        entries, metadata = read_header(data)
        return _tensors(data, entries, metadata), metadata
    except CorruptFile as error:
        if isinstance(source, bytes):
            raise
        raise CorruptFile(f"image {os.fspath(source)}: {error}") from error


def _tensors(
    data: mmap.mmap | bytearray, entries: Mapping[str, ImageEntry], metadata: Mapping[str, str]
) -> dict[str, torch.Tensor]:
    """Views of an image's tensors, under all of their names; raises CorruptFile for impossible shapes and names."""
    import torch

    tensors = {}
    try:
        for name, entry in entries.items():
            dtype = getattr(torch, DTYPES[entry.dtype][0])
            count = math.prod(entry.shape)
            if count:
                flat = torch.frombuffer(data, dtype=dtype, count=count, offset=entry.start)
                tensors[name] = flat.reshape(entry.shape)
            else:
                tensors[name] = torch.empty(entry.shape, dtype=dtype)
        for name, stored in parse(metadata.get(SHARED, "{}")).items():
            tensors[name] = tensors[stored]
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise CorruptFile(f"this is not a complete safetensors file: {error}") from error
    return tensors


class Stager:
    """Copies on a thread while forward and backward run. Any thread may wait for it."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._lock = threading.Lock()

    def begin(self, work: Callable[[], None]) -> None:
        """Run ``work`` on a thread; waits for the one before. Runs it here if no thread can be started."""
        self.fence()
        thread = threading.Thread(target=self._run, args=(work,), name="swift-stager", daemon=True)
        try:
            thread.start()
            self._thread = thread
        except RuntimeError:  # no thread can be started: then the caller waits
            work()

    def fence(self) -> None:
        """Wait until the work is done; what it reads may be changed afterwards. Costs nothing when there is none.
        Raises once whatever ``work`` raised.
        """
        if self._thread is None:
            return
        with self._lock:
            if self._thread is not None:
                self._thread.join()
                self._thread = None
            error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self._error = error


def _unique(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The distinct tensors, detached; and for each name of the same tensor the name under which it is stored."""
    import torch

    unique: dict[str, torch.Tensor] = {}
    shared: dict[str, str] = {}
    seen: dict[Any, str] = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach()
        if str(tensor.dtype) not in _NAMES or tensor.layout != torch.strided or tensor.device.type == "meta":
            raise Unsupported(
                f"tensor {name!r} ({tensor.dtype}, {tensor.layout}, {tensor.device.type}) has no place in a "
                "safetensors file; keep it out of the state, or as another type"
            )
        key = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        first = seen.setdefault(key, name) if tensor.numel() else name
        if first != name:
            shared[name] = first
        else:
            unique[name] = tensor
    return unique, shared


def _version(tensor: torch.Tensor) -> int:
    """torch's count of changes in place; always 0 for tensors made in inference mode."""
    return 0 if tensor.is_inference() else tensor._version


def _layout(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, ImageEntry]]:
    """The beginning of the file, and where each tensor goes: the widest elements first, so that all are aligned."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name in sorted(tensors, key=lambda name: (-tensors[name].element_size(), name)):
        tensor = tensors[name]
        end = at + tensor.nbytes
        header[name] = {"dtype": _NAMES[str(tensor.dtype)], "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = _LENGTH.pack(len(text)) + text
    entries = {
        name: ImageEntry(one["dtype"], tuple(one["shape"]), *(len(head) + offset for offset in one["data_offsets"]))
        for name, one in header.items()
        if name != "__metadata__"
    }
    return head, entries


def _await(tensors: Iterable[torch.Tensor]) -> None:
    """Wait for all work that was enqueued so far: the snapshot shows its results."""
    from shared_core import devices

    devices.await_all(devices.apart(tensors))


def _pieces(tensor: torch.Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor in row-major order. A piece is valid until the next one is asked for."""
    import torch

    if not tensor.numel():
        return
    if tensor.is_cpu:
        whole = memoryview(_flat(tensor).numpy().data)
        for at in range(0, len(whole), _CHUNK):
            yield whole[at : at + _CHUNK]
        return
    stream = torch.Stream(tensor.device)  # beside the program's work, which continues
    with stream:
        flat = _flat(tensor)
    buffer = torch.empty(min(_CHUNK, flat.numel()), dtype=torch.uint8, pin_memory=True)
    for piece in flat.split(_CHUNK):
        with stream:
            buffer[: piece.numel()].copy_(piece, non_blocking=True)
        stream.synchronize()
        yield memoryview(buffer[: piece.numel()].numpy().data)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg().contiguous()
    return tensor.reshape(-1).view(torch.uint8)


def _write_at(fd: int, data: bytes | memoryview, at: int) -> int:
    view = memoryview(data)
    done = 0
    while done < len(view):
        done += os.pwrite(fd, view[done:], at + done)
    return done


@contextlib.contextmanager
def _says_full(path: Path, nbytes: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise StorageFull(f"no room in memory for {nbytes} bytes at {path} ({error.strerror})") from error
        raise

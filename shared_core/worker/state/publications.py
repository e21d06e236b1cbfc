"""What a rank publishes in the agent's shared memory, and what its replacement reads there.

Files in ``rank{r}/`` of the job's private folder, of which a reader never sees a half. Those that replace each other at
each batch (``boundary``, ``mid``, ``unoptimized``) stay mapped; the others are written and then renamed:

- ``boundary.{n}``: a step boundary with the rank-local state there; ``mid.{n}.{k}``: forward-mutated state again,
  before the first gradient bucket of the k-th backward;
- ``unoptimized.{n}``: parameters that no optimizer steps, as far as they had changed at step boundary ``n``; later
  boundaries refer to it;
- ``end.{e}``: the state and result at the end of entry call e;
- ``order.{id}``: the indices of a pass over the data, where its rest may be dealt out to another number of workers;
- ``records``: results of start-up operations, appended; ``checks``: a ring of input checksums.
"""

from __future__ import annotations

import os
import struct
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from shared_core.encoding.plain import Piece, dumps, loads, pieces
from shared_core.errors import CorruptFile, SwiftError
from shared_core.events import console
from shared_core.faults import inject
from shared_core.loaders.reshard import loader_states, pack_indices, unpack_indices
from shared_core.plain_json import is_count
from shared_core.protocol.frontier import StepBoundary
from shared_core.protocol.mirroring import APPEND, BEGIN, END, LOCAL, REMOVE, SYNC, WRITE, keeper
from shared_core.resources import map_file
from shared_core.system import threads
from shared_core.system.wire import CONNECT_S, Link, connect
from shared_core.worker.state.publication_file import (
    Overflow,
    Slots,
    append_whole,
    is_blank,
    packed,
    read_file,
    write_file,
)

#: Without a copy for so long, and without a new generation, the user is told.
_TROUBLE_S = 5.0


class Mirror:
    """Copies of one rank's publications. Any thread may call. Without a link the calls do nothing."""

    def __init__(self, rank: int, attempt: int, slot: int, folder: Path, key: bytes) -> None:
        self._rank, self._attempt, self._slot, self._folder, self._key = rank, attempt, slot, folder, key
        self._lock = threading.RLock()
        self._link: Link | None = None
        self._keeper: str | None = None
        self._trouble = threading.Timer(0.0, lambda: None)

    def follow(self, machines: Sequence[str | None]) -> None:
        """These machines hold the places now. A new keeper gets all copies, on a thread; publications wait for that."""
        chosen = keeper(machines, self._slot)
        if chosen == self._keeper:
            return
        self._keeper = chosen
        link = self._link
        if link is not None:  # somebody may wait for an answer that never comes
            with suppress(OSError):
                link.shutdown()
        ready = threading.Event()
        threads.start(self._connect, (chosen, ready), name="swift-mirror")
        ready.wait(CONNECT_S)

    def _connect(self, chosen: str | None, ready: threading.Event) -> None:
        with self._lock:
            ready.set()
            self._trouble.cancel()
            self._drop()
            if chosen is None or chosen != self._keeper:
                return
            try:
                self._link = connect(chosen, self._key)
                self._send(BEGIN)
                for path in sorted(self._folder.iterdir()):
                    if path.suffix != ".tmp" and path.name not in LOCAL and not is_blank(path):
                        self._send(WRITE, path.name, [path.read_bytes()])
                self._send(END)
                self.sync()
            except OSError as error:
                self._give_up(error)

    def write(self, name: str, data: Sequence[bytes | memoryview]) -> None:
        self._try(WRITE, name, data)

    def append(self, name: str, data: bytes) -> None:
        self._try(APPEND, name, [data])

    def remove(self, name: str) -> None:
        self._try(REMOVE, name, ())

    def sync(self) -> None:
        """Return when the other machine has all; at once if there is none."""
        with self._lock:
            if self._link is None:
                return
            try:
                self._send(SYNC)
                self._link.answer()
            except OSError as error:
                self._give_up(error)

    def _send(self, kind: bytes, name: str = "", data: Sequence[bytes | memoryview] = ()) -> None:
        assert self._link is not None
        self._link.send(kind, self._rank, self._attempt, name, data)

    def _try(self, kind: bytes, name: str, data: Sequence[bytes | memoryview]) -> None:
        with self._lock:
            if self._link is None:
                return
            try:
                self._send(kind, name, data)
            except OSError as error:
                self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        # Mostly the other machine is failing, and the next generation names another.
        self._drop()
        message = (
            f"rank {self._rank}: no copy of its state on another machine until the next failure or resize ({error}). "
            "If this machine fails before, all workers may have to start again"
        )
        self._trouble = threading.Timer(_TROUBLE_S, console, [message])
        self._trouble.daemon = True
        self._trouble.start()

    def _drop(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None


#: Start of the names of their files.
_ORDER = "order."


class OrderFiles:
    """The orders of one rank. ``put`` and ``remove`` write and remove files in ``folder``."""

    def __init__(
        self, folder: Path, put: Callable[[str, bytes, Sequence[Piece]], object], remove: Callable[[str], None]
    ) -> None:
        self._folder, self._put, self._remove = folder, put, remove
        self._packed: dict[str, Any] = {}
        #: Of failed workers, as long as it is not known which of their step boundaries need them.
        self._left: set[str] = set()
        #: Which orders each step boundary needs.
        self._named: dict[int, frozenset[str]] = {}

    def look(self) -> None:
        self._left = {path.name for path in self._folder.glob(f"{_ORDER}*")}

    def write(self, indices: list[Any]) -> str:
        """Publish the indices of a pass over the data. Returns its name."""
        name = f"{_ORDER}{os.urandom(6).hex()}"
        self._packed[name] = pack_indices(indices)
        self._put(name, b"", pieces(self._packed[name]))
        return name

    def read(self, name: str) -> list[Any]:
        """The indices published under ``name``. Raises CorruptFile if they are damaged."""
        try:
            return unpack_indices(self.read_packed(name))
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise CorruptFile(f"{self._folder}/{name} holds no order of a pass: {error!r}") from error

    def read_packed(self, name: str) -> Any:
        """The indices published under ``name``, packed; quick in the process that published them."""
        if name not in self._packed:
            self._packed[name] = loads(read_file(self._folder / name)[1])
        return self._packed[name]

    def drop(self, name: str) -> None:
        self._packed.pop(name, None)
        self._remove(name)

    def note(self, boundary: int, parts: Any) -> None:
        if self._left:
            states = (state for _, state in loader_states(parts))
            self._named[boundary] = frozenset(str(each["order"]) for state in states for each in state["iterations"])

    def drop_unnamed(self, kept: Iterable[int]) -> None:
        """Remove failed workers' orders once all step boundaries that are kept are this worker's own. One that these
        still name, because its pass continues, is left to the next replacement.
        """
        kept = set(kept)
        self._named = {boundary: names for boundary, names in self._named.items() if boundary in kept}
        if self._left and self._named.keys() == kept:
            for name in self._left.difference(*self._named.values()):
                self.drop(name)
            self._left.clear()
            self._named.clear()

    def forget_boundaries(self) -> None:
        self._named.clear()


class StateOrders:
    """Where loaders publish the order of their passes; see :class:`shared_core.loaders.Orders`. ``may_drop``:
    samples may be left out when the number of workers changes; ``asked``: it may change while the job runs.
    """

    def __init__(self, files: OrderFiles, may_drop: bool, asked: bool) -> None:
        self.may_drop, self.asked = may_drop, asked
        self.write, self.read, self.drop = files.write, files.read, files.drop


#: A part of the program that replacements run again: a phase of the script, by loops over epochs; in an epoch also its
#: number, and how many passes of it there were. Empty for all else.
Part = tuple[int, ...]


class RecordKey(NamedTuple):
    """The key of a result that is kept for replacements.

    Attributes:
        entry: number of the entry call.
        kind: the group, for the result of an operation; else what it is.
        name: of the operation; else which of its kind.
        number: which of these; else the step boundary.
    """

    entry: int
    kind: str
    name: str
    number: int
    part: Part = ()


_RECORD = struct.Struct("<II")  # length, checksum
#: Bytes that are added before old ones are let go of.
_FORGET_BYTES = 16 << 20
_APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT
#: Keys and results.
Records = list[tuple[RecordKey, list[torch.Tensor]]]


class RecordFile:
    """The file ``records`` of a rank, with a copy on another machine; on disk where memory is full."""

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
        """Drop results, once so much was added that it is worth writing the others again."""
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
        for at, end in _records_in(data):
            payload = data[at + _RECORD.size : end]
            if zlib.crc32(payload) != _RECORD.unpack_from(data, at)[1]:
                raise CorruptFile(f"{self._path} is damaged: the checksum at offset {at} does not match")
            found.append(_read(payload))
        return found

    def _move(self, payload: list[bytes]) -> None:
        """Rewrite the file; on disk if memory is full."""
        self._disk.write(self._path, sum(map(len, payload)), lambda there: write_file(there, payload))
        self.open_again()

    def _cut(self) -> None:
        """Take off what a failed worker has not finished: records behind it could not be found."""
        self._whole = True
        data = self._path.read_bytes()
        whole = max((end for _, end in _records_in(data)), default=0)
        if whole < len(data):
            os.ftruncate(self._file, whole)
            if self._mirror is not None:
                self._mirror.write(self._path.name, [data[:whole]])


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


def _records_in(data: bytes) -> Iterator[tuple[int, int]]:
    """Where each whole record begins and ends; none that is torn."""
    at = 0
    while at + _RECORD.size <= len(data):
        end = at + _RECORD.size + int(_RECORD.unpack_from(data, at)[0])
        if end > len(data):
            return
        yield at, end
        at = end


#: The part of parameters that no optimizer steps; start of the names of the files that they are in.
UNOPTIMIZED, _UNOPTIMIZED_FILE = "swift.unoptimized", "unoptimized."
#: Starts of the names of files that are mapped, and replaced at each batch.
_REPLACED = ("boundary.", "mid.", _UNOPTIMIZED_FILE)
#: Start of the names of files with numbers.
TALLY = "tally."
_TALLY = struct.Struct("<Q")


def boundary_of(head: Piece) -> StepBoundary:
    """The step boundary that the head of a file describes; raises CorruptFile if it describes none."""
    try:
        boundary = StepBoundary(**loads(head))
        if (
            is_count(boundary.index)
            and is_count(boundary.version)
            and isinstance(boundary.kind, str)
            and isinstance(boundary.groups, dict)
        ):
            return boundary
        raise ValueError("a number or name is missing")
    except (ValueError, TypeError) as error:
        raise CorruptFile(f"the head of a publication describes no step boundary: {error}") from error


class Tally:
    """A number in shared memory that outlives the worker: how often something with an outside effect was done."""

    def __init__(self, path: Path) -> None:
        self._map = map_file(path, _TALLY.size)

    @property
    def value(self) -> int:
        """The number; 0 at first. In a replacement, what the failed worker left."""
        return int(_TALLY.unpack_from(self._map)[0])

    @value.setter
    def value(self, number: int) -> None:
        _TALLY.pack_into(self._map, 0, number)


class SharedMemoryPublisher:
    """The publications of one rank.

    Args:
        folder: ``rank{r}/`` of the job's folder; made if absent, private to the user.
        mirror: where another machine keeps copies; what was published is there when the call returns, except records,
            which are there with the next publication.
        disk: takes what does not fit into memory.

    Attributes:
        publishing: held while a step boundary is published.
        sources: senders of the last messages that were received from any source.

    Raises:
        OutOfResources: there is no room for it; methods that write raise it too.
    """

    def __init__(self, folder: Path, mirror: Mirror | None = None, disk: Overflow | None = None) -> None:
        self.folder = folder
        self._mirror, self._disk = mirror, disk or Overflow(None)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.publishing = threading.Lock()
        self._refers: dict[int, frozenset[int]] = {}
        self._slots = Slots(folder, _REPLACED)
        self.orders = OrderFiles(folder, self.put, self._retire)
        self.input_checksums = InputChecksums(folder, self._disk)
        self.sources = InputChecksums(folder, self._disk, "sources")
        self.records = RecordFile(folder, mirror, self._disk)
        self._look()

    def _look(self) -> None:
        self._kept: list[int] = sorted(int(p.name.split(".")[1]) for p in self._found("boundary."))
        self._unoptimized = [int(p.name.split(".")[1]) for p in self._found(_UNOPTIMIZED_FILE)]
        self._mids = self._found_mids()
        self.orders.look()

    def look_again(self) -> None:
        """As if this publisher had been made now: until now another worker has written it."""
        self.records.open_again()
        self._slots = Slots(self.folder, _REPLACED)
        self._look()

    def follow(self, machines: Sequence[str | None]) -> None:
        if self._mirror is not None:
            self._mirror.follow(machines)

    def sync(self) -> None:
        """Block until the other machine has all that was published."""
        if self._mirror is not None:
            self._mirror.sync()

    # -- writing -----------------------------------------------------------------------------------

    def put(self, name: str, head: bytes, payload: Sequence[Piece]) -> None:
        """Publish under a name; on disk where memory is full. Blocks until the other machine has it."""
        data = packed(head, payload)
        size = sum(map(len, data))
        if name.startswith(_REPLACED):
            try:
                inject.point("publish")
                self._slots.write(name, size, data)
            except OSError as error:
                self._disk.elsewhere(self.folder / name, size, lambda path: write_file(path, data), error)
        else:
            self._disk.write(self.folder / name, size, lambda path: write_file(path, data))
        if self._mirror is not None:
            self._mirror.write(name, data)
            self._mirror.sync()

    def publish_boundary(self, boundary: StepBoundary, parts: dict[str, Any]) -> None:
        """Publish a step boundary. In ``parts``, the rank-local state, :data:`UNOPTIMIZED` says for each of those
        tensors with which boundary it was written.
        """
        self._refers[boundary.index] = frozenset(parts.get(UNOPTIMIZED, {}).values())
        self.orders.note(boundary.index, parts)
        self.put(f"boundary.{boundary.index}", dumps(vars(boundary)), pieces(parts))
        if boundary.index in self._kept:  # a replacement publishes the failed worker's boundary again
            self._kept.remove(boundary.index)
        self._kept.append(boundary.index)

    def write_unoptimized(self, boundary: int, tensors: Mapping[int, torch.Tensor]) -> None:
        """Write tensors to which this step boundary, that is to be published, and later ones refer."""
        self.put(f"{_UNOPTIMIZED_FILE}{boundary}", b"", pieces(dict(tensors)))
        if boundary not in self._unoptimized:
            self._unoptimized.append(boundary)

    def publish_mid(self, boundary: int, number: int, parts: dict[str, Any]) -> None:
        """Publish what forward has changed before backward ``number`` of the batch after ``boundary``."""
        self.put(f"mid.{boundary}.{number}", b"", pieces(parts))
        self._mids[boundary] = max(self._mids.get(boundary, 0), number + 1)

    def publish_end(self, entry: int, result: Any, parts: dict[str, Any]) -> None:
        """Publish the end of an entry call; kept for the whole job."""
        self.put(f"end.{entry}", b"", pieces({"result": result, "parts": parts}))

    def drop_before(self, boundary: int) -> None:
        """Remove step boundaries below ``boundary`` and what belongs to them; the newest is always kept."""
        while len(self._kept) > 1 and self._kept[0] < boundary:
            index = self._kept.pop(0)
            self._retire(f"boundary.{index}")
            self._refers.pop(index, None)
        for index in [each for each in self._mids if self._kept and each < self._kept[0]]:
            for number in range(self._mids.pop(index)):
                self._retire(f"mid.{index}.{number}")
        self.orders.drop_unnamed(self._kept)
        # What a failed worker's boundaries refer to is not known.
        if self._unoptimized and self._refers.keys() >= set(self._kept):
            needed = frozenset().union(*self._refers.values())
            for number in [each for each in self._unoptimized if each not in needed]:
                self._unoptimized.remove(number)
                self._retire(f"{_UNOPTIMIZED_FILE}{number}")

    def _found(self, start: str) -> list[Path]:
        paths = (path for path in self.folder.glob(f"{start}*") if path.suffix != ".tmp")
        return [path for path in paths if not is_blank(path)]

    def _found_mids(self) -> dict[int, int]:
        """What failed workers have published before buckets: how many, by step boundary."""
        found: dict[int, int] = {}
        for path in self._found("mid."):
            _, boundary, number = path.name.split(".")
            found[int(boundary)] = max(found.get(int(boundary), 0), int(number) + 1)
        return found

    def _retire(self, name: str) -> None:
        """Remove a publication, and leave its memory to the next one."""
        if not self._slots.retire(name):
            self._disk.remove(self.folder / name)
        if self._mirror is not None:
            self._mirror.remove(name)

    def forget_boundaries(self) -> None:
        for number in self._unoptimized:
            self._retire(f"{_UNOPTIMIZED_FILE}{number}")
        self._unoptimized.clear()
        self._refers.clear()
        self.orders.forget_boundaries()
        for index in self._kept:
            self._retire(f"boundary.{index}")
        self._kept.clear()

    def complete(self, records: Records, ends: Mapping[int, tuple[Any, dict[str, Any]]]) -> None:
        """Publish what a checkpoint has of a failed worker and this publisher, whose copies failed, has not."""
        known = {key for key, _ in self.records.read()}
        for key, results in records:
            if key not in known:
                self.records.add(key, results)
        for entry, (result, parts) in ends.items():
            if not self.has_end(entry):
                self.publish_end(entry, result, parts)

    def tally(self, name: str) -> Tally:
        return Tally(self.folder / f"{TALLY}{name}")

    # -- reading -----------------------------------------------------------------------------------

    def boundaries(self) -> list[StepBoundary]:
        """Published step boundaries, oldest first; damaged ones are left out. Reads all their files."""
        found = []
        for path in self.folder.glob("boundary.*"):
            if path.suffix == ".tmp":
                continue
            try:
                found.append(boundary_of(read_file(path, payload=False)[0]))
            except (CorruptFile, FileNotFoundError):  # gone: of a worker that lives
                continue
        return sorted(found, key=lambda boundary: boundary.index)

    def read_boundary(self, index: int) -> dict[str, Any]:
        """Rank-local state at a step boundary, by name. Raises CorruptFile or FileNotFoundError."""
        parts: dict[str, Any] = loads(read_file(self.folder / f"boundary.{index}")[1])
        try:
            refers: Mapping[int, int] = parts.get(UNOPTIMIZED, {})
            numbers = frozenset(refers.values())
            files = {number: loads(read_file(self.folder / f"{_UNOPTIMIZED_FILE}{number}")[1]) for number in numbers}
            if refers:
                parts[UNOPTIMIZED] = {place: files[number][place] for place, number in refers.items()}
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise CorruptFile(f"step boundary {index} in {self.folder} holds no state of a rank: {error}") from error
        self._refers[index] = numbers
        return parts

    def read_mid(self, boundary: int, number: int) -> dict[str, Any] | None:
        """State of a backward, by name; None if the failed worker did not get there. May raise CorruptFile."""
        try:
            return loads(read_file(self.folder / f"mid.{boundary}.{number}")[1])  # type: ignore[no-any-return]
        except FileNotFoundError:
            return None

    def end_file(self, entry: int) -> Path:
        return self.folder / f"end.{entry}"

    def has_end(self, entry: int) -> bool:
        return self.end_file(entry).exists()

    def read_end(self, entry: int) -> tuple[Any, dict[str, Any]]:
        """(result, parts) of a finished entry call. Raises CorruptFile or FileNotFoundError."""
        stored = loads(read_file(self.folder / f"end.{entry}")[1])
        if not isinstance(stored, dict) or not stored.keys() >= {"result", "parts"}:
            raise CorruptFile(f"{self.folder}/end.{entry} holds no end of an entry call")
        return stored["result"], stored["parts"]


_ENTRY = struct.Struct("<IIQ")  # group, checksum, sequence number + 1
_ENTRIES = 8192


class InputChecksums:
    """Checksums of the inputs of a rank's last operations, in shared memory: what its replacement computes again must
    have the same. Likewise the senders of its last receives from any source. A ring of the newest 8192. Callers of
    :meth:`add` hold the runtime's lock.
    """

    def __init__(self, folder: Path, disk: Overflow, name: str = "checks") -> None:
        room = _ENTRIES * _ENTRY.size
        self._ring = disk.write(folder / name, room, lambda path: map_file(path, room))
        self._count = 0

    def add(self, group: int, seq: int, checksum: int) -> None:
        """``group`` is its id; for receives a number of group and tag, with the sender in place of a checksum."""
        _ENTRY.pack_into(self._ring, (self._count % _ENTRIES) * _ENTRY.size, group, checksum, seq + 1)
        self._count += 1

    def read(self) -> dict[tuple[int, int], int]:
        """By (group, sequence number)."""
        entries = (_ENTRY.unpack_from(self._ring, place * _ENTRY.size) for place in range(_ENTRIES))
        return {(group, seq - 1): checksum for group, checksum, seq in entries if seq}

"""Values of a script's variables as bytes: plain data by value, objects by numbers under which they are described.

The bytes are plain data (:mod:`shared_core.encoding`): a list of values, and descriptions ``(number, kind, type, ...)``
of the objects among them. No method of a script's class runs, and reading makes no object: :mod:`.graft` does.
"""

from __future__ import annotations

import functools
import gc
import io
import itertools
import math
import pickle
import random
import re
import sqlite3
import threading
import time
import types
import warnings
import weakref
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from enum import Flag
from itertools import islice
from operator import length_hint
from typing import Any

import numpy as np
import torch
from torch import nn

from shared_core.devices import to_host
from shared_core.encoding import plain
from shared_core.encoding.plain import _numbered, _Pickler
from shared_core.encoding.raw_memory import memory_of
from shared_core.encoding.unpacking import Numbered, array_kind, dtype_named
from shared_core.loaders.randomness import generator_state
from shared_core.worker.state.checksums import checksum
from shared_core.worker.state.generators import python_memory
from shared_core.worker.variables.attached_memory import AttachedMemory
from shared_core.worker.variables.hooks import is_hook_of_script
from shared_core.worker.variables.kinds import (
    FRAMEWORKS,
    OURS,
    RANDOM,
    VALUES,
    OfItsClass,
    attributes_of_class,
    attributes_of_tensor,
    is_bound,
    is_dunder,
    is_loaded_apart,
    is_made_in_a_function,
    kind_of,
    name_of,
    numbers_of_c,
    of_libraries,
    root_of,
    slots_of,
)

#: Limit of all values together, in bytes; if they are more, the largest are only compared.
LIMIT = 4 << 20
#: Tensors and arrays of more bytes than this are written again only if they have changed.
_LARGE = 1 << 16
#: Up to so many bytes all of a tensor is looked at each time; of larger ones so many parts, of this size, in turn.
_WHOLE, _PART, _PARTS = 1 << 20, 1 << 16, 4
SEEN_AT_ONCE = _PART * _PARTS
#: Elements of long lists that are looked at together; how many lists are followed.
_ROWS, _LISTS = 1024, 16
#: Attributes that every module has, which are no state.
MODULE_PARTS = frozenset(vars(nn.Module()))
_STATE_OF_MODULES = frozenset({"training", "_parameters", "_buffers", "_modules"})
#: What took longer than this many seconds so often is looked at again only after this many times as long.
_LONGEST_WAIT, _DEAR_S, _LOOKS = 100, 1e-3, 4
#: When more large tensors and arrays are followed than this, those that no longer exist are dropped.
_REMEMBERED = 4096
_OURS = ("shared_core", "lightning_swift", "accelerate_swift")
_SIMPLE, _DEEPEST = (int, float, str, bool, bytes, type(None)), 6


#: In place of a checksum: a data set or a sampler holds an object that cannot be read.
OF_DATA = "of data"
#: Functions and types that the bytes name.
_NAMES = frozenset({_numbered, plain._scalar, plain._dtype, torch.Size, deque, complex})
_DATA = (torch.utils.data.Dataset, torch.utils.data.Sampler)
_BY_NAME = frozenset({"function", "named", "bound"})


class TooLarge(Exception):
    """The values have more bytes than the limit."""


class Large:
    """Stands for a value beyond the limit, of which a sample is compared."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class Unwritten(Large):
    """Stands for a value that cannot be written, and of which nothing is compared."""

    __slots__ = ()


class Grown:
    """Stands for a set whose order depends on what it has held before."""

    __slots__ = ("value",)

    def __init__(self, value: set[Any]) -> None:
        self.value = value


def in_order(values: Sequence[Any]) -> Sequence[Any]:
    """The same values, with a stand-in for each set whose order another set of its elements would not have."""
    if not any(type(each) is set for each in values):
        return values
    return [Grown(each) if type(each) is set and _has_grown(each) else each for each in values]


def _has_grown(value: set[Any]) -> bool:
    """Whether its table is not as large as it is after its elements alone were added, in CPython."""
    size, count = 8, len(value)
    while count * 5 >= (size - 1) * 3:
        full = -(-(size - 1) * 3 // 5)
        size = 1 << max(full * (2 if full > 50_000 else 4), 8).bit_length()
    return value.__sizeof__() != set().__sizeof__() + (size * 16 if size > 8 else 0)


class Unbound:
    """Stands for the value of a variable that has none."""


class _Rows:
    """Stands in the bytes for the descriptions, which become known while values are written."""


class _Room(io.BytesIO):
    """A buffer that raises TooLarge beyond its limit."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._left = limit

    def write(self, data: Any) -> int:
        self._left -= memoryview(data).nbytes
        if self._left < 0:
            raise TooLarge
        return super().write(data)


#: As their reader makes them (:mod:`shared_core.encoding.unpacking`).
_MADE: dict[str, Callable[..., Any]] = {
    "_numbered": Numbered,
    "_scalar": lambda data, kind: np.frombuffer(data, np.dtype(kind))[0],
    "_dtype": dtype_named,
    "Size": torch.Size,
    "deque": deque,
    "complex": complex,
}


class _OwnReader(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str) -> Any:
        return _MADE[global_name]


def read_own(data: bytes) -> Any:
    """Reads, without checks, what this process itself has just written: twenty times as fast. Never other bytes."""
    return _OwnReader(io.BytesIO(data)).load()


class LookCost:
    """What looking at one thing takes, and when its turn is again: what is dear is not looked at each time."""

    def __init__(self) -> None:
        self._looks, self._quickest, self._due = 0, math.inf, 0.0

    @property
    def is_due(self) -> bool:
        return time.monotonic() >= self._due

    def looked(self, took_s: float) -> float:
        """A look took so long. Returns how long to wait for the next one; 0 where each time has one.

        The quickest of several looks counts: on a busy machine some take long.
        """
        self._looks, self._quickest = self._looks + 1, min(self._quickest, took_s)
        dear = self._looks >= _LOOKS and self._quickest > _DEAR_S
        wait_s = _LONGEST_WAIT * self._quickest if dear else 0.0
        self._due = time.monotonic() + wait_s
        return wait_s


class _Followed:
    """A large tensor or array, and checksums of its first state.

    Args:
        parts: checksums of its parts, empty to be filled; None if a replacement has another value.
        version: see :meth:`ValueWriter.unchanged`.
    """

    def __init__(self, thing: Any, parts: list[int] | None, version: Any = None) -> None:
        self.ref, self.parts, self._version, self._turn = weakref.ref(thing), parts, version, 0

    def is_same(self, version: Any, data: memoryview) -> bool:
        if self.parts is None or version != self._version:
            self.parts = None  # what was changed back is published all the same
            return False
        count = -(-len(data) // _PART)
        if not self.parts:
            self.parts = [zlib.crc32(data[i * _PART : (i + 1) * _PART]) for i in range(count)]
            return True
        turns = range(count) if len(data) <= _WHOLE else [(self._turn + i) % count for i in range(_PARTS)]
        self._turn += _PARTS
        if any(zlib.crc32(data[i * _PART : (i + 1) * _PART]) != self.parts[i] for i in turns):
            self.parts = None
        return self.parts is not None


class ValueWriter:
    """Writes values, and remembers what has not changed since it was first written.

    Args:
        restored: whether the object with this id is restored by others, because it is attached.
        inner: this writes part of what an iterator holds. Iterators in there are not looked into: many of a program
            hold all of it.
    """

    def __init__(self, restored: Callable[[int], bool], *, inner: bool = False) -> None:
        self.restored, self.inner = restored, inner
        self.ignored: set[str] = set()
        #: Names of attributes that the script's code gives to other objects than its own.
        self.given: set[str] = set()
        #: Names of variables that hold what is not described, by identity.
        self.aliases: dict[int, str] = {}
        #: Names of what is attached and its parts, by identity.
        self.parts: dict[int, str] = {}
        #: Of what is attached, which other tensors may show.
        self.memory = AttachedMemory()
        #: Types of written objects that do not show what they hold.
        self.dark: set[str] = set()
        #: Whether a replacement also makes what is seen for the first time now.
        self.begins = True
        #: Whether optimizers that nobody has attached are written; those of a framework are left to it.
        self.optimizers = False
        #: Whether data sets and samplers are written: they are put back after the batches were read again.
        self.data = False
        #: Whether all that is written belongs to data sets and samplers.
        self.of_data = False
        #: Bytes of the largest array of which only a part is looked at each time.
        self.partly = 0
        self._followed: dict[int, _Followed] = {}
        #: Tensors and arrays that were written before, by identity.
        self._owners: dict[int, weakref.ref[Any]] = {}
        self._lists: dict[int, tuple[list[Any], dict[int, int], Iterator[int]]] = {}
        self._random: dict[int, tuple[Any, Any]] = {}
        self._results: dict[int, tuple[Any, int]] = {}
        self._digests: dict[int, tuple[Any, int | None, LookCost]] = {}

    def write(self, values: Any, limit: int = LIMIT) -> bytes:
        """Values as bytes. Raises TooLarge beyond the limit, and whatever an object raises that cannot be described."""
        room = _Room(limit)
        pickler = _Values(room, self)
        pickler.dump((values, _Rows()))
        return room.getvalue()

    def describe(self, kind: str, thing: Any) -> tuple[Any, ...]:
        """What is written of an object of this kind, after number, kind and type."""
        return _WAYS[kind](self, thing)

    def put_back(self, thing: Any) -> None:
        """This tensor or array now has another value than the script's start gives it: write it each time."""
        self._followed[id(thing)] = _Followed(thing, None)

    def unchanged(self, thing: Any, version: Any, data: memoryview) -> bool:
        """Whether a large tensor or array is as a replacement's script makes it, too. ``version`` changes when torch
        writes to it; None if nothing tells. ``data`` is all of its bytes.
        """
        known = self._followed.get(id(thing))
        if known is None or known.ref() is not thing:
            if len(self._followed) > _REMEMBERED:
                self._followed = {k: each for k, each in self._followed.items() if each.ref() is not None}
            known = self._followed[id(thing)] = _Followed(thing, [] if self.begins else None, version)
            if len(data) > _WHOLE and version is None:
                self.partly = max(self.partly, len(data))
        return known.is_same(version, data)

    def has_written(self, thing: Any) -> None:
        known = self._owners.get(id(thing))
        if known is None or known() is not thing:
            if len(self._owners) > _REMEMBERED:
                self._owners = {k: each for k, each in self._owners.items() if each() is not None}
            self._owners[id(thing)] = weakref.ref(thing)

    def shows_whole(self, part: Any, owner: Any) -> bool:
        """Whether what a tensor or array is a part of is written with it: it is small, or was written before, as a
        variable holds it.
        """
        known = self._owners.get(id(owner))
        return (known is not None and known() is owner) or owner.nbytes <= max(_LARGE, 2 * part.nbytes)

    def same_list(self, items: list[Any]) -> bool:
        """Whether a long list is as at the first look. Each call compares ``_ROWS`` elements, in turn."""
        known = self._lists.get(id(items))
        if known is None or known[0] is not items:
            if len(self._lists) >= _LISTS:
                self._lists.pop(next(iter(self._lists)))
            known = self._lists[id(items)] = (items, {}, itertools.count())
        _, of_parts, turn = known
        part = next(turn) % max(-(-len(items) // _ROWS), 1)
        rows = items[part * _ROWS : (part + 1) * _ROWS]
        try:
            found = zlib.crc32(ValueWriter(lambda _: False).write(rows))
        except Exception:
            return False
        return bool(of_parts.setdefault(part, found) == found)

    def shown_by(self, thing: Any) -> tuple[Any, ...] | None:
        """What of the memory of what is attached a tensor shows, or an array that was made of one."""
        if self.restored(id(thing)):
            return None
        shown = thing if isinstance(thing, torch.Tensor) else thing.base
        return self.memory.shown_by(shown) if isinstance(shown, torch.Tensor) else None

    def random(self, thing: Any) -> Any:
        """The state of a generator. Python's is copied only if its memory has changed."""
        if not isinstance(thing, random.Random):
            return generator_state(thing)
        memory = python_memory(thing)
        known = self._random.get(id(thing))
        if known is None or known[0] != memory:
            if len(self._random) > 256:
                self._random.clear()
            known = self._random[id(thing)] = (memory, generator_state(thing))
        return known[1]

    def has_changed(self, thing: Any) -> bool:
        """Whether a result of a cache is another than when it was first seen."""
        try:
            found = zlib.crc32(ValueWriter(self.restored).write(thing, _LARGE))
        except Exception:  # too large, or what cannot be written
            return True
        known = self._results.get(id(thing))
        if known is None or known[0] is not thing:
            if len(self._results) > _REMEMBERED:
                self._results.clear()
            known = self._results[id(thing)] = (thing, found)
        return known[1] != found

    def digest(self, thing: Any) -> int | None:
        """A checksum of an object of a C type; None where it shows nothing. A slow one is not taken each time."""
        if self.inner and hasattr(type(thing), "__next__"):
            return zlib.crc32(name_of(type(thing)).encode())
        known = self._digests.get(id(thing))
        if known is not None and known[0]() is thing and not known[2].is_due:
            return known[1]
        begun, found = time.thread_time(), _digest(thing)
        took = time.thread_time() - begun
        self._digests.pop(id(thing), None)
        if took > _DEAR_S:  # and each time before
            cost = known[2] if known is not None and known[0]() is thing else LookCost()
            cost.looked(took)
            with suppress(TypeError):  # some types take no weak reference
                self._digests[id(thing)] = (weakref.ref(thing), found, cost)
        return found


class _Values(_Pickler):
    def __init__(self, file: io.BytesIO, writer: ValueWriter) -> None:
        super().__init__(file, None)
        self._writer, self._todo, self._count = writer, deque[tuple[int, str, Any, bool]](), 0
        self._of_data = writer.of_data

    def reducer_override(self, obj: Any) -> Any:
        cls = type(obj)
        kind = kind_of(cls)
        if kind == "plain":
            return super().reducer_override(obj)
        if cls is complex or kind in _BY_NAME and obj in _NAMES:
            return NotImplemented
        if cls is _Rows:
            return deque, (), None, self._rows()
        if issubclass(cls, Large):
            kind = "large" if cls is Large else "opaque"
        elif cls is Grown:
            kind, obj = "set", obj.value
        elif obj is Unbound:
            kind = "unbound"
        elif kind == "bound" and not is_bound(obj):
            kind = "named"
        elif kind == "named" and is_made_in_a_function(obj):
            kind = "class"
        elif kind == "named" and is_loaded_apart(obj):
            kind = "namespace"
        elif kind == "tensor" and (obj.is_quantized or obj.is_nested or obj.layout not in _LAYOUTS):
            kind = "opaque"
        elif kind == "iterator" and self._writer.inner:
            kind = "opaque"
        elif kind == "future" and not (obj.done() and not obj.cancelled() and obj.exception() is None):
            kind = "opaque"
        elif kind == "file" and (self._of_data or not is_read(obj)):
            kind = "ignored"
        elif kind == "queue":  # another thread may fill it at any time
            kind = "opaque" if _script_has_threads() else "object"
        elif kind in ("tensor", "ndarray") and self._writer.shown_by(obj) is not None:
            kind = "view"
        elif self._writer.restored(id(obj)) or (isinstance(obj, _DATA) and not self._writer.data):
            kind = "fixed"
        elif kind == "optimizer":
            kind = "object" if self._writer.optimizers else "fixed"
        elif kind == "fixed" and keeps_workers(obj):
            kind = "opaque"
        if kind in ("tensor", "ndarray"):
            self._writer.has_written(obj)
        self._count += 1
        self._todo.append((self._count, kind, obj, self._of_data or isinstance(obj, _DATA)))
        return _numbered, (self._count,)

    def _rows(self) -> Iterator[Any]:
        # The pickler asks for one more row before it has written one, and writing may find more objects: so a None
        # after each.
        while self._todo:
            number, kind, thing, self._of_data = self._todo.popleft()  # it is written before the next is asked for
            cls, parts = name_of(type(thing)), tuple[Any, ...]()
            try:
                if isinstance(thing, Unwritten):
                    cls, parts = name_of(type(thing.value)), (None,)
                else:
                    parts = _WAYS[kind](self._writer, thing)
            except Exception:  # of the script's own code, or of an odd type
                kind, parts = "opaque", (None,)
            if kind == "opaque" and parts[0] is None:
                if self._of_data:  # files, for instance: what reading changes in C is looked for where data are read
                    parts = (OF_DATA,)
                else:
                    self._writer.dark.add(cls)
            yield (number, kind, cls, *parts)
            yield None


def keeps_workers(loader: Any) -> bool:
    """Whether the script itself reads this loader, whose worker processes persist: they hold what nobody can put back,
    and a replacement, which starts them again, draws one number more.
    """
    cls = type(loader)
    if not issubclass(cls, torch.utils.data.DataLoader) or root_of(cls) in FRAMEWORKS:
        return False
    return loader.persistent_workers and vars(loader).get("_iterator") is not None


def _script_has_threads() -> bool:
    """Whether threads run that neither this product nor a framework has started, such as that of a progress bar."""
    main = threading.main_thread()
    others = [each for each in threading.enumerate() if each is not main and not each.name.startswith("swift-")]
    return any(root_of(type(each)) not in FRAMEWORKS - {"threading"} for each in others)


def attributes_of(thing: Any) -> Mapping[str, Any]:
    """All that an object keeps in its ``__dict__`` and ``__slots__``. Without slots this is the live ``__dict__``."""
    own: dict[str, Any] = getattr(thing, "__dict__", {})
    slots = slots_of(type(thing))
    if slots:
        own = dict(own)
        for each in slots:
            try:
                own[each.__name__] = each.__get__(thing)
            except AttributeError:
                continue
    return own


def added_to(writer: ValueWriter, thing: Any) -> dict[str, Any]:
    """Attributes that the script has given to an object of a library."""
    own = getattr(thing, "__dict__", {})
    names = own.keys() & writer.given
    if not names or isinstance(thing, (*_DATA, torch.Tensor)) or writer.parts.get(id(thing)):
        return {}
    theirs = OfItsClass(thing)
    return {name: own[name] for name in sorted(names) if name not in theirs and name not in writer.ignored}


def _added(generator: Any) -> Mapping[str, Any]:
    """Attributes of a script's class of generators."""
    return (
        {} if type(generator) in RANDOM or isinstance(generator, np.random.BitGenerator) else attributes_of(generator)
    )


def state_of(module: nn.Module) -> dict[str, Any]:
    return {k: v for k, v in vars(module).items() if k not in MODULE_PARTS or k in _STATE_OF_MODULES}


def held_by(thing: Any) -> Mapping[str, Any]:
    """Attributes of an object, and its class where no name of a module leads to that."""
    own = attributes_of(thing)
    return {**own, _CLASS: type(thing)} if is_made_in_a_function(type(thing)) else own


_CLASS = "__class__"


def _object(writer: ValueWriter, thing: Any) -> tuple[Any, ...]:
    found = held_by(thing)
    if any(type(each) is set for each in found.values()):
        found = dict(zip(found, in_order(list(found.values())), strict=True))
    return ({k: v for k, v in found.items() if k not in writer.ignored} if writer.ignored else found,)


def _items(table: dict[Any, Any]) -> list[tuple[Any, Any]]:
    if isinstance(table, OrderedDict):  # its order is not that of the dictionary underneath
        return [(key, dict.__getitem__(table, key)) for key in OrderedDict.__iter__(table)]
    return list(dict.items(table))


def _module(writer: ValueWriter, thing: Any) -> tuple[Any, ...]:
    return ({k: v for k, v in state_of(thing).items() if k not in writer.ignored}, hooks_of(thing))


def hooks_of(module: nn.Module) -> list[tuple[str, Any]]:
    """The functions that a module calls besides its own: names, and those of the script."""
    own = vars(module)
    found = [each for hooks in _HOOKS for each in own.get(hooks, {}).values()]
    return [(name_of(each), each if is_hook_of_script(each) else None) for each in found]


_HOOKS = tuple(name for name in sorted(MODULE_PARTS) if name.endswith("_hooks"))


def _tensor(writer: ValueWriter, thing: torch.Tensor) -> tuple[Any, ...]:
    return (*_values_of(writer, thing), own_of(writer, thing))


def own_of(writer: ValueWriter, thing: torch.Tensor) -> dict[str, Any]:
    """The gradient of a leaf, and attributes that the script has given a tensor."""
    own = {k: v for k, v in attributes_of_tensor(thing).items() if k not in writer.ignored}
    return {**own, "grad": thing.grad} if thing.is_leaf and thing.requires_grad and thing.grad is not None else own


def _values_of(writer: ValueWriter, thing: torch.Tensor) -> tuple[Any, ...]:
    head = (str(thing.dtype).removeprefix("torch."), tuple(thing.shape), str(thing.device))
    if thing.is_meta:
        return ("apart", *head, b"", 0)
    gradient = 0 if not thing.requires_grad else 1 if thing.is_leaf else 2
    if thing.layout in _COMPRESSED:
        return _sparse(writer, thing, head, gradient)
    if not thing.is_cpu:
        return _on_device(writer, thing, head, gradient)
    if gradient == 0 and (base := owner_of(thing)) is not None and writer.shows_whole(thing, base):
        return ("part", *head, (base, thing.storage_offset(), thing.stride()), gradient)
    dense = thing.detach()
    if not dense.is_contiguous() or dense.is_conj() or dense.is_neg():
        dense = dense.contiguous().resolve_conj().resolve_neg()
    size = dense.nbytes
    data = memory_of(dense)[:size] if size else memoryview(b"")
    if size > _LARGE:
        version = 0 if thing.is_inference() else thing._version
        if writer.unchanged(thing, (version, thing.data_ptr()), data):
            return ("same", *head, b"", gradient)
        return ("value", *head, pickle.PickleBuffer(data), gradient)
    return ("value", *head, data.tobytes(), gradient)


def owner_of(thing: Any) -> Any:
    """The tensor or array of which this one is a part; None if it has its own memory, or may not be written to."""
    if isinstance(thing, torch.Tensor):
        base: Any = thing._base if thing._is_view() else None
        plain = base is not None and type(base) in (torch.Tensor, nn.Buffer) and base.layout is torch.strided
        return base if plain and not base.requires_grad else None
    base = thing.base
    return base if type(base) is np.ndarray and base.flags.c_contiguous and base.flags.writeable else None


#: Layouts of sparse tensors, and what holds their indices.
_COMPRESSED: dict[torch.layout, tuple[Callable[[torch.Tensor], torch.Tensor], ...]] = {
    torch.sparse_coo: (torch.Tensor._indices,),
    torch.sparse_csr: (torch.Tensor.crow_indices, torch.Tensor.col_indices),
    torch.sparse_csc: (torch.Tensor.ccol_indices, torch.Tensor.row_indices),
}
_LAYOUTS = frozenset({torch.strided, *_COMPRESSED})


def _sparse(writer: ValueWriter, thing: torch.Tensor, head: tuple[Any, ...], gradient: int) -> tuple[Any, ...]:
    plain = thing.detach()
    is_coo = plain.layout is torch.sparse_coo
    parts = [read(plain) for read in _COMPRESSED[plain.layout]]
    values = plain._values() if is_coo else plain.values()
    if values.nbytes > _LARGE and values.is_contiguous() and values.is_cpu:
        version = (thing._version, values.data_ptr(), *(each.data_ptr() for each in parts))
        if writer.unchanged(thing, version, memory_of(values)[: values.nbytes]):
            return ("same", *head, b"", gradient)
    name = str(plain.layout).removeprefix("torch.")
    return ("sparse", *head, (name, is_coo and plain.is_coalesced(), [*parts, values]), gradient)


def _on_device(writer: ValueWriter, thing: torch.Tensor, head: tuple[Any, ...], gradient: int) -> tuple[Any, ...]:
    # Summed on its device, as the host cannot look at its memory.
    if thing.nbytes > _LARGE and writer.unchanged(thing, thing.data_ptr(), memoryview(checksum(thing).to_bytes(8))):
        return ("same", *head, b"", gradient)
    dense = to_host(thing.resolve_conj().resolve_neg()).contiguous()
    return ("value", *head, memory_of(dense)[: dense.nbytes].tobytes() if dense.nbytes else b"", gradient)


def iterator_state(thing: Any) -> tuple[Any, int]:
    """What an iterator reads (None once it has ended), and how many elements are left."""
    parts = thing.__reduce__()
    ended = type(parts[1][0]) in (list, tuple) and len(parts) == 2
    return None if ended else parts[1][0], length_hint(thing)


def _ndarray(writer: ValueWriter, thing: Any) -> tuple[Any, ...]:
    if thing.dtype == object:
        return ("objects", "O", thing.shape, thing.ravel().tolist())
    head = (_kind_of_array(thing.dtype), thing.shape)
    base = owner_of(thing)
    if base is not None and base.dtype.kind not in _WITHOUT_BUFFER and writer.shows_whole(thing, base):
        return ("part", *head, (base, thing.ctypes.data - base.ctypes.data, thing.strides))
    if thing.nbytes > _LARGE:
        dense: Any = np.ascontiguousarray(thing).reshape(-1).view(np.uint8)
        if not thing.flags.writeable or writer.unchanged(thing, None, memoryview(dense)):
            return ("same", *head, b"")
    return ("value", *head, thing.tobytes())


#: Kinds of arrays whose memory another array cannot show.
_WITHOUT_BUFFER = "OmM"


def _kind_of_array(dtype: np.dtype[Any]) -> Any:
    """What makes this dtype again. Raises _DarkError where nothing plain does."""
    if dtype.names is None:
        return array_kind(dtype.str).str
    if dtype.hasobject or np.dtype(dtype.descr) != dtype:
        raise _DarkError
    return dtype.descr


def is_read(file: Any) -> bool:
    """Whether it is open for reading only, and can be put at another place."""
    return not file.closed and file.readable() and file.seekable() and not file.writable()


def name_of_file(file: Any) -> str:
    return repr(getattr(file, "name", None))


def _function(_: ValueWriter, thing: Any) -> tuple[Any, ...]:
    cells: list[Any] = []
    own: Any = None
    of_script = not of_libraries(thing.__code__.co_filename)
    if of_script or thing.__code__ in _DISPATCHES:
        for each in thing.__closure__ or ():
            try:
                cells.append(each.cell_contents)
            except ValueError:
                cells.append(Unbound)
    if of_script:
        own = (thing.__dict__, thing.__defaults__, thing.__kwdefaults__)
    else:  # what it has looked up in its table is looked up again
        cells = [weakref.WeakKeyDictionary() if type(each) is weakref.WeakKeyDictionary else each for each in cells]
    return (name_of(thing), cells, own, mark_of(thing))


_dispatching: Any = functools.singledispatch(callable)
#: Code of what ``singledispatch`` makes: its closures hold the table of functions by type.
_DISPATCHES = frozenset({_dispatching.__code__, _dispatching.dispatch.__code__})

#: By id; the code is kept, so that its id is not reused.
_MARKS: dict[int, tuple[types.CodeType, int]] = {}


def mark_of(function: types.FunctionType) -> int:
    """By which functions of one name are told apart, such as two that ``lambda`` makes, or one that is defined again; 0
    where the name is enough.
    """
    named = "<" not in function.__qualname__ and of_libraries(function.__code__.co_filename)
    return 0 if named else mark_of_code(function.__code__)


def mark_of_code(code: types.CodeType) -> int:
    """A checksum of what code does, whatever the lines where it stands."""
    known = _MARKS.get(id(code))
    if known is None:
        held = [
            mark_of_code(each)
            if isinstance(each, types.CodeType)
            else sorted(map(repr, each))  # in the same order in each process
            if isinstance(each, frozenset)
            else repr(each)
            for each in code.co_consts
        ]
        names = code.co_names, code.co_varnames, code.co_freevars
        known = _MARKS[id(code)] = code, zlib.crc32(repr((code.co_code, names, held)).encode())
    return known[1]


def namespace_of(module: types.ModuleType) -> dict[str, Any]:
    """The variables of a module, without code."""
    return {k: v for k, v in vars(module).items() if not (is_dunder(k) or isinstance(v, _CODE))}


_CODE = (types.FunctionType, types.BuiltinFunctionType, types.ModuleType, type)


def tensors_of(scripted: nn.Module) -> dict[str, torch.Tensor]:
    return dict((*scripted.named_parameters(), *scripted.named_buffers()))


def results_of(cache: Any) -> list[Any]:
    """What a cache of :mod:`functools` has stored and the script may change in place; nothing of a very large one."""
    code = getattr(getattr(cache, "__wrapped__", None), "__code__", None)
    if code is None or of_libraries(code.co_filename) or cache.cache_info().currsize > _RESULTS:
        return []
    held = gc.get_referents(cache)
    ends = [i for i, each in enumerate(held) if isinstance(each, type) and each.__name__ == "_lru_list_elem"]
    if len(ends) > 1:  # its size is limited: after each result
        found = [held[i - 1] for i in ends]
    else:
        found = list(next((each for each in held if type(each) is dict and each is not cache.__dict__), {}).values())
    return [each for each in found if kind_of(type(each)) in _CHANGEABLE]


_RESULTS = 1024
_CHANGEABLE = frozenset("object dict list deque set".split())


def _cache(writer: ValueWriter, thing: Any) -> tuple[Any, ...]:
    found = results_of(thing)
    return (found, [writer.has_changed(each) for each in found])


def _memory(_: ValueWriter, thing: Any) -> tuple[Any, ...]:
    return (bytes(memoryview(numbers_of_c(thing)).cast("B")),)


def _buffer(_: ValueWriter, thing: Any) -> tuple[Any, ...]:
    return (None,) if thing.closed else (thing.__getstate__()[:-1],)


#: C modules whose objects compute a checksum.
_CHECKSUMS = frozenset("_hashlib _blake2 _md5 _sha1 _sha2 _sha256 _sha512 _sha3".split())


class _DarkError(Exception):
    """An object does not show what it holds."""


def _opaque(writer: ValueWriter, thing: Any) -> tuple[Any, ...]:
    return (writer.digest(thing),)


def _digest(thing: Any) -> int | None:
    cls = type(thing)
    if isinstance(thing, np.memmap) and not thing.flags.writeable:  # pickling would read the whole file
        return zlib.crc32(repr((thing.dtype, thing.shape)).encode())
    try:
        if hasattr(cls, "__next__"):
            return zlib.crc32(repr(_progress(thing)).encode())
        if cls is ExitStack:  # what it is going to call
            return zlib.crc32(repr([name_of(each) for _, each in thing._exit_callbacks]).encode())
        if issubclass(cls, torch.Tensor):
            parts = [each.detach().contiguous() for each in _parts_of(thing)]
            told = [(each.dtype, each.shape, zlib.crc32(memory_of(each)[: each.nbytes])) for each in parts]
            return zlib.crc32(repr((not thing.is_nested and thing.shape, told)).encode())
        if cls is re.Match:
            return zlib.crc32(repr((thing.re.pattern, thing.string, thing.regs)).encode())
        if cls.__module__ in _CHECKSUMS:
            return zlib.crc32(thing.hexdigest().encode())
        if isinstance(thing, sqlite3.Connection):
            return thing.total_changes if thing.total_changes and _is_in_memory(thing) else 0
        return zlib.crc32(pickle.dumps(thing, 5))
    except Exception:
        return None


def _is_in_memory(database: sqlite3.Connection) -> bool:
    """Whether it is in no file. False where another thread uses it."""
    with suppress(sqlite3.Error):
        cursor = database.cursor(sqlite3.Cursor)
        cursor.row_factory = None
        return not any(file for *_, file in cursor.execute("PRAGMA database_list"))
    return False


def _parts_of(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """What a tensor of a rare layout is made of. Raises _DarkError where nobody knows."""
    if tensor.is_nested:
        return tensor.unbind()
    if tensor.is_quantized:
        return tensor.int_repr(), tensor.dequantize()
    if tensor.layout is torch.sparse_bsr:
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout is torch.sparse_bsc:
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    raise _DarkError


def _progress(thing: Any, depth: int = 0) -> Any:
    """How far an iterator is; what it reads from is compared by itself. Raises _DarkError if it does not show that."""
    cls = type(thing)
    if isinstance(thing, _SIMPLE):
        return thing
    if isinstance(thing, types.GeneratorType):
        frame = thing.gi_frame
        if frame is None or frame.f_code.co_filename.startswith(OURS):
            return frame is None
        held = {k: v if isinstance(v, _SIMPLE) else _shown(v) for k, v in frame.f_locals.items()}
        return frame.f_code.co_qualname, frame.f_lasti, held
    if hasattr(thing, "_num_yielded"):  # of a DataLoader
        return thing._num_yielded
    if cls is not tuple and (not hasattr(cls, "__next__") or root_of(cls) in _OURS):
        return cls.__qualname__
    if depth >= _DEEPEST:
        raise _DarkError
    if cls is not tuple and cls.__module__ not in ("builtins", "itertools"):
        if kind_of(cls) != "object":
            raise _DarkError
        return cls.__qualname__, _shown(thing)
    if cls.__name__.startswith(("dict_", "set_")):
        return cls.__name__, length_hint(thing)
    if cls is _CALLS and any(map(_is_of_c, thing.__reduce__()[1][:1])):  # as that of re.finditer()
        raise _DarkError
    with warnings.catch_warnings(action="ignore"):  # pickling iterators is deprecated; only their places are read here
        parts = thing if cls is tuple else thing.__reduce__()[1:]
    return cls.__name__, [_progress(each, depth + 1) for each in parts]


#: Iterators that call a function.
_CALLS = type(iter(int, 1))


def _is_of_c(function: Any) -> bool:
    held = getattr(function, "__self__", None)
    return held is not None and is_bound(function) and kind_of(type(held)) == "opaque"


def _shown(value: Any) -> int | str:
    """A checksum of what an iterator holds; for much data only its type, as its own variable is compared."""
    try:
        return zlib.crc32(ValueWriter(lambda _: False, inner=True).write(value, _LARGE))
    except Exception:
        return type(value).__qualname__


def _large(writer: ValueWriter, thing: Large) -> tuple[Any, ...]:
    """Type, number of parts, and a checksum of what is compared, which is None if that is known to have changed."""
    value = thing.value
    summary = _summary(writer, value, 0)
    size = len(value) if hasattr(type(value), "__len__") and isinstance(value, _SIZED) else len(attributes_of(value))
    return (name_of(type(value)), size, None if summary is None else zlib.crc32(repr(summary).encode()))


_SIZED = (list, tuple, deque, dict, set, frozenset, torch.Tensor, np.ndarray)


def _summary(writer: ValueWriter, value: Any, depth: int) -> Any:
    """A checksum of small values; of large containers the length and both ends; None for what has changed."""
    try:
        return zlib.crc32(ValueWriter(lambda _: False).write(value, _LARGE))
    except Exception:  # too large
        pass
    kind = kind_of(type(value))
    if kind in ("memory", "buffer"):
        return zlib.crc32(pickle.dumps(_WAYS[kind](writer, value)))
    if isinstance(value, (torch.Tensor, np.ndarray)) or depth >= _DEEPEST:
        return None  # it has changed, or it would not be here
    if type(value) is list and not writer.same_list(value):
        return None
    if isinstance(value, (list, tuple, deque)):
        ends = [*islice(value, 8), *islice(reversed(value), 8)]
        found = [_summary(writer, each, depth + 1) for each in ends]
    elif isinstance(value, dict):
        found = [_summary(writer, each, depth + 1) for each in (*islice(dict.items(value), 8), *_last(value))]
    elif isinstance(value, (set, frozenset)):
        found = []
    else:
        found = [_summary(writer, each, depth + 1) for each in attributes_of(value).items()]
        return None if None in found else found
    return None if None in found else [len(value), found]


def _last(table: dict[Any, Any]) -> list[Any]:
    return list(islice(reversed(dict.items(table)), 8))


_WAYS: dict[str, Callable[[ValueWriter, Any], tuple[Any, ...]]] = {
    "object": _object,
    "class": lambda _, thing: (name_of(thing), attributes_of_class(thing)),
    "namespace": lambda _, thing: (namespace_of(thing),),
    "scripted": lambda _, thing: (tensors_of(thing),),
    "context": lambda _, thing: (thing.name, thing.get(Unbound)),
    "cache": _cache,
    "logger": lambda _, thing: (thing.name, thing.level, thing.disabled, thing.propagate),
    "module": _module,
    "tensor": _tensor,
    "ndarray": _ndarray,
    "random": lambda writer, thing: (writer.random(thing), _added(thing)),
    "value": lambda _, thing: (VALUES[next(base for base in type(thing).__mro__ if base in VALUES)][0](thing),),
    "enum": lambda _, thing: (thing.name, thing.value if isinstance(thing, Flag) else None),
    "future": lambda _, thing: (thing.result(),),
    "reference": lambda _, thing: (thing(),),
    "weak": lambda _, thing: (list(thing if isinstance(thing, weakref.WeakSet) else thing.items()),),
    "iterator": lambda _, thing: iterator_state(thing),
    "pyarray": lambda _, thing: (thing.typecode, thing.tobytes()),
    "memory": _memory,
    "buffer": _buffer,
    "file": lambda _, thing: (name_of_file(thing), thing.tell()),
    "shows": lambda _, thing: (thing.obj, thing.nbytes, thing.format),
    "dict": lambda _, thing: (_items(thing), attributes_of(thing)),
    "list": lambda _, thing: (list.__getitem__(thing, slice(None)), attributes_of(thing)),
    "deque": lambda _, thing: (list(thing), thing.maxlen, attributes_of(thing)),
    "set": lambda _, thing: (list(thing), attributes_of(thing)),
    "frozenset": lambda _, thing: (list(thing),),
    "tuple": lambda _, thing: (list(thing),),
    "atom": lambda _, thing: (next(base for base in type(thing).__mro__ if base.__module__ == "builtins")(thing),),
    "function": _function,
    "method": lambda _, thing: (name_of(thing.__func__), thing.__self__),
    "named": lambda _, thing: (name_of(thing),),
    "bound": lambda _, thing: (thing.__name__, thing.__self__),
    "partial": lambda _, thing: (thing.func, thing.args, thing.keywords, thing.__dict__),
    "view": lambda writer, thing: writer.shown_by(thing) or (),
    "fixed": lambda writer, thing: (
        writer.aliases.get(id(thing)),
        writer.parts.get(id(thing)),
        added_to(writer, thing),
    ),
    "ignored": lambda _, thing: (),
    "unbound": lambda _, thing: (),
    "opaque": _opaque,
    "large": _large,
}

"""Reads what :mod:`shared_core.encoding.plain` writes, and nothing else.

The bytes are those of a pickle, because the standard library writes them quickly. They are not given to its reader,
which calls what they name. This reader knows the few opcodes that plain data needs; a name stands for one of the kinds
of values in :data:`_MAKERS`, which are made from checked parts. What it makes takes memory in proportion to the bytes.
"""

from __future__ import annotations

import collections
import datetime
import math
import pathlib
import re
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch

from shared_core.errors import CorruptFile

DEEPEST = 1000
#: A shared container counts as often as it is found: values allowed for each byte, and in addition.
_REPEATS, _SOME = 16, 1 << 20
#: Most values, and deepest nesting, of a key of a dictionary or an element of a set.
_KEY_SIZE, _KEY_DEPTH = 4096, 50
_ARRAY_KIND = re.compile(r"[<>|=]([biufcSU]\d+|[mM]8(\[\d*\w+\])?)")


@dataclass(frozen=True)
class Numbered:
    """Stands for an object of a script, which is described elsewhere under this number."""

    number: int


#: The module of the writer, whose functions the bytes name.
WRITER = "shared_core.encoding.plain"
_BUILTINS: tuple[type, ...] = (set, frozenset, complex, list, dict, int, float)
_OTHERS: tuple[type, ...] = (
    collections.OrderedDict,
    collections.defaultdict,
    collections.deque,
    collections.Counter,
    datetime.timedelta,
    datetime.datetime,
    pathlib.PosixPath,
    torch.Size,
)
#: Types that may be values themselves: what a defaultdict makes.
_FACTORIES = frozenset((*_BUILTINS, *_OTHERS))
_CONTAINERS = frozenset(
    {list, tuple, dict, set, frozenset}
    | {collections.OrderedDict, collections.defaultdict, collections.deque, collections.Counter}
)
_MAPPINGS = (dict,)  # and its subclasses, of which only those above can be made
_LEAVES = frozenset(
    {type(None), bool, int, float, complex, str, bytes, bytearray, torch.dtype, torch.Size, torch.Tensor, np.ndarray}
    | {datetime.timedelta, datetime.datetime, pathlib.PosixPath, Numbered}
)
_PLAIN = _CONTAINERS | _LEAVES
_HASHABLE = _LEAVES - {bytearray, torch.Tensor, np.ndarray}


class _Budget:
    """How much more may be made of bytes that stand only once in what is read.

    Attributes:
        left: bytes of tensors and arrays, which are copied.
        names: characters of paths. Python keeps each part of a path once, so a list of files in a folder has more.
    """

    def __init__(self, size: int) -> None:
        self.left = size
        self.names = _REPEATS * size + _SOME

    def spend(self, size: int) -> None:
        self.left -= size
        self._check()

    def spend_names(self, parts: Iterable[str]) -> None:
        self.names -= sum(map(len, parts))
        self._check()

    def _check(self) -> None:
        if self.left < 0 or self.names < 0:
            raise CorruptFile("damaged publication: it would grow when it is read")


def _data(value: Any, size: int, budget: _Budget) -> bytearray:
    if not isinstance(value, bytes | bytearray | memoryview) or len(value) != size:
        raise CorruptFile(f"damaged publication: a tensor or array is not of the {size} bytes that its shape says")
    budget.spend(size)
    return bytearray(value)


def _shape(value: Any) -> tuple[int, ...]:
    if type(value) is not tuple or not all(type(each) is int and each >= 0 for each in value):
        raise CorruptFile("damaged publication: the shape of a tensor or array is not one")
    return value


def dtype_named(name: Any) -> torch.dtype:
    """The dtype of that name, without ``torch.``. Raises CorruptFile for another name."""
    found = getattr(torch, name, None) if type(name) is str else None
    if not isinstance(found, torch.dtype):  # getattr reaches all that torch has
        raise CorruptFile(f"refused to read torch.{name}: it is not a dtype")
    return found


def _tensor(budget: _Budget, data: Any, dtype: Any, shape: Any) -> torch.Tensor:
    kind, shape = dtype_named(dtype), _shape(shape)
    raw = _data(data, math.prod(shape) * kind.itemsize, budget)
    if not raw:
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(raw, dtype=torch.uint8).view(kind).view(shape)


def _sparse(_budget: _Budget, indices: Any, values: Any, shape: Any, coalesced: Any) -> torch.Tensor:
    _only(type(indices) is torch.Tensor and type(values) is torch.Tensor and type(coalesced) is bool)
    return torch.sparse_coo_tensor(indices, values, _shape(shape), is_coalesced=coalesced, check_invariants=True)


def array_kind(name: Any) -> np.dtype[Any]:
    """The dtype of an array by numpy's name, with its byte order. Raises CorruptFile for another name."""
    if type(name) is not str or not _ARRAY_KIND.fullmatch(name):
        raise CorruptFile(f"not plain: an array of {str(name)[:40]!r}")
    return np.dtype(name)


def _array(budget: _Budget, data: Any, dtype: Any, shape: Any) -> Any:
    kind, shape = array_kind(dtype), _shape(shape)
    count = math.prod(shape)
    raw = _data(data, count * kind.itemsize, budget)
    budget.spend(0 if kind.itemsize else count)
    return np.frombuffer(raw, dtype=kind).reshape(shape) if raw else np.empty(shape, kind)


def _scalar(budget: _Budget, data: Any, dtype: Any) -> Any:
    kind = array_kind(dtype)
    raw = _data(data, kind.itemsize, budget)
    return np.frombuffer(raw, dtype=kind)[0] if raw else np.zeros((), kind)[()]


def _default(_budget: _Budget, factory: Any = None) -> Any:
    if factory is not None and not _is_factory(factory):
        raise CorruptFile("refused to read a defaultdict of something else than a plain type")
    return collections.defaultdict(factory)


def _is_factory(value: Any) -> bool:
    return isinstance(value, type) and value in _FACTORIES


def _deque(_budget: _Budget, start: Any = (), length: Any = None) -> Any:
    _only(start == () and type(start) is tuple and (length is None or type(length) is int))
    return collections.deque((), length)


def _counter(budget: _Budget, counts: Any = None) -> Any:
    _only(counts is None or type(counts) is dict)
    budget.spend(len(counts or ()))
    return collections.Counter(counts)


def _timedelta(_budget: _Budget, *parts: Any) -> Any:
    _only(len(parts) == 3 and all(type(each) is int for each in parts))
    return datetime.timedelta(*parts)


def _datetime(_budget: _Budget, state: Any) -> Any:
    _only(type(state) is bytes and len(state) == 10)
    made = cast("Callable[[bytes], datetime.datetime]", datetime.datetime)  # as it is pickled
    return made(state).replace()  # the copy checks each part


def _path(budget: _Budget, *parts: Any) -> Any:
    _only(all(type(each) is str for each in parts))
    budget.spend_names(parts)
    return pathlib.PosixPath(*parts)


def _size(budget: _Budget, parts: Any = ()) -> Any:
    budget.spend(len(_shape(parts)))
    return torch.Size(parts)


def _numbered(_budget: _Budget, number: Any) -> Any:
    _only(type(number) is int and number >= 0)
    return Numbered(number)


def _complex(_budget: _Budget, real: Any, imaginary: Any) -> Any:
    _only(type(real) is float and type(imaginary) is float)
    return complex(real, imaginary)


def _only(plain: bool) -> None:
    if not plain:
        raise CorruptFile("damaged publication: a value is made of parts that it cannot have")


#: What a value is made by, if its type or the writer's function for it is named.
_MAKERS: dict[Any, Callable[..., Any]] = {
    (WRITER, "_tensor"): _tensor,
    (WRITER, "_sparse"): _sparse,
    (WRITER, "_array"): _array,
    (WRITER, "_scalar"): _scalar,
    (WRITER, "_numbered"): _numbered,
    (WRITER, "_dtype"): lambda _budget, name: dtype_named(name),
    collections.OrderedDict: lambda _budget: collections.OrderedDict(),
    collections.defaultdict: _default,
    collections.deque: _deque,
    collections.Counter: _counter,
    datetime.timedelta: _timedelta,
    datetime.datetime: _datetime,
    pathlib.PosixPath: _path,
    torch.Size: _size,
    complex: _complex,
}


class _Made(tuple[str, str]):
    """Stands for a function of the writer; never a value."""

    __slots__ = ()


_NAMES: dict[tuple[str, str], Any] = {key: _Made(key) for key in _MAKERS if isinstance(key, tuple)}
_NAMES |= {("builtins", kind.__name__): kind for kind in _BUILTINS}
_NAMES |= {(kind.__module__, kind.__name__): kind for kind in _OTHERS}
_MAKE = {(_Made(key) if isinstance(key, tuple) else key): maker for key, maker in _MAKERS.items()}


class _Reader:
    """One reading: the values that wait to be put into others, and those that may be named again."""

    def __init__(self, data: memoryview, apart: Sequence[memoryview], size: int) -> None:
        self.data = data
        self.at = 0
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: list[Any] = []
        self.apart = iter(apart)
        self.budget = _Budget(size)

    def read(self) -> Any:
        data, marks = self.data, _MARKS
        while (mark := data[self.at]) != _STOP:
            self.at += 1
            try:
                step = marks[mark]
            except KeyError:
                raise CorruptFile(
                    f"refused to read {bytes([mark])!r}: only plain data and tensors are stored"
                ) from None
            step(self)
        _only(self.at + 1 == len(data) and len(self.stack) == 1 and not self.marks)
        return self.stack[0]

    def take(self, size: int) -> memoryview:
        begin = self.at
        self.at = begin + size
        if self.at > len(self.data):
            raise CorruptFile("damaged publication: it ends too early")
        return self.data[begin : self.at]

    def number(self, size: int) -> int:
        """An unsigned number of ``size`` bytes, little-endian."""
        return int.from_bytes(self.take(size), "little")

    def since_mark(self) -> list[Any]:
        begin = self.marks.pop()
        items = self.stack[begin:]
        del self.stack[begin:]
        return items

    # -- one mark each -----------------------------------------------------------------------------

    def protocol(self) -> None:
        _only(self.number(1) == 5)

    def frame(self) -> None:
        _only(self.number(8) <= len(self.data) - self.at)

    def memoize(self) -> None:
        self.memo.append(self.stack[-1])

    def real(self) -> None:
        self.stack.append(struct.unpack(">d", self.take(8))[0])

    def global_name(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        _only(type(name) is str and type(module) is str)
        try:
            self.stack.append(_NAMES[module, name])
        except KeyError:
            raise CorruptFile(
                f"refused to read {module[:80]}.{name[:80]}: only plain data and tensors are stored"
            ) from None

    def make(self) -> None:
        parts, kind = self.stack.pop(), self.stack.pop()
        _only(type(parts) is tuple and (isinstance(kind, _Made) or _is_factory(kind)))
        if kind not in _MAKE:
            raise CorruptFile(f"refused to read a call of {kind.__name__}: only plain data and tensors are stored")
        self.stack.append(_MAKE[kind](self.budget, *parts))

    def join(self, count: int) -> None:
        _only(len(self.stack) >= count)
        self.stack[-count:] = [tuple(self.stack[-count:])]

    def extend(self, items: Iterable[Any]) -> None:
        target = self.stack[-1]
        _only(type(target) is list or type(target) is collections.deque)
        target.extend(items)

    def update(self, items: list[Any]) -> None:
        target = self.stack[-1]
        _only(isinstance(target, _MAPPINGS) and len(items) % 2 == 0)
        keys = items[::2]
        _check_keys(keys)
        target.update(zip(keys, items[1::2], strict=True))

    def append_one(self) -> None:
        self.extend((self.stack.pop(),))

    def set_one(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self.update([key, value])

    def add(self) -> None:
        items = self.since_mark()
        _check_keys(items)
        target = self.stack[-1]
        _only(type(target) is set)
        target.update(items)

    def frozen(self) -> None:
        items = self.since_mark()
        _check_keys(items)
        self.stack.append(frozenset(items))


def _push(value: Callable[[_Reader], Any]) -> Callable[[_Reader], None]:
    return lambda reader: reader.stack.append(value(reader))


def _text(size: int) -> Callable[[_Reader], None]:
    return _push(lambda reader: str(reader.take(reader.number(size)), "utf-8", "surrogatepass"))


def _bytes(size: int) -> Callable[[_Reader], None]:
    return _push(lambda reader: bytes(reader.take(reader.number(size))))


def _long(size: int) -> Callable[[_Reader], None]:
    return _push(lambda reader: int.from_bytes(reader.take(reader.number(size)), "little", signed=True))


def _again(size: int) -> Callable[[_Reader], None]:
    return _push(lambda reader: reader.memo[reader.number(size)])


_STOP = ord(".")
#: All that is understood. There is no mark that sets attributes, makes objects of classes, or looks names up.
_MARKS: dict[int, Callable[[_Reader], None]] = {
    0x80: _Reader.protocol,
    0x95: _Reader.frame,
    0x94: _Reader.memoize,
    ord("h"): _again(1),
    ord("j"): _again(4),
    ord("N"): _push(lambda _: None),
    0x88: _push(lambda _: True),
    0x89: _push(lambda _: False),
    ord("K"): _push(lambda reader: reader.number(1)),
    ord("M"): _push(lambda reader: reader.number(2)),
    ord("J"): _push(lambda reader: int.from_bytes(reader.take(4), "little", signed=True)),
    0x8A: _long(1),
    0x8B: _long(4),
    ord("G"): _Reader.real,
    0x8C: _text(1),
    ord("X"): _text(4),
    0x8D: _text(8),
    ord("C"): _bytes(1),
    ord("B"): _bytes(4),
    0x8E: _bytes(8),
    0x96: _push(lambda reader: bytearray(reader.take(reader.number(8)))),
    0x97: _push(lambda reader: next(reader.apart)),
    0x98: lambda _: None,  # the piece apart is read-only: it is copied anyway
    ord("("): lambda reader: reader.marks.append(len(reader.stack)),
    ord("]"): _push(lambda _: []),
    ord("a"): _Reader.append_one,
    ord("e"): lambda reader: reader.extend(reader.since_mark()),
    ord(")"): _push(lambda _: ()),
    0x85: lambda reader: reader.join(1),
    0x86: lambda reader: reader.join(2),
    0x87: lambda reader: reader.join(3),
    ord("t"): lambda reader: reader.stack.append(tuple(reader.since_mark())),
    ord("}"): _push(lambda _: {}),
    ord("s"): _Reader.set_one,
    ord("u"): lambda reader: reader.update(reader.since_mark()),
    0x8F: _push(lambda _: set()),
    0x90: _Reader.add,
    0x91: _Reader.frozen,
    0x93: _Reader.global_name,
    ord("R"): _Reader.make,
}


def unpack(main: memoryview, apart: Sequence[memoryview], size: int, *, cyclic: bool = False) -> Any:
    """The value in ``main``, with its large tensors ``apart``; ``size`` bytes in all. Raises for all but plain data."""
    value = _Reader(main, apart, size).read()
    _check(value, _REPEATS * size + _SOME, cyclic)
    return value


def _check_keys(keys: Iterable[Any]) -> None:
    """Hashing must end: a tuple that holds another one twice, which holds another one twice, takes for ever."""
    for key in keys:
        if type(key) not in _HASHABLE and not isinstance(key, np.generic):
            _check_key(key, 0, _Budget(_KEY_SIZE))


def _check_key(key: Any, depth: int, budget: _Budget) -> None:
    if type(key) in _HASHABLE or isinstance(key, np.generic) or _is_factory(key):
        return
    _only(type(key) in (tuple, frozenset) and depth < _KEY_DEPTH)
    budget.spend(len(key))
    for each in key:
        _check_key(each, depth + 1, budget)


def _check(value: Any, most: int, cyclic: bool) -> None:
    """All of it is plain data, not too deep, has an end (but if ``cyclic``), and is not much more than was read.

    Goes through containers inside out; each is looked at once and counts as often as it is found.
    """
    sizes: dict[int, int] = {}
    todo: list[tuple[Any, list[Any] | None]] = [((value,), None)]
    depth = 0
    while todo:
        container, inner = todo.pop()
        if inner is not None:  # all in it has been seen
            depth -= 1
            sizes[id(container)] = size = 1 + len(container) + sum(sizes[id(each)] for each in inner)
            _only(size <= most)
        elif id(container) not in sizes:
            sizes[id(container)] = 0
            depth += 1
            _only(depth <= DEEPEST)
            inner = _inner(container)
            todo.append((container, inner))
            todo.extend((each, None) for each in inner)
        elif not sizes[id(container)] and not cyclic:
            raise CorruptFile("damaged publication: a value contains itself")


def _inner(container: Any) -> list[Any]:
    """The containers in a container, whose other values must be plain data."""
    parts = container
    if isinstance(container, _MAPPINGS):
        parts = [*container, *container.values()]
    kinds = set(map(type, parts))
    for kind in kinds - _PLAIN:
        if kind is type:
            _only(all(_is_factory(each) for each in parts if type(each) is type))
        elif not issubclass(kind, np.generic):
            raise CorruptFile(f"refused to read {kind.__name__}: only plain data and tensors are stored")
    if kinds.isdisjoint(_CONTAINERS):
        return []
    return [each for each in cast("Iterable[Any]", parts) if type(each) in _CONTAINERS]

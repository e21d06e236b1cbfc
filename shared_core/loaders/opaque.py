"""Notices when reading items changes something that cannot be put back: a cache, a buffer, an opened file."""

from __future__ import annotations

import array
import dis
import functools
import types
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from shared_core.loaders.owned import BACK_REFERENCES, SCALARS, OwnedState
from shared_core.loaders.randomness import generator_state

_MAX_POINTS, _MAX_DEPTH, _SMALL, _SMALL_BYTES = 128, 5, 32, 4096
#: Compared by value; all else by identity.
_VALUES = SCALARS | {bytes, complex}
#: Modules whose functions and classes keep no state of the items that a script reads.
_LIBRARIES = frozenset(
    "builtins collections functools itertools math numpy os pathlib pickle random torch torchvision typing".split()
)
_CONTAINERS = (list, tuple, dict, set, deque)
_CODE = (type, types.ModuleType, types.BuiltinFunctionType)


class OpaqueWatch:
    """Looks at what a data set and its ``collate_fn`` hold, before and after a batch is read.

    It follows attributes, containers, bound objects, closures, and the global variables that functions name; a bounded
    number. Large containers and arrays are compared in their length, their ends and the entries that the batch's
    indices name.

    Args:
        roots: by name, what to look at.
        owned: is put back exactly; changes of that do not count.
        alone: nothing but the reading of batches changes them in this process.
    """

    def __init__(self, roots: Mapping[str, object], owned: OwnedState, alone: bool = False) -> None:
        self._roots, self._owned, self._alone = roots, owned, alone
        self._indices: list[Any] = []
        self._points: list[tuple[str, Any]] = []
        self._before: list[list[Any]] = []
        self._walk()

    def look(self, indices: Any) -> None:
        """A batch with these indices is about to be read; None where there are no indices."""
        several = isinstance(indices, Sequence) and not isinstance(indices, (str, bytes))
        self._indices = list(indices)[:_MAX_POINTS] if several else [indices]
        known = self._before if self._alone and self._before else None
        self._before = [
            known[number] if known and not _is_large(item) else self._glance(item)
            for number, (_, item) in enumerate(self._points)
        ]

    def changed(self) -> str:
        """Name of what has changed since :meth:`look`, else empty. Make another watch then: objects may be new."""
        for (name, item), before in zip(self._points, self._before, strict=True):
            if not _same(before, self._glance(item)):
                return name
        return ""

    # -- what there is to look at -------------------------------------------------------------------------------------

    def _walk(self) -> None:
        self._points = []
        seen: set[int] = set()
        todo = deque((name, root, 0) for name, root in self._roots.items())
        while todo and len(self._points) < _MAX_POINTS:
            name, item, depth = todo.popleft()
            if type(item) in _VALUES or isinstance(item, _CODE) or id(item) in seen:
                continue
            seen.add(id(item))
            if not (isinstance(item, types.FunctionType) and not any(_held(item))):
                self._points.append((name, item))
            if depth < _MAX_DEPTH:
                todo.extend((f"{name}.{key}", value, depth + 1) for key, value in _children(item))

    def _glance(self, item: Any) -> list[Any]:
        """What is compared of an object itself."""
        if isinstance(item, _CONTAINERS):
            return _entries(item, self._indices)
        if isinstance(item, (torch.Tensor, np.ndarray)):
            return _numbers(item, self._indices)
        if isinstance(item, (bytearray, array.array)):
            return [len(item), bytes(item[:_SMALL_BYTES])]
        if isinstance(item, types.FunctionType):
            return [value for _, value in _held(item)]
        held = self._owned.holds(item)
        state = None if held else generator_state(item)
        if state is not None:
            return [repr(state)]
        if hasattr(item, "cache_info"):  # functools.lru_cache
            return [item.cache_info().misses]
        values: list[Any] = []
        for key, value in _attributes(item):
            if not held or type(value) not in SCALARS:
                values += (key, value)
        return values


def _is_large(item: Any) -> bool:
    if isinstance(item, _CONTAINERS):
        return len(item) > _SMALL
    return isinstance(item, np.ndarray) and item.nbytes > _SMALL_BYTES


def _children(item: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(item, (torch.Tensor, np.ndarray)):
        return
    if isinstance(item, _CONTAINERS):
        pairs = item.items() if isinstance(item, dict) else enumerate(item)
        if len(item) <= _SMALL:
            yield from ((str(key), value) for key, value in pairs)
        return
    if isinstance(item, types.FunctionType):
        yield from _held(item)
        return
    if isinstance(item, types.MethodType):
        yield "__self__", item.__self__
        yield "__func__", item.__func__
        return
    if isinstance(item, functools.partial):
        yield from (("func", item.func), ("args", item.args), ("keywords", item.keywords))
    yield from _attributes(item)
    for kind in type(item).__mro__:
        if not _of_a_library(kind):
            yield from ((name, each) for name, each in vars(kind).items() if isinstance(each, types.FunctionType))


def _attributes(item: Any) -> Iterator[tuple[str, Any]]:
    """Attributes of an object itself, without those that lead back to the loop that uses it."""
    private = isinstance(item, torch.nn.Module)  # dictionaries that every module has
    for name, value in list(getattr(item, "__dict__", {}).items()):
        if name not in BACK_REFERENCES and not (private and name.startswith("_")):
            yield name, value
    for name in _slots(type(item).__mro__):
        if hasattr(item, name):
            yield name, getattr(item, name)


@functools.lru_cache(maxsize=1024)
def _slots(kinds: tuple[type, ...]) -> tuple[str, ...]:
    found: list[str] = []
    for each in kinds:
        slots = () if _of_a_library(each) else vars(each).get("__slots__", ())
        found += [slots] if isinstance(slots, str) else slots
    return tuple(name for name in found if name not in ("__dict__", "__weakref__"))


def _held(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """What a function's closure holds, and the global variables that its code names."""
    if _of_a_library(function):
        return
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not yet filled
            continue
    for name in _global_names(function.__code__):
        value = function.__globals__.get(name)
        if not isinstance(value, _CODE):
            yield name, value


@functools.lru_cache(maxsize=1024)
def _global_names(code: types.CodeType) -> tuple[str, ...]:
    """Global variables that its instructions read or write; ``co_names`` also has attributes."""
    return tuple({str(each.argval): None for each in dis.get_instructions(code) if each.opname.endswith("_GLOBAL")})


def _of_a_library(item: Any) -> bool:
    return (getattr(item, "__module__", None) or "builtins").split(".")[0] in _LIBRARIES


def _entries(item: Any, indices: list[Any]) -> list[Any]:
    if isinstance(item, set):
        return [len(item), *(item if len(item) <= _SMALL else ())]
    if len(item) <= _SMALL:
        return [len(item), *item, *(item.values() if isinstance(item, dict) else ())]
    if isinstance(item, dict):
        return [len(item), *(item.get(index) for index in indices if type(index) in _VALUES)]
    named = (index for index in indices if type(index) is int and -len(item) <= index < len(item))
    return [len(item), item[0], item[-1], *(item[index] for index in named)]


def _numbers(item: Any, indices: list[Any]) -> list[Any]:
    if isinstance(item, torch.Tensor):
        return [] if item.is_inference() else [item._version]
    if not item.flags.writeable or item.dtype.hasobject:
        return []
    if item.nbytes <= _SMALL_BYTES:
        return [item.tobytes()]
    if item.ndim == 0 or item.strides[0] == 0 or item.nbytes // len(item) > _SMALL_BYTES:
        return []
    return [item[index].tobytes() for index in indices if type(index) is int and -len(item) <= index < len(item)]


def _same(one: list[Any], two: list[Any]) -> bool:
    if len(one) != len(two):
        return False
    for a, b in zip(one, two, strict=True):
        if a is not b and (type(a) is not type(b) or type(a) not in _VALUES or a != b):
            return False
    return True

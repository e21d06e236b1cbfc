"""Plain attributes of live objects: found once, read at every step boundary, put back in place in a replacement."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any

from torch import nn

from shared_core.encoding.values import ATOMS, NotPlain, assign, encode

#: Containers with more elements when they are first seen are taken for constant data, such as vocabularies.
LARGE = 10_000
_CONTAINERS = (list, tuple, dict, set)
_KINDS: dict[type, bool] = {}
_LIBRARIES = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))


class Holder:
    __slots__ = ("item", "_ignore", "_names", "_joined", "_other", "_size", "_skipped")

    def __init__(self, item: object, ignore: frozenset[str]) -> None:
        self.item = item
        self._ignore = ignore
        self._skipped: frozenset[str] = frozenset()
        self._plan(first=True)

    def _plan(self, first: bool = False) -> None:
        names, other, skipped = [], [], set(self._skipped)
        for name, value in vars(self.item).items():
            if name in self._ignore or name in skipped:
                continue
            if first and isinstance(value, _CONTAINERS) and len(value) > LARGE:
                skipped.add(name)
                continue
            try:
                encode(value)
                names.append(name)
            except (NotPlain, RecursionError):
                other.append(name)
        self._skipped = frozenset(skipped)
        self._names, self._other, self._size = tuple(names), tuple(other), len(vars(self.item))
        self._joined = "\n".join(names)

    def capture(self) -> tuple[str, list[Any]]:
        """(names joined by newlines, encoded values); the values share memory with the object."""
        values = vars(self.item)
        if len(values) != self._size:
            self._plan()
        for name in self._other:
            if type(values.get(name, self)) in ATOMS:
                self._plan()
                break
        try:
            return self._joined, [v if type(v) in ATOMS else encode(v) for v in map(values.__getitem__, self._names)]
        except (NotPlain, KeyError):  # an attribute was deleted or became something else
            self._plan()
            return self._joined, [encode(values[name]) for name in self._names]

    def restore(self, data: tuple[str, list[Any]]) -> None:
        joined, encoded = data
        values = vars(self.item)
        for name, value in zip(joined.split("\n") if joined else (), encoded, strict=True):
            # Written past __setattr__: a module's own would look for parameters and buffers of that name.
            values[name] = assign(values.get(name), value)


class Holders:
    """Holders of named objects, and of the small user objects that hang on them, two levels deep."""

    def __init__(self, objects: Mapping[str, object], ignore: frozenset[str] = frozenset()) -> None:
        self._holders: dict[str, Holder] = {}
        #: Objects that hang on another: their name, the attributes of the other, and the name among these.
        self._hanging: list[tuple[str, dict[str, Any], str]] = []
        seen: set[int] = set()
        for name, item in objects.items():
            self._add(name, item, ignore, seen, depth=0)

    def _add(self, name: str, item: object, ignore: frozenset[str], seen: set[int], depth: int) -> None:
        if id(item) in seen or not hasattr(item, "__dict__"):
            return
        seen.add(id(item))
        self._holders[name] = Holder(item, ignore)
        if depth < 2:
            for attribute, value in _user_objects(item, ignore):
                below = f"{name}.{attribute}"
                self._add(below, value, frozenset(), seen, depth + 1)
                if below in self._holders:
                    self._hanging.append((below, vars(item), attribute))

    def capture(self) -> dict[str, tuple[str, list[Any]]]:
        """Plain data that shares memory with the objects: serialize it at once."""
        for name, attributes, attribute in self._hanging:
            item = attributes.get(attribute)
            if item is not self._holders[name].item and hasattr(item, "__dict__"):
                self._holders[name] = Holder(item, frozenset())
        return {name: holder.capture() for name, holder in self._holders.items()}

    def restore(self, data: Mapping[str, tuple[str, list[Any]]]) -> None:
        """Put back what :meth:`capture` took; objects that do not exist here are left out."""
        for name, values in data.items():
            if name in self._holders:
                self._holders[name].restore(values)


def _user_objects(item: object, ignore: frozenset[str]) -> Iterator[tuple[str, Any]]:
    """Attributes that are objects of classes in the user's own files, which may hold counters."""
    for name, value in vars(item).items():
        if name not in ignore and not isinstance(value, (nn.Module, type, Enum)) and hasattr(value, "__dict__"):
            if user_defined(type(value)):
                yield name, value


def user_defined(kind: type) -> bool:
    """Whether a class is of the user's own files, and not of an installed package."""
    known = _KINDS.get(kind)
    if known is None:
        known = _KINDS[kind] = _look_up(kind)
    return known


def _look_up(kind: type) -> bool:
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    if kind.__module__.partition(".")[0] in ("shared_core", "lightning_swift", "accelerate_swift") or file is None:
        return kind.__module__ == "__main__"
    return not file.startswith(_LIBRARIES) and "site-packages" not in file

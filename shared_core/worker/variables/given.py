"""Attributes that a script's code gives to what is not its own: modules and classes of libraries, and their objects."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

from shared_core.worker.variables.kinds import OURS, attributes_given, name_of, of_libraries


class Given:
    """What code that was looked at stores.

    Attributes:
        names: of all such attributes.
    """

    def __init__(self) -> None:
        self.names: set[str] = set()
        #: Code by identity; it is kept, so that its id is not reused.
        self._looked: dict[int, types.CodeType] = {}
        self._held: dict[int, tuple[Any, dict[str, None]]] = {}

    def look(self, code: types.CodeType, variables: Mapping[str, Any]) -> None:
        """Look at code of the script, and what is defined in it; ``variables`` are its global ones."""
        todo = [code]
        while todo:
            each = todo.pop()
            if id(each) in self._looked:
                continue
            self._looked[id(each)] = each
            todo += [inner for inner in each.co_consts if isinstance(inner, types.CodeType)]
            if "setattr" in each.co_names:
                self.names.update(text for text in each.co_consts if isinstance(text, str) and text.isidentifier())
            for *way, name in attributes_given(each):
                self.names.add(name)
                to = _reached(way, variables)
                if _is_of_library(to) and (to, name) != (os, "environ"):  # by |=; its changes are settings
                    self._held.setdefault(id(to), (to, {}))[1][name] = None

    def holders(self) -> Iterator[tuple[str, Any, list[str]]]:
        """Name, module or class of a library, and the attributes that the script may give it."""
        for to, names in self._held.values():
            yield f"{name_of(to)} of a library", to, list(names)


def value_in(holder: Any, name: str, default: Any) -> Any:
    if isinstance(holder, type):
        return vars(holder).get(name, default)
    try:
        return getattr(holder, name, default)
    except Exception:  # of a setting that this build of a library does not have
        return default


def _reached(way: list[str], variables: Mapping[str, Any]) -> Any:
    found = variables.get(way[0]) if way else None
    for name in way[1:]:
        found = vars(found).get(name) if isinstance(found, (types.ModuleType, type)) else None
    return found


def _is_of_library(thing: Any) -> bool:
    module = sys.modules.get(thing.__module__) if isinstance(thing, type) else thing
    if not isinstance(module, types.ModuleType) or module.__name__ in ("__main__", "sys"):
        return False
    file = getattr(module, "__file__", None)
    return file is None or (of_libraries(file) and not file.startswith(OURS))

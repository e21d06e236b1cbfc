"""Finds what reading data can change in a script's variables: loaders, samplers, iterators, generators.

A replacement runs the script from its start. What exists when the script enters its loop exists there too, under the
same names, in the state in which it was made; so the name tells which of the failed worker's objects it is.
"""

from __future__ import annotations

import gc
import types
from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader, Sampler

from shared_core.loaders.randomness import generator_state

#: Modules whose frames and objects are not the script's.
_NOT_THE_SCRIPT = frozenset({"shared_core", "accelerate_swift", "lightning_swift", "accelerate", "runpy"})
#: Modules whose objects hold no loader of the script as an attribute.
_LIBRARIES = frozenset({"torch", "numpy", "builtins", "transformers", "datasets", "deepspeed", "tqdm", "logging"})
_MAX_FRAMES, _MAX_FOUND, _MAX_DEPTH, _MAX_CONTAINER = 8, 64, 3, 64
_PLAIN = (bool, int, float, str, bytes, type(None))
_CODE = (type, types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType)


def variables_of(frame: types.FrameType | None) -> dict[str, Any]:
    """Loaders, samplers, iterators and random generators in the variables of a script, by name.

    Looks at local and global variables of the running functions from ``frame`` outward, without those of this package,
    and at what they hold (a bounded number).
    """
    found: dict[str, Any] = {}
    seen: set[int] = set()
    for number, (name, variables) in enumerate(_scopes(frame)):
        for variable, value in list(variables.items()):
            _visit(f"{number} {name}.{variable}", value, 0, found, seen)
    return found


def held_by(iterable: Any, objects: Mapping[Any, Any]) -> list[str]:
    """Names of those objects that an iterable reads from, as far as that can be seen. It looks into ``islice``,
    ``zip``, ``map``, ``enumerate`` and generators.
    """
    names = {id(value): str(name) for name, value in objects.items()}
    found, seen, todo = [], {id(iterable)}, [(iterable, 0)]
    while todo:
        item, depth = todo.pop()
        for each in _read_from(item):
            if id(each) in seen:
                continue
            seen.add(id(each))
            if id(each) in names:
                found.append(names[id(each)])
            elif depth < _MAX_DEPTH and isinstance(each, (Iterator, tuple, list)):
                todo.append((each, depth + 1))
    return sorted(found)


def _scopes(frame: types.FrameType | None) -> Iterator[tuple[str, Mapping[str, Any]]]:
    modules: set[int] = set()
    count = 0
    while frame is not None and count < _MAX_FRAMES:
        scope = frame.f_globals
        if _root(scope.get("__name__")) not in _NOT_THE_SCRIPT:
            count += 1
            if frame.f_locals is not scope:
                yield frame.f_code.co_name, frame.f_locals
            if id(scope) not in modules:
                modules.add(id(scope))
                yield "globals", scope
            if frame.f_code.co_name == "<module>":
                return
        frame = frame.f_back


def _visit(name: str, item: Any, depth: int, found: dict[str, Any], seen: set[int]) -> None:
    if isinstance(item, _PLAIN) or isinstance(item, _CODE) or id(item) in seen or len(found) >= _MAX_FOUND:
        return
    seen.add(id(item))
    if isinstance(item, (DataLoader, Sampler, Iterator)) or generator_state(item) is not None:
        if _root(type(item).__module__) not in _NOT_THE_SCRIPT:
            found[name] = item
        return
    if depth < _MAX_DEPTH:
        for key, value in _children(item):
            _visit(f"{name}.{key}", value, depth + 1, found, seen)


def _children(item: Any) -> list[tuple[Any, Any]]:
    if isinstance(item, (list, tuple)):
        return list(enumerate(item)) if len(item) <= _MAX_CONTAINER else []
    if isinstance(item, dict):
        return [(key, value) for key, value in item.items() if isinstance(key, _PLAIN)][:_MAX_CONTAINER]
    if _root(type(item).__module__) in _LIBRARIES | _NOT_THE_SCRIPT:
        return []
    return list(getattr(item, "__dict__", {}).items())[:_MAX_CONTAINER]


def _read_from(item: Any) -> list[Any]:
    """What an iterator holds, and for a generator the global variables that its code names."""
    held = gc.get_referents(item)
    code = getattr(item, "gi_code", None)
    if code is not None and item.gi_frame is not None:
        held += [item.gi_frame.f_globals[name] for name in code.co_names if name in item.gi_frame.f_globals]
    return held


def _root(module: str | None) -> str:
    return (module or "").split(".")[0]

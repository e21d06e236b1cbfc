"""Generators and plain counters that a loader, its samplers and its data set hold."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from shared_core.loaders.randomness import generator_state, set_generator_state

SCALAR_TYPES = (bool, int, float, str, type(None))
SCALARS = frozenset(SCALAR_TYPES)
_MAX_OBJECTS, _MAX_DEPTH, _MAX_CONTAINER = 64, 4, 32
_OPAQUE = (
    type,
    types.ModuleType,
    types.FunctionType,
    types.MethodType,
    types.BuiltinFunctionType,
    torch.Tensor,
    torch.nn.Module,
    np.ndarray,
)
#: Attributes through which user objects refer back to what trains them, and a loader to its running workers; an
#: iteration does not start from their state.
BACK_REFERENCES = frozenset({"trainer", "_trainer", "model", "datamodule", "_iterator"})


class OwnedState:
    """Generators and plain counters that a loader, its samplers and its data set hold.

    They live in the process that iterates; an epoch can only be read again if they are first put back. Objects are
    found by walking attributes (a bounded number), so user-defined samplers need no interface.
    """

    def __init__(self, roots: Mapping[str, object]) -> None:
        self._objects: dict[str, object] = {}
        self._generators: dict[str, Any] = {}
        self._seen: set[int] = set()
        for name, root in roots.items():
            self._visit(name, root, 0)
        self._objects = {p: o for p, o in self._objects.items() if any(type(v) in SCALARS for v in vars(o).values())}
        self._held = {id(item) for item in (*self._objects.values(), *self._generators.values())}

    def capture(self) -> dict[str, Any]:
        """Plain data: ``{"scalars": {path: {attribute: value}}, "generators": {path: state}}``."""
        scalars = {}
        for path, item in self._objects.items():
            found = {k: v for k, v in vars(item).items() if type(v) in SCALARS}
            if found:
                scalars[path] = found
        return {"scalars": scalars, "generators": {p: generator_state(g) for p, g in self._generators.items()}}

    def restore(self, state: Mapping[str, Any], leave: str | None = None) -> None:
        """Put back what :meth:`capture` took, or a part of it; attributes that are gone are left alone. ``leave`` is
        the path of an object that is left alone, with all that it holds.
        """

        def ours(path: str) -> bool:
            return leave is None or not f"{path}.".startswith(f"{leave}.")

        for path, values in state.get("scalars", {}).items():
            if path in self._objects and ours(path):
                target = vars(self._objects[path])
                for name, value in values.items():
                    # Written past __setattr__: DataLoader forbids setting some names, although nothing changes here.
                    if name not in target or type(target[name]) in SCALARS and target[name] != value:
                        target[name] = value
        for path, data in state.get("generators", {}).items():
            if path in self._generators and ours(path):
                set_generator_state(self._generators[path], data)

    def holds(self, item: object) -> bool:
        """Whether an object's scalars, or a generator, are captured here."""
        return id(item) in self._held

    def _visit(self, path: str, item: Any, depth: int) -> None:
        if id(item) in self._seen or len(self._objects) >= _MAX_OBJECTS:
            return
        self._seen.add(id(item))
        if generator_state(item) is not None:
            self._generators[path] = item
            return
        if isinstance(item, _OPAQUE):
            return
        if hasattr(item, "__dict__"):
            self._objects[path] = item
        if depth < _MAX_DEPTH:
            for name, value in _children(item):
                self._visit(f"{path}.{name}", value, depth + 1)


def _children(item: Any) -> Iterator[tuple[str, Any]]:
    pairs: list[tuple[Any, Any]]
    if isinstance(item, (list, tuple)):
        pairs = list(enumerate(item)) if len(item) <= _MAX_CONTAINER else []
    elif isinstance(item, dict):
        pairs = list(item.items()) if len(item) <= _MAX_CONTAINER else []
    else:
        pairs = [(k, v) for k, v in getattr(item, "__dict__", {}).items() if k not in BACK_REFERENCES]
    for name, value in pairs:
        if not isinstance(value, SCALAR_TYPES):
            yield str(name), value


def changes(before: Mapping[str, Mapping[str, Any]], now: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Attributes, by object, that are new or have another value."""
    return {
        path: changed
        for path, values in now.items()
        if values != before.get(path)
        if (changed := {k: v for k, v in values.items() if k not in before.get(path, {}) or before[path][k] != v})
    }

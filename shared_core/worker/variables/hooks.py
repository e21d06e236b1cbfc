"""Functions that modules, parameters and optimizers call, and what only these hold, such as a count in a closure."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator, Mapping
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as of_modules
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer
from torch.optim import optimizer as of_optimizers

from shared_core.worker.variables.kinds import OURS, of_libraries

_END = "_hooks"
#: Hooks of all modules and optimizers.
_OF_ALL = {
    name: table
    for name, table in chain(vars(of_modules).items(), vars(of_optimizers).items())
    if name.startswith("_global_") and name.endswith(_END)
}
_OF_TENSORS = {name: attrgetter(name) for name in ("_backward_hooks", "_post_accumulate_grad_hooks")}


def is_hook_of_script(hook: Any) -> bool:
    """Whether a hook is the script's, and may hold something of it."""
    while isinstance(hook, (functools.partial, types.MethodType)):
        hook = hook.func if isinstance(hook, functools.partial) else hook.__func__
    code = getattr(hook, "__code__", None) or getattr(type(hook).__call__, "__code__", None)
    return code is not None and not of_libraries(code.co_filename) and not code.co_filename.startswith(OURS)


class HookTables:
    """The hooks of what is attached."""

    def __init__(self) -> None:
        self._tables: dict[str, Any] = {}
        #: Those where hooks may come later: a module that is given one is refused elsewhere.
        self._watched: list[Any] = []
        self._tensors: dict[str, torch.Tensor] = {}
        self._seen: Any = None
        self._states: dict[str, Any] = {}
        #: Where each hook is, by a name that a replacement gives it, too.
        self._found: dict[str, tuple[Any, Any]] = {}

    def attach(self, parts: Mapping[str, Any]) -> None:
        """Look at the hooks of these modules, tensors and optimizers, by name."""
        self._tables, self._tensors, self._states, self._seen = dict(_OF_ALL), {}, {}, None
        for spaced, each in parts.items():
            name = spaced.replace(" ", ".")
            for place, (hook, state) in enumerate(vars(each).get("_comm_hooks", ()) if isinstance(each, DDP) else ()):
                if is_hook_of_script(hook):
                    self._states |= {f"{name}.{place}.state": state, f"{name}.{place}.hook": hook}
            if isinstance(each, (nn.Module, Optimizer)):
                own = vars(each)
                self._tables |= {
                    f"{name}.{key}": own[key] for key in own if key.endswith(_END) and isinstance(own[key], dict)
                }
            elif isinstance(each, torch.Tensor):
                self._tensors[name] = each

    def read(self) -> dict[str, Any]:
        """The script's hooks by name. They are looked for again where one has come or gone."""
        if self._seen is None:
            self._watched = [each for name, each in self._tables.items() if each or not name.startswith("module")]
        seen = [*map(len, self._watched)]
        for of in _OF_TENSORS.values():
            seen += map(len, filter(None, map(of, self._tensors.values())))
        if seen != self._seen:
            self._seen, self._found = seen, dict(self._look())
        return {name: table[key] for name, (table, key) in self._found.items() if key in table} | self._states

    def _look(self) -> Iterator[tuple[str, tuple[Any, Any]]]:
        tables = dict(self._tables)
        for name, tensor in self._tensors.items():
            tables |= {f"{name}.{key}": read(tensor) or {} for key, read in _OF_TENSORS.items()}
        for name, table in tables.items():
            for number, (key, hook) in enumerate(table.items()):
                if is_hook_of_script(hook):
                    yield f"{name}.{number}", (table, key)

    def update(self, changed: Mapping[str, Any]) -> None:
        """Other functions in the places of hooks that are here."""
        for name, hook in changed.items():
            if name in self._found:
                table, key = self._found[name]
                table[key] = hook

"""Rank-local state of what is attached: buffers, modes, parameter groups of the optimizers, and what a script changes
of layers while it trains.

Layers of the script's own classes are among its variables. Of all others, such as ``nn.BatchNorm1d``, only what is
looked at here comes back: plain attributes, such as ``momentum``. Parts and hooks cannot be given to another process.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shared_core.worker.state.replicated import Replicated
from shared_core.worker.variables.kinds import LIBRARIES, is_of_library
from shared_core.worker.variables.writer import MODULE_PARTS

#: For tests: layers are left alone.
LAYERS_OFF = "SWIFT_TEST_NO_LAYERS"
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
#: So many changes are told.
_NAMED = 3
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(map(_is_plain, value)))


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in MODULE_PARTS}


def _same(now: Iterator[Any], first: Sequence[Any]) -> bool:
    return all(map(is_, now, first))


class Layers:
    """The layers of attached modules, and what they were when they were attached. ``layers``: by the path that a
    replacement gives them, too; no wrappers.
    """

    def __init__(self, layers: Mapping[str, nn.Module]) -> None:
        self._layers = dict(layers)
        self._first = {path: _attributes(each) for path, each in layers.items() if is_of_library(type(each))}
        self._sizes = [len(vars(layers[path])) for path in self._first]
        self._values = [each for first in self._first.values() for each in first.values()]
        self._children = {path: dict(each._modules) for path, each in layers.items()}
        self._parameters = {path: dict(each._parameters) for path, each in layers.items()}
        self._buffers = {path: frozenset(each._buffers) for path, each in layers.items()}
        self._hooks = {path: self._hooks_of(each) for path, each in layers.items()}
        # What is compared at each step boundary, in one list each.
        self._tables: list[Mapping[str, Any]] = [
            t for each in layers.values() for t in (each._modules, each._parameters) if t
        ]
        self._parts = [part for table in self._tables for part in table.values()]
        counted = [table for each in layers.values() for table in self._counted(each)]
        self._counts, self._counted_first = counted, sum(map(len, counted))

    @staticmethod
    def _counted(layer: nn.Module) -> tuple[Mapping[Any, Any], ...]:
        return (layer._modules, layer._parameters, *(vars(layer)[each] for each in _HOOKS))

    @staticmethod
    def _hooks_of(layer: nn.Module) -> list[str]:
        """Names of hooks that a script, or a tool that it calls, has added."""
        found = []
        for hook in chain.from_iterable(vars(layer)[each].values() for each in _HOOKS):
            function = getattr(hook, "func", hook)
            module = getattr(function, "__module__", None) or type(function).__module__
            if module.partition(".")[0] not in LIBRARIES or module.startswith("torch.nn.utils"):
                found.append(getattr(function, "__qualname__", type(function).__qualname__))
        return found

    def attributes(self) -> dict[str, dict[str, Any]]:
        """Plain attributes of layers of libraries that are not as they were when they were attached, by path."""
        own = [vars(self._layers[path]) for path in self._first]
        try:
            now = (table[name] for table, first in zip(own, self._first.values(), strict=True) for name in first)
            if _same(now, self._values) and [*map(len, own)] == self._sizes:
                return {}
        except KeyError:  # one is gone
            pass
        found = {}
        for path, first in self._first.items():
            changed = {
                name: value
                for name, value in _attributes(self._layers[path]).items()
                if _is_plain(value) and not (name in first and _equal(value, first[name]))
            }
            if changed:
                found[path] = changed
        return found

    def restore_attributes(self, values: Mapping[str, Mapping[str, Any]]) -> None:
        """Inverse of :meth:`attributes`; what had not changed there becomes what it was."""
        for path, here in self.attributes().items():
            for name in here.keys() - values.get(path, {}).keys() & self._first[path].keys():
                vars(self._layers[path])[name] = self._first[path][name]
        for path, changed in values.items():
            if path in self._first:
                vars(self._layers[path]).update(changed)

    def changes(self) -> tuple[str, bool]:
        """Parts and hooks that layers did not have when they were attached, or have no more, for people; empty if there
        are none. Buffers that are new are none of them: :class:`.Attached` adds them. And whether there are parameters
        that were not attached, whose values nobody publishes.
        """
        now = chain.from_iterable(table.values() for table in self._tables)
        if sum(map(len, self._counts)) == self._counted_first and _same(now, self._parts):
            return "", False
        found = list(chain.from_iterable(self._changes_of(path, each) for path, each in self._layers.items()))
        mine = {id(each) for own in self._parameters.values() for each in own.values()}
        others = any(id(p) not in mine for layer in self._layers.values() for p in layer.parameters())
        text = "; ".join(found[:_NAMED] + [f"and {len(found) - _NAMED} more"] * (len(found) > _NAMED))
        return text, others

    def _changes_of(self, path: str, layer: nn.Module) -> Iterator[str]:
        name_of = path.partition(".")[2].lstrip(".")
        tables: tuple[tuple[str, Mapping[str, Any], Mapping[str, Any]], ...] = (
            ("parameter", self._parameters[path], layer._parameters),
            ("layer", self._children[path], layer._modules),
        )
        for what, before, now in tables:
            for name in [*before, *(name for name in now if name not in before)]:
                old, new = before.get(name), now.get(name)
                if old is not new and (what == "parameter" or _holds_tensors(old) or _holds_tensors(new)):
                    verb = "added" if old is None else "removed" if new is None else "replaced"
                    yield f"{what} {name_of}{name} was {verb}"
        hooks, here = self._hooks[path], self._hooks_of(layer)
        where = name_of.rstrip(".") or "the model"
        yield from (f"hook {name} was added to {where}" for name in here if here.count(name) > hooks.count(name))
        yield from (f"hook {name} was removed from {where}" for name in hooks if hooks.count(name) > here.count(name))

    def unsaved(self) -> list[str]:
        """Buffers that were registered since, with ``persistent=False``."""
        return [
            f"{path}{name}"
            for path, layer in self._layers.items()
            if len(layer._buffers) != len(self._buffers[path])
            for name in layer._buffers.keys() - self._buffers[path]
            if name in layer._non_persistent_buffers_set
        ]

    def restore_unsaved(self, names: Sequence[str]) -> None:
        for path, layer in self._layers.items():
            layer._non_persistent_buffers_set.update(name for name in layer._buffers if f"{path}{name}" in names)


def _equal(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and _is_plain(other) and bool(one == other))


def _holds_tensors(module: Any) -> bool:
    return module is not None and any(True for _ in chain(module.parameters(), module.buffers()))


class Attached:
    """What belongs to the attached modules and optimizers, and is neither a parameter nor an optimizer's state of one.

    Args:
        alike: all ranks have the same modules; else groups are known by their number only, and modes by nothing.

    Attributes:
        layers: what is not a tensor in them.
    """

    def __init__(self, modules: Sequence[nn.Module], replicated: Replicated, *, alike: bool = True) -> None:
        self._replicated, self._alike = replicated, alike
        self._owners: list[tuple[str, nn.Module]] = []
        # A wrapper comes last: a replacement may not have it, where the failed worker was between two calls.
        wrappers = {number: each for number, each in enumerate(modules) if isinstance(each, DistributedDataParallel)}
        bare = {number: wrappers[number].module if number in wrappers else each for number, each in enumerate(modules)}
        seen: set[int] = set()
        for number, module in bare.items():
            for path, child in module.named_modules():
                if id(child) not in seen:
                    seen.add(id(child))
                    self._owners.append((f"{number}.{path}.", child))
        self.layers = Layers(dict(self._owners))
        self._owners += [(f"{number}.wrapper.", each) for number, each in wrappers.items()]

    def buffers(self) -> dict[str, torch.Tensor]:
        """Live buffers by name, those that were assigned since as they are now."""
        return {
            f"{path}{name}": buffer
            for path, owner in self._owners
            for name, buffer in owner._buffers.items()
            if buffer is not None
        }

    def restore_buffers(self, values: Mapping[str, torch.Tensor]) -> None:
        """Copy values to the buffers. Where shape or dtype differ, the value itself becomes the buffer; those that the
        script has registered since are added.
        """
        added: dict[str, list[str]] = {}
        for where in values:
            path, dot, name = where.rpartition(".")
            added.setdefault(path + dot, []).append(name)
        for path, owner in self._owners:
            for name in [*owner._buffers, *added.get(path, ())]:
                buffer, value = owner._buffers.get(name), values.get(f"{path}{name}")
                if value is None:
                    continue
                if buffer is not None and buffer.shape == value.shape and buffer.dtype == value.dtype:
                    buffer.data.copy_(value)  # .data: a backward may be under way, and this is not part of it
                else:
                    owner._buffers[name] = value

    def modes(self) -> tuple[bytes, bytes]:
        """Which modules are in training mode, and which parameters require gradients: a byte each."""
        if not self._alike:
            return b"", b""
        training = bytes([owner.training for _, owner in self._owners])
        return training, bytes([p.requires_grad for p in self._replicated.parameters])

    def restore_modes(self, values: tuple[bytes, bytes]) -> None:
        training, gradients = values
        for (_, owner), mode in zip(self._owners, training, strict=False):
            owner.training = bool(mode)
        for parameter, has in zip(self._replicated.parameters, gradients, strict=False):
            if parameter.requires_grad != bool(has):
                parameter.requires_grad_(bool(has))

    def with_gradients(self) -> bytes:
        """Which parameters have a gradient, be it zero: a byte each."""
        return bytes([p.grad is not None for p in self._replicated.parameters]) if self._alike else b""

    def restore_gradients(self, values: bytes) -> None:
        """Give the same parameters one, of zeros. Optimizers also step those whose gradient is zero, by weight decay
        and momentum, and leave out those that have none.
        """
        for parameter, has in zip(self._replicated.parameters, values, strict=False):
            if has and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def groups(self) -> list[list[dict[str, Any]]]:
        """Of the optimizers: hyper-parameters, and places of parameters. Raises Unsupported for unattached ones."""
        return [[self._group(group) for group in o.param_groups] for o in self._replicated.optimizers]

    def _group(self, group: Mapping[str, Any]) -> dict[str, Any]:
        values = {key: value for key, value in group.items() if key != "params"}
        if self._alike:
            values["params"] = self._replicated.places_of(group["params"])
        return values

    def restore_groups(self, values: Sequence[Sequence[Mapping[str, Any]]]) -> None:
        """Inverse of :meth:`groups`; groups that the script has added or removed since the start are, too."""
        for optimizer, stored in zip(self._replicated.optimizers, values, strict=False):
            groups = optimizer.param_groups
            if self._alike:
                del groups[len(stored) :]
                groups += [{} for _ in range(len(stored) - len(groups))]
            for group, theirs in zip(groups, stored, strict=True):
                group.update(theirs)
                if self._alike:
                    group["params"] = [self._replicated.parameters[place] for place in theirs["params"]]


class _GradientGroup:
    """Parameters, by place, of one model that the same optimizers, by number, step: zeroed together."""

    def __init__(self, optimizers: Collection[int], members: Mapping[int, torch.Tensor]) -> None:
        self._optimizers, self._members = frozenset(optimizers), members
        #: Whether the program zeroes them first: where they have changed since their update, and where not. A program
        #: that accumulates over several batches does both. Not there before a batch has shown it.
        self._zeroed: dict[bool, bool] = {}
        self._watched: torch.Tensor | None = None
        self._handle: Any = None
        self._pending: bool | None = None  # of the boundary that no gradient has come after yet

    def left(self, pending: Collection[int]) -> dict[int, torch.Tensor]:
        """What the next batch may add to, live; from here on it is watched what it does."""
        changed = not self._optimizers.isdisjoint(pending)
        zeroed = self._zeroed.get(changed)
        if zeroed and self._watched is not None and self._watched.grad is not None:
            self._pending = changed
            return {}
        found = {place: p.grad for place, p in self._members.items() if p.grad is not None}
        if found and zeroed is not False:
            self._watch(min(found, key=lambda place: (found[place].numel(), place)))
            self._pending = changed
        return {} if zeroed else {place: grad for place, grad in found.items() if bool(grad.any())}

    def _watch(self, place: int) -> None:
        if self._watched is None or self._watched.grad is None:
            self.close()
            self._watched = self._members[place]
            self._handle = self._watched.register_hook(self._added) if self._watched.requires_grad else None

    def _added(self, _gradient: torch.Tensor) -> None:
        """Hook: a gradient is about to be added to what is there."""
        if self._pending is None or self._watched is None:
            return
        changed, self._pending = self._pending, None
        old = self._watched.grad
        self._zeroed[changed] = self._zeroed.get(changed, True) and (old is None or not bool(old.any()))

    def close(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None


class LeftoverGradients:
    """Gradients at the end of a batch that the next may add to, of all that is attached."""

    def __init__(self) -> None:
        self._groups: Sequence[_GradientGroup] = []

    def attach(self, replicated: Replicated | None) -> None:
        """Look at these models and optimizers from now on; None: at none."""
        for group in self._groups:
            group.close()
        self._groups = _grouped(replicated) if replicated is not None else []

    def left(self, pending: Collection[int] = ()) -> dict[int, torch.Tensor]:
        """The gradients that are state of this step boundary, by place, live: none that are zero, and none of
        parameters whose gradients the program zeroes before it adds to them. ``pending`` are the numbers of the
        optimizers whose gradients have changed since their last update.
        """
        found: dict[int, torch.Tensor] = {}
        for group in self._groups:
            found |= group.left(pending)
        return found


def _grouped(replicated: Replicated) -> list[_GradientGroup]:
    modules: dict[int, list[int]] = {id(p): [] for p in replicated.parameters}
    optimizers: dict[int, list[int]] = {id(p): [] for p in replicated.parameters}
    for number, module in enumerate(replicated.modules):
        for parameter in module.parameters():
            modules[id(parameter)].append(number)
    for number, optimizer in enumerate(replicated.optimizers):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                optimizers[id(parameter)].append(number)
    groups: dict[tuple[tuple[int, ...], tuple[int, ...]], dict[int, torch.Tensor]] = {}
    for place, parameter in enumerate(replicated.parameters):
        key = tuple(modules[id(parameter)]), tuple(optimizers[id(parameter)])
        groups.setdefault(key, {})[place] = parameter
    return [_GradientGroup(steps, members) for (_, steps), members in groups.items()]

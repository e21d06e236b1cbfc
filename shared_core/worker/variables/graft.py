"""Values that another run of the script held, put into this run's in place, so that every reference sees it.

First both graphs are walked side by side, which changes nothing: for each object of the other run this finds the one
here that stands for it, and what cannot be put back. Then the objects here are filled.
"""

from __future__ import annotations

import concurrent.futures
import copy
import ctypes
import functools
import sys
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from operator import length_hint
from typing import Any

import numpy as np
import torch
from torch import nn

from shared_core.encoding.unpacking import Numbered, dtype_named
from shared_core.errors import RecoveryFailed
from shared_core.loaders.randomness import new_generator, set_generator_state
from shared_core.worker.variables.attached_memory import shows
from shared_core.worker.variables.kinds import (
    ITERATORS,
    RANDOM,
    VALUES,
    attributes_of_class,
    attributes_of_tensor,
    kind_of,
    name_of,
    numbers_of_c,
    of_libraries,
    slots_of,
)
from shared_core.worker.variables.scopes import script_frames
from shared_core.worker.variables.writer import (
    MODULE_PARTS,
    OF_DATA,
    Unbound,
    ValueWriter,
    attributes_of,
    held_by,
    hooks_of,
    is_read,
    iterator_state,
    mark_of,
    mark_of_code,
    name_of_file,
    namespace_of,
    owner_of,
    results_of,
    state_of,
    tensors_of,
)

#: Kinds of objects that are never filled.
_AS_HERE = frozenset({"fixed", "view", "ignored", "named", "unbound", "opaque", "large"})
#: Kinds of objects that are filled, but not made.
_NEVER_MADE = frozenset({"class", "namespace", "scripted", "context", "cache", "logger", "file", "shows"})
_PLAIN = (list, dict, set, bytearray)
_STEPS = " (write job.steps(loader) in the place of iter(loader), and a replacement finds its place)"
_TEXT = 60
#: Types of generators that are made where the script has not made them yet.
_GENERATORS = frozenset(map(name_of, RANDOM))
_LARGEST_TABLE = 1 << 20


class _Missing:
    def __repr__(self) -> str:
        return "not there"


#: Stands for a place where this run has no value.
MISSING = _Missing()


@dataclass(frozen=True)
class Difference:
    """What cannot be put back, and is not as it was.

    Attributes:
        path: of the value: the variable, and the way from there.
        was: text for what the other run held.
        here: text for what this run holds.
        where: the place of the variable in the source.
    """

    path: str
    was: str
    here: str
    where: str = ""


class Graft:
    """One run's values in another run of the same script. Call :meth:`match` for all values before :meth:`value`.

    Args:
        rows: descriptions of the other run's objects.
        writer: describes this run's.
        named: objects of this run by the names of variables that held them when its loop began.
        identities: what ``id()`` of something attached was in the other run, and is here.
        edited: the script may have been changed since: functions of one name stand for each other.
    """

    def __init__(
        self,
        rows: Iterable[Any],
        writer: ValueWriter,
        named: Mapping[str, Any],
        identities: Mapping[int, int] | None = None,
        *,
        edited: bool = False,
    ) -> None:
        self._rows = {row[0]: row for row in rows if row is not None}
        self._writer, self._named, self._edited = writer, named, edited
        self._ids = dict(identities or {})
        self._here: dict[Any, Any] = {}
        self._claimed: dict[int, Any] = {}
        self._filled: dict[Any, Any] = {}
        self._keep: list[Any] = []
        self._owners: list[tuple[Any, Any, str]] = []
        self._classes: list[tuple[Any, str]] = []
        self._paths: dict[Any, str] = {}
        #: Descriptions of what the class of an object gives it, by attribute.
        self._rest: dict[Any, dict[str, Any]] = {}
        self._whole = ""
        self.differences: list[Difference] = []

    # -- side by side -------------------------------------------------------------------------------------------------

    def match(self, new: Any, old: Any, path: str) -> None:
        """Find which objects here stand for those in ``new``, of the other run; ``old`` is in its place here."""
        self._whole = path
        todo = [(new, old, path)]
        while todo:
            new, old, path = todo.pop()
            if isinstance(new, Numbered):
                todo.extend(reversed(list(self._match_object(new, old, path))))
            elif type(new) is tuple:
                fits = type(old) is tuple and len(old) == len(new)
                todo.extend((each, old[i] if fits else MISSING, f"{path}[{i}]") for i, each in enumerate(new))
            elif type(new) in _PLAIN and id(new) not in self._here:
                self._keep.append(new)
                if isinstance(new, (dict, set)):
                    self._know_identities(new, old if type(old) is type(new) else (), path)
                if type(old) is type(new) and self._claim(id(new), old):
                    todo.extend(reversed(list(self._pairs(new, old, path))))
                else:
                    self._here[id(new)] = MISSING
                    todo.extend(reversed(list(self._pairs(new, MISSING, path))))

    def keep(self, things: Iterable[Any]) -> None:
        """Call before :meth:`match`: nobody puts these back. What a variable shows of them here gets another object."""
        self._claimed.update((id(each), each) for each in things)

    def match_owners(self) -> None:
        """Call after all :meth:`match`: what only parts of it are held by variables."""
        while self._owners:
            self.match(*self._owners.pop(0))
        for new, path in self._classes:
            if new not in self._here:
                self.match(new, MISSING, path.removesuffix(".__class__"))
        self._classes.clear()

    def _know_identities(self, new: Iterable[Any], old: Iterable[Any], path: str) -> None:
        """Keys that are ``id()`` of something not attached stand for those of the same places in a dictionary here."""
        theirs = [key for key in new if _is_identity(key) and key not in self._ids]
        if not theirs:
            return
        known = set(self._ids.values())
        mine = [key for key in old if _is_identity(key) and key not in known] if isinstance(old, dict) else []
        if len(theirs) == len(mine):
            self._ids.update(zip(theirs, mine, strict=True))
        else:
            self._differ(path, f"a dictionary with {len(theirs)} keys that id() gives of what is not attached", old)

    def _pairs(self, new: Any, old: Any, path: str) -> Iterable[tuple[Any, Any, str]]:
        if isinstance(new, dict):
            held: Mapping[Any, Any] = {} if old is MISSING else old
            classes: dict[str, tuple[Any, Any]] = {}
            if any(isinstance(key, Numbered) for key in new):
                classes = {name_of(key): (key, value) for key, value in held.items() if isinstance(key, type)}
            for key, value in new.items():
                if isinstance(key, (Numbered, tuple, frozenset)):
                    mine = classes.get(self._name_of(key), (MISSING, MISSING))
                    yield value, mine[1], _below(path, key)
                    yield key, mine[0], f"{path} (a key)"
                else:
                    yield value, held.get(self._ids.get(key, key), MISSING), _below(path, key)
        elif isinstance(new, list):
            for i, value in enumerate(new):
                if not isinstance(value, (int, float, str, type(None))):
                    yield value, old[i] if old is not MISSING and i < len(old) else MISSING, f"{path}[{i}]"
        elif isinstance(new, set):
            for value in new:
                yield value, MISSING, f"{path} (an element)"

    def _name_of(self, key: Any) -> Any:
        """Of the class for which this stands; None for other keys."""
        _, kind, _, *parts = self._rows[key.number] if isinstance(key, Numbered) else (0, "", "")
        return parts[0] if kind in ("named", "class") else None

    def _claim(self, key: Any, old: Any) -> bool:
        """Let ``old`` stand for this object; False if it already stands for another."""
        if id(old) in self._claimed:
            return False
        self._claimed[id(old)] = old
        self._here[key] = old
        return True

    def _match_object(self, new: Numbered, old: Any, path: str) -> Iterable[tuple[Any, Any, str]]:
        if new in self._here:
            return
        _, kind, cls, *parts = self._rows[new.number]
        same = old is not MISSING and name_of(type(old)) == cls
        if kind in _AS_HERE:
            here = self._here[new] = self._as_here(kind, cls, parts, old, same, path)
            for name, value in parts[2].items() if kind == "fixed" else ():
                yield value, getattr(here, "__dict__", {}).get(name, MISSING), f"{path}.{name}"
            return
        if kind == "function":
            same = same and name_of(old) == parts[0] and (self._edited or mark_of(old) == parts[3])
            if not same:
                self._here[new] = self._find_function(parts[0], parts[3], old, path)
                return
        if kind == "method":
            known = same and name_of(old.__func__) == parts[0]  # a decorator may have made it of another of its name
            found = old.__func__ if known else self._find(parts[0], MISSING, path)
            if found is not MISSING and not callable(found):
                self._differ(path, short(parts[0]), found)
                found = MISSING
            self._here[new] = found
        elif kind == "bound":
            self._here[new] = old if same and old.__name__ == parts[0] else MISSING
        elif kind in ("enum", "value", "atom", "frozenset", "tuple"):
            self._here[new] = old if same else MISSING
        elif not (same and _fits(kind, parts, old) and self._claim(new, old)):
            if kind == "class" and path.endswith(".__class__"):  # a variable may hold it, or another of its objects
                self._classes.append((new, path))
                return
            self._here[new] = MISSING
            self._check_can_be_made(kind, cls, parts, path)
        here = self._here[new]
        mine = hooks_of(here) if kind == "module" and here is not MISSING else []
        if kind == "module" and [name for name, _ in parts[-1]] != [name for name, _ in mine]:
            self._differ(path, f"a {short(cls)} with other hooks", here)
        if kind in ("tensor", "ndarray") and parts[0] == "part":
            # A variable that holds the owner says which one it is here; if none does, the part that is here.
            self._owners.append((parts[_PART_OF[kind]][0], _owner(old) if same else MISSING, path))
        if kind == "set":
            self._paths[new] = path
        if kind in ("dict", "set"):
            keys = [key for key, _ in parts[0]] if kind == "dict" else parts[0]
            self._know_identities(keys, () if here is MISSING else here, path)
        theirs = {self._ids.get(key, key): value for key, value in _children(kind, parts).items()}
        if kind in ("object", "module") and here is MISSING and _makes_the_rest(cls):
            rows = {key: self._rows[each.number] for key, each in theirs.items() if isinstance(each, Numbered)}
            rest = {key: row for key, row in rows.items() if isinstance(key, str) and _is_of_the_rest(*row[1:])}
            self._rest[new] = {key.removeprefix("."): row for key, row in rest.items()}
            theirs = {key: each for key, each in theirs.items() if key not in rest}
        held = MISSING if here is MISSING else _own_children(kind, old if kind == "method" and same else here)
        for key, value in theirs.items():
            other = MISSING if held is MISSING else held.get(key, MISSING)
            if kind != "cache" or other is not MISSING:
                yield value, other, _below(path, key)
            elif parts[1][key]:  # else the function gives it when it is called
                self._differ(path, "a cache with a result that has changed", MISSING)

    def _as_here(self, kind: str, cls: str, parts: list[Any], old: Any, same: bool, path: str) -> Any:
        if kind == "unbound":
            return MISSING
        if kind == "ignored":
            if old is MISSING and path != self._whole:  # a variable without a value says so by itself
                self._differ(path, f"a {short(cls)}", old)
            return old
        if kind == "named":
            return old if same and name_of(old) == parts[0] else self._find(parts[0], old, path)
        if kind == "fixed":
            for name in filter(None, parts[:2]):  # what is not attached yet has that of a variable only
                found = self._named.get(name, MISSING)
                if found is not MISSING and name_of(type(found)) == cls:
                    return found
            if not same:
                self._differ(path, f"a {short(cls)}", old)
            return old
        if kind == "view":
            name, offset, size, stride = parts
            owner = self._named.get(name, MISSING)
            if isinstance(owner, torch.Tensor):
                return shows(owner, offset, size, stride, old, as_array=cls.endswith(":ndarray"))
            self._differ(path, f"a view of what is attached ({name})", old)
            return old
        if kind == "large":
            mine = self._writer.describe("large", _Shown(old)) if old is not MISSING else ()
            if parts[2] is None or tuple(parts) != mine:
                self._differ(path, f"a {short(parts[0])} of {parts[1]} parts, too many to be published", old)
            return old
        if parts[0] is None:
            self._differ(path, f"a {short(cls)}, which does not show what it holds", old)
        elif not same or (parts[0] != OF_DATA and tuple(parts) != self._writer.describe("opaque", old)):
            advice = _STEPS if cls.startswith("torch.utils.data.dataloader:") else ""
            self._differ(path, f"a {short(cls)}{' that has continued' * same}{advice}", old)
        return old

    def _find(self, name: str, old: Any, path: str) -> Any:
        found = _look_up(name)
        if found is MISSING:
            self._differ(path, short(name), old)
            return old
        return found

    def _find_function(self, name: str, mark: int, old: Any, path: str) -> Any:
        """The function of this name that does the same; one without a closure is made of its code."""
        if not mark or (self._edited and "<" not in name):
            return self._find(name, old, path)
        made = _look_up(name)
        if not isinstance(made, types.FunctionType) or mark_of(made) != mark:
            made = _made_of_code(name, mark)
        if made is MISSING:
            self._differ(path, f"another function {short(name)}", old)
            return old
        return made

    def _check_can_be_made(self, kind: str, cls: str, parts: list[Any], path: str) -> None:
        if kind in ("tensor", "ndarray") and parts[0] in ("same", "apart"):
            self._differ(path, f"a {short(cls)} of another kind", MISSING)
        elif (
            kind in _NEVER_MADE
            or (kind == "random" and cls not in _GENERATORS)
            or (kind == "memory" and not cls.startswith("ctypes:"))
            or (kind not in _MAKERS and kind != "random" and _look_up(cls) is MISSING and not _has_class(kind, parts))
        ):
            self._differ(path, f"a {short(cls)}", MISSING)

    def _differ(self, path: str, was: str, here: Any) -> None:
        self.differences.append(Difference(path, was, shown(here)))

    # -- filling ------------------------------------------------------------------------------------------------------

    def value(self, new: Any) -> Any:
        """The value of the other run, built from the objects here. Changes them in place."""
        if isinstance(new, Numbered):
            if new not in self._filled:
                self._fill(new)
            return self._filled[new]
        if type(new) is tuple:
            return tuple(self.value(each) for each in new)
        if type(new) is int:
            return self._ids.get(new, new)
        if type(new) is frozenset:
            return frozenset(self.value(each) for each in new)
        if type(new) not in _PLAIN:
            return new
        key = id(new)
        if key not in self._filled:
            here = self._here.get(key, MISSING)
            made = self._filled[key] = type(new)() if here is MISSING else here
            if isinstance(new, dict):
                items: Any = [(self.value(k), self.value(v)) for k, v in new.items()]
            else:
                items = [] if isinstance(new, bytearray) else [self.value(each) for each in new]
            if isinstance(new, bytearray):
                made[:] = new  # others may show its memory
                return made
            made.clear()
            made.extend(items) if isinstance(new, list) else made.update(items)
        return self._filled[key]

    def _fill(self, new: Numbered) -> None:
        _, kind, cls, *parts = self._rows[new.number]
        here = self._here.get(new, MISSING)
        if kind in _AS_HERE or (kind == "function" and (here is MISSING or name_of(here) != parts[0])):
            self._filled[new] = here
            if kind == "fixed" and here is not MISSING:
                for name, value in parts[2].items():
                    here.__dict__[name] = self.value(value)
        elif kind in _NEVER_MADE:
            self._filled[new] = here
            if here is not MISSING:
                self._fill_in_place(kind, here, parts)
        elif kind in ("enum", "value", "atom", "frozenset", "tuple"):
            self._filled[new] = _immutable(
                kind, _look_up(cls) if here is MISSING else type(here), cls, parts, self.value
            )
        elif kind == "method":
            self._filled[new] = MISSING if here is MISSING else types.MethodType(here, self.value(parts[1]))
        elif kind == "bound":
            to = self.value(parts[1])
            kept = here is not MISSING and here.__self__ is to
            self._filled[new] = here if kept else object.__getattribute__(to, parts[0])
        elif kind == "partial":
            partial: Any = functools.partial(_later) if here is MISSING else here
            self._filled[new] = partial
            partial.__setstate__(tuple(self.value(each) for each in parts))
        elif kind in ("tensor", "ndarray"):
            self._filled[new] = made = self._restored(kind, cls, parts, here)
            if kind == "tensor" and made is not MISSING:
                self._set_own(made, parts[-1])
        elif kind == "future":
            self._filled[new] = future = concurrent.futures.Future[Any]()
            future.set_result(self.value(parts[0]))
        elif kind == "reference":
            to = self.value(parts[0])
            kept = here is not MISSING and here() is to
            self._filled[new] = here if kept else weakref.ref(_Gone() if to is None else to)
        elif kind == "weak":
            weak: Any = here if here is not MISSING else _look_up(cls)()
            self._filled[new] = weak
            items = [self.value(each) for each in parts[0]]
            weak.clear()
            weak.update(items)
        elif kind == "random":
            state = self.value(parts[0])
            if here is MISSING:
                self._filled[new] = new_generator(state) if cls in _GENERATORS else MISSING
            else:
                set_generator_state(here, state)
                self._filled[new] = here
                if parts[1]:
                    self._set_attributes(here, parts[1], kind)
        elif kind == "function":
            self._filled[new] = here
            self._fill_function(here, parts[1], parts[2])
        elif kind == "iterator":
            self._filled[new] = _moved_on(cls, self.value(parts[0]), parts[1], here)
        elif kind == "pyarray":
            made = _look_up(cls)(parts[0], parts[1])
            if here is not MISSING:
                here[:] = made  # others may show its memory
            self._filled[new] = made if here is MISSING else here
        elif kind == "memory":
            self._filled[new] = memory = here if here is not MISSING else _look_up(cls)()
            ctypes.memmove(ctypes.addressof(numbers_of_c(memory)), parts[0], len(parts[0]))
        elif kind == "buffer":
            self._filled[new] = buffer = here if here is not MISSING else _look_up(cls)()
            buffer.close() if parts[0] is None else buffer.__setstate__((*parts[0], None))
        else:
            if here is MISSING:
                of = self.value(parts[0]["__class__"]) if _has_class(kind, parts) else _look_up(cls)
                here = _blank(of, kind, cls, parts)
            made = self._filled[new] = here
            self._fill_container(kind, made, parts, self._paths.get(new, ""))
            if rest := self._rest.get(new):
                _make_the_rest(made, rest)

    def _fill_in_place(self, kind: str, here: Any, parts: list[Any]) -> None:
        """What can only be changed, not made."""
        if kind == "class":
            for name, value in parts[1].items():
                if (found := self.value(value)) is not attributes_of_class(here).get(name):
                    type.__setattr__(here, name, found)
        elif kind == "namespace":
            vars(here).update((name, self.value(value)) for name, value in parts[0].items())
        elif kind == "context":
            if (value := self.value(parts[1])) is not MISSING:
                here.set(value)
        elif kind == "logger":
            _, level, here.disabled, here.propagate = parts
            here.setLevel(level)
        elif kind == "file":
            here.seek(parts[1])
        elif kind == "shows":
            self.value(parts[0])
        elif kind == "scripted":
            for value in parts[0].values():
                self.value(value)
        else:  # a cache
            for value in parts[0][: len(results_of(here))]:
                self.value(value)

    def _fill_container(self, kind: str, made: Any, parts: list[Any], path: str) -> None:
        attributes = parts[0] if kind == "module" else parts[-1]
        if kind == "module":
            self.value(parts[-1])  # what hooks hold
        base: Any = {"dict": dict, "list": list, "set": set, "deque": deque}.get(kind)
        if base is not None:
            if kind == "dict":
                items: Any = [(self.value(k), self.value(v)) for k, v in parts[0]]
                base = OrderedDict if isinstance(made, OrderedDict) else dict
                base.clear(made)
                for k, v in items:
                    base.__setitem__(made, k, v)
            else:
                items = [self.value(each) for each in parts[0]]
                base.clear(made)
                (set.update if kind == "set" else base.extend)(made, items)
                if type(made) is set and not _put_in_order(made, items):
                    self._differ(path, "a set whose order depends on what it has held before (keep a list)", made)
        self._set_attributes(made, attributes, kind)

    def _set_attributes(self, made: Any, attributes: Mapping[str, Any], kind: str) -> None:
        slots = {each.__name__: each for each in slots_of(type(made))}
        own = getattr(made, "__dict__", None)
        values = {name: self.value(value) for name, value in attributes.items()}
        for name, value in values.items():
            if value is MISSING or name == "__class__":
                continue
            if name in slots:
                with suppress(AttributeError, TypeError):
                    slots[name].__set__(made, value)
            elif own is not None:
                own[name] = value
        if own is not None:
            left = self._writer.ignored | (MODULE_PARTS if kind == "module" else frozenset())
            for name in [each for each in own if each not in values and each not in left]:
                del own[name]

    def _fill_function(self, here: types.FunctionType, cells: list[Any], own: Any) -> None:
        for cell, value in zip(here.__closure__ or (), cells, strict=False):
            found = self.value(value)
            if found is not MISSING:
                cell.cell_contents = found
        if own is None:
            return
        here.__dict__.update({k: self.value(v) for k, v in own[0].items()})
        here.__defaults__, here.__kwdefaults__ = self.value(own[1]), self.value(own[2])

    def _restored(self, kind: str, cls: str, parts: list[Any], here: Any) -> Any:
        how = parts[0]
        if how == "same":
            return here
        if how == "sparse":
            return self._sparse(parts, here)
        if how == "part":
            return self._part(kind, parts, here)
        if kind == "ndarray":
            if how == "objects":
                made = np.empty(len(parts[3]), object)
                for index, value in enumerate(self.value(parts[3])):
                    made[index] = value
                made = made.reshape(parts[2])
            else:
                made = np.frombuffer(bytearray(parts[3]), np.dtype(parts[1])).reshape(parts[2])
            if here is MISSING or not here.flags.writeable:
                here = made
            else:
                here[...] = made
            self._writer.put_back(here)
            return here
        _, dtype, shape, device, data, gradient, _ = parts
        raw = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        value = raw.view(dtype_named(dtype)).view(shape) if data else torch.empty(shape, dtype=dtype_named(dtype))
        value = value.to(device)
        if gradient == 2:
            return _Ended.apply(value.requires_grad_())  # type: ignore[no-untyped-call]
        if here is MISSING:
            here = (
                nn.Parameter(value, bool(gradient))
                if cls.endswith(":Parameter")
                else value.requires_grad_(bool(gradient))
            )
        else:
            here.data.copy_(value)
            if here.is_leaf:
                here.requires_grad_(bool(gradient))
        self._writer.put_back(here)
        return here

    def _part(self, kind: str, parts: list[Any], here: Any) -> Any:
        """Of a tensor or array that is put back itself: what is here, if it shows that."""
        owner, offset, stride = parts[_PART_OF[kind]]
        owner, shape = self.value(owner), tuple(parts[2])
        made: Any
        if kind == "tensor":
            if (dtype := dtype_named(parts[1])) != owner.dtype:
                whole = owner.untyped_storage().nbytes() // owner.itemsize
                owner = owner.as_strided((whole,), (1,), 0).view(dtype)
            made = owner.as_strided(shape, tuple(stride), offset)
            shown = here is not MISSING and (here.data_ptr(), here.shape, here.stride())
            return here if shown == (made.data_ptr(), made.shape, made.stride()) else made
        made = np.ndarray(shape, np.dtype(parts[1]), owner, offset, tuple(stride))
        shown = here is not MISSING and (here.ctypes.data, here.shape, here.strides)
        return here if shown == (made.ctypes.data, made.shape, made.strides) else made

    def _sparse(self, parts: list[Any], here: Any) -> torch.Tensor:
        _, _, shape, device, (layout, coalesced, held), gradient, _ = parts
        held = [self.value(each).to(device) for each in held]
        if layout == "sparse_coo":
            indices, values = held
            made = torch.sparse_coo_tensor(indices, values, shape, is_coalesced=coalesced, check_invariants=False)
        else:
            rows, columns, values = held
            kind = getattr(torch, layout)
            made = torch.sparse_compressed_tensor(rows, columns, values, shape, layout=kind, check_invariants=False)
        if here is not MISSING and here.layout is made.layout is torch.sparse_coo and here.is_leaf:
            with torch.no_grad():
                here.copy_(made)._coalesced_(coalesced)
            made = here
        self._writer.put_back(made)
        return made.requires_grad_(gradient == 1)

    def _set_own(self, made: Any, own: dict[str, Any]) -> None:
        """Gradient and attributes of a tensor."""
        values = {name: self.value(value) for name, value in own.items()}
        if made.is_leaf and made.requires_grad:
            made.grad = values.pop("grad", None)
        for name in attributes_of_tensor(made).keys() - values.keys() - self._writer.ignored:
            del made.__dict__[name]
        made.__dict__.update(values)


class _Gone:
    """What a weak reference showed that is gone."""


def _later() -> None:
    """Takes the place of a new partial's function until that is set."""


class _Ended(torch.autograd.Function):
    """A value whose graph was in the failed worker: it can be read, but not differentiated again."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise RecoveryFailed(
            "a result of an earlier batch is differentiated again, whose graph was the failed worker's: detach() what "
            "is kept from one batch to the next, or run the whole sequence in one batch"
        )


class _Shown:
    """What :class:`.writer.Large` is, for a value here."""

    def __init__(self, value: Any) -> None:
        self.value = value


#: Where the description of a part tells of its owner.
_PART_OF = {"tensor": 4, "ndarray": 3}


def _owner(part: Any) -> Any:
    found = owner_of(part)
    return MISSING if found is None else found


def _fits(kind: str, parts: list[Any], old: Any) -> bool:
    if kind == "tensor":
        how, dtype, shape, device, held, gradient, _ = parts
        if how not in ("same", "part") and old._is_view():  # to fill it would change what it is a part of
            return False
        if (how == "sparse") is not (old.layout is not torch.strided) and how != "same":
            return False
        alike = str(old.dtype) == f"torch.{dtype}" and tuple(old.shape) == tuple(shape) and str(old.device) == device
        return alike and gradient != 2 and old.grad_fn is None
    if kind == "ndarray":
        alike = old.dtype == np.dtype(parts[1]) and old.shape == tuple(parts[2])
        return bool(alike and (parts[0] in ("same", "part") or owner_of(old) is None))
    if kind == "pyarray":
        return bool(old.typecode == parts[0])
    if kind == "memory":
        return ctypes.sizeof(numbers_of_c(old)) == len(parts[0])
    if kind == "buffer":
        return not old.closed
    if kind == "file":
        return is_read(old) and name_of_file(old) == parts[0]
    if kind == "shows":
        return (old.nbytes, old.format) == tuple(parts[1:])
    if kind == "deque":
        return bool(old.maxlen == parts[1])
    if kind in ("context", "logger"):
        return bool(old.name == parts[0])
    if kind == "class":
        return bool(name_of(old) == parts[0])
    return True


def _children(kind: str, parts: list[Any]) -> dict[Any, Any]:
    """What a description holds that may be objects, by place."""
    found: dict[Any, Any]
    if kind == "random":
        return {f".{name}": value for name, value in parts[1].items()}
    if kind in ("object", "module", "namespace", "scripted"):
        found = {f".{name}": value for name, value in parts[0].items()}
        return found | _numbered(parts[-1]) if kind == "module" else found
    if kind == "class":
        return {f".{name}": value for name, value in parts[1].items()}
    if kind == "context":
        return {"value": parts[1]}
    if kind == "cache":
        return dict(enumerate(parts[0]))
    if kind in ("list", "deque", "tuple"):
        found = dict(enumerate(parts[0]))
        return found if kind == "tuple" else found | {f".{name}": value for name, value in parts[-1].items()}
    if kind == "dict":
        found = {_key(key): value for key, value in parts[0]}
        found |= {("key", i): key for i, (key, _) in enumerate(parts[0]) if isinstance(key, (Numbered, tuple))}
        return found | {f".{name}": value for name, value in parts[-1].items()}
    if kind == "weak":
        return {("key", i): each for i, each in enumerate(parts[0])}
    if kind in ("set", "frozenset"):
        return {("key", i): value for i, value in enumerate(parts[0])}
    if kind == "function":
        found = {("cell", i): value for i, value in enumerate(parts[1])}
        return found if parts[2] is None else found | dict(zip(_OF_FUNCTIONS, parts[2], strict=True))
    if kind in ("method", "bound"):
        return {".__self__": parts[1]}
    if kind in ("reference", "future"):
        return {"()": parts[0]}
    if kind == "iterator":
        return {".source": parts[0]}
    if kind == "shows":
        return {".obj": parts[0]}
    if kind == "partial":
        return dict(zip(_OF_PARTIALS, parts, strict=True))
    if kind == "ndarray" and parts[0] == "objects":
        return {0: parts[3]}
    if kind == "tensor":
        return {f".{name}": value for name, value in parts[-1].items()}
    return {}


_OF_PARTIALS = (".func", ".args", ".keywords", ".__dict__")
_OF_FUNCTIONS = (".__dict__", ".__defaults__", ".__kwdefaults__")


def _numbered(hooks: list[tuple[str, Any]]) -> dict[Any, Any]:
    return {("hook", i): each for i, (_, each) in enumerate(hooks)}


def _own_children(kind: str, here: Any) -> dict[Any, Any]:
    found: dict[Any, Any]
    if kind in _ATTRIBUTES:
        found = {f".{name}": value for name, value in _ATTRIBUTES[kind](here).items()}
        return found | _numbered(hooks_of(here)) if kind == "module" else found
    if kind == "context":
        return {"value": here.get(MISSING)}
    if kind == "cache":
        return dict(enumerate(results_of(here)))
    if kind in ("list", "deque", "tuple"):
        found = dict(enumerate(here))
        return found if kind == "tuple" else found | {f".{name}": value for name, value in attributes_of(here).items()}
    if kind == "dict":
        found = {_key(key): value for key, value in dict.items(here)}
        return found | {f".{name}": value for name, value in attributes_of(here).items()}
    if kind == "function":
        found = {}
        for i, cell in enumerate(here.__closure__ or ()):
            with suppress(ValueError):
                found[("cell", i)] = cell.cell_contents
        return found | {name: getattr(here, name[1:]) for name in _OF_FUNCTIONS}
    if kind in ("method", "bound"):
        return {".__self__": getattr(here, "__self__", MISSING)}
    if kind == "reference":
        return {"()": here()}
    if kind == "iterator":
        return {".source": iterator_state(here)[0]}
    if kind == "shows":
        return {".obj": here.obj}
    if kind == "partial":
        return {name: getattr(here, name[1:]) for name in _OF_PARTIALS}
    if kind == "tensor":
        own = attributes_of_tensor(here) | ({"grad": here.grad} if here.is_leaf else {})
        return {f".{name}": value for name, value in own.items() if value is not None}
    return {}


#: What is below an object of a kind, by name.
_ATTRIBUTES: dict[str, Callable[[Any], Mapping[str, Any]]] = {
    "object": held_by,
    "random": attributes_of,
    "module": state_of,
    "namespace": namespace_of,
    "scripted": tensors_of,
    "class": attributes_of_class,
}


def _made_of_code(name: str, mark: int) -> Any:
    """A function of the script that stands in another one, or in what runs, and has no closure; else
    :data:`MISSING`.
    """
    module, _, path = name.partition(":")
    outer = _look_up(f"{module}:{path.partition('.<locals>')[0]}")
    todo = [code] if (code := getattr(outer, "__code__", None)) is not None else []
    todo += [frame.f_code for frame in script_frames(sys._getframe(1)) if frame.f_globals.get("__name__") == module]
    while todo:
        each = todo.pop()
        if each.co_qualname == path and mark_of_code(each) == mark and not each.co_freevars:
            return types.FunctionType(each, vars(sys.modules[module]))
        todo += [one for one in each.co_consts if isinstance(one, types.CodeType)]
    return MISSING


def _is_of_the_rest(kind: str, cls: str, *parts: Any) -> bool:
    """Whether an object of a library may be given this by its own ``__setstate__``, as by ``copy.deepcopy``."""
    if kind == "function":  # that wraps a method of its own
        return "." in parts[0].partition(":")[2] and "<" not in parts[0]
    return kind in ("opaque", "ignored") or (kind == "fixed" and not any(parts[:2]))


def _makes_the_rest(cls: str) -> bool:
    found = getattr(_look_up(cls), "__setstate__", None)
    ours = isinstance(found, types.FunctionType) and found.__module__.partition(".")[0] != "torch"
    return ours and of_libraries(found.__code__.co_filename)  # type: ignore[union-attr]


def _make_the_rest(made: Any, rest: Mapping[str, Any]) -> None:
    """What no description makes, such as the wrapped methods of a metric of torchmetrics."""
    own = {name: value for name, value in vars(made).items() if name not in rest}
    vars(made).clear()
    made.__setstate__(own)
    for name, (_, kind, cls, *parts) in rest.items():
        found = vars(made).get(name, MISSING)
        if name_of(type(found)) != cls or (kind == "function" and name_of(found) != parts[0]):
            raise RecoveryFailed(f"a {short(name_of(type(made)))} has no {name!r} when it is made again")


def _is_identity(key: Any) -> bool:
    """Whether a number looks like an address of CPython, on Linux with 64 bits."""
    return type(key) is int and 2**46 <= key < 2**47 and not key % 16


def _key(key: Any) -> Any:
    return key if isinstance(key, (str, int, float, bytes, bool, type(None))) else ("no", id(key))


def _below(path: str, key: Any) -> str:
    if isinstance(key, str) and key.startswith("."):
        return f"{path}{key}"
    if isinstance(key, tuple):
        return f"{path} (a {key[0]})"
    return f"{path}[{key!r}]"


def _look_up(name: str) -> Any:
    """What has this name in a module that is already imported; else :data:`MISSING`. Imports nothing."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module, MISSING)
    if path.startswith("NoneType") and module == "builtins":
        return type(None)
    for part in path.split(".") if path else ():
        found = getattr(found, "__dict__", {}).get(part, MISSING) if found is not MISSING else MISSING
        if isinstance(found, (staticmethod, classmethod)):
            found = found.__func__
    return found


#: Kinds that can be made here without their class.
_MAKERS = frozenset(
    "value tensor ndarray pyarray iterator atom enum tuple frozenset bound partial reference weak future".split()
)


def _has_class(kind: str, parts: list[Any]) -> bool:
    """Whether an object's description has its class."""
    return kind == "object" and "__class__" in parts[0]


def _blank(made: Any, kind: str, cls: str, parts: list[Any]) -> Any:
    if not isinstance(made, type) or kind_of(made) != kind:
        raise RecoveryFailed(f"{short(cls)} is no class of the script any more")
    if kind == "deque":
        fresh: Any = deque.__new__(made)
        deque.__init__(fresh, (), parts[1])
        return fresh
    if kind == "module":
        fresh = object.__new__(made)
        nn.Module.__init__(fresh)
        return fresh
    base: Any = {"dict": dict, "list": list, "set": set}.get(kind, object)
    if made is types.SimpleNamespace:
        return types.SimpleNamespace()
    if issubclass(made, dict):
        base = next(each for each in made.__mro__ if "__new__" in each.__dict__)
    return base.__new__(made)


def _put_in_order(made: set[Any], items: list[Any]) -> bool:
    """Let a set of numbers have the order that it had in a larger table, after elements were taken away. The order of
    others is another one in each process. Returns whether it has that order.
    """
    size = 32
    if not all(type(each) is int for each in items):
        return True
    while list(made) != items and size <= _LARGEST_TABLE:
        if (spare := size * 3 // 8 - len(items)) > 0:
            made.clear()
            made.update(items)
            others = {object() for _ in range(spare)}
            made |= others  # makes the table so large, with the items in it first
            for each in others:  # one by one: more at once make it small again
                made.discard(each)
        size *= 2
    return list(made) == items


def _immutable(kind: str, made: Any, cls: str, parts: list[Any], value: Callable[[Any], Any]) -> Any:
    if kind == "value":
        named = next((each for each in VALUES if name_of(each) == cls), made)
        known = next(base for base in named.__mro__ if base in VALUES)
        return VALUES[known][1](value(parts[0]))
    if not isinstance(made, type) or kind_of(made) != kind:
        raise RecoveryFailed(f"{short(cls)} is no class of the script any more")
    if kind == "enum":
        named = parts[0] in made.__members__  # type: ignore[attr-defined]
        return made.__members__[parts[0]] if named else made(parts[1])  # type: ignore[attr-defined]
    base: Any = {"tuple": tuple, "frozenset": frozenset}.get(kind) or type(parts[0])
    if hasattr(made, "n_sequence_fields"):  # of C, such as time.struct_time
        base = made
    return base.__new__(made, value(parts[0]))


def _moved_on(cls: str, source: Any, left: int, here: Any) -> Any:
    """An iterator over ``source`` with so many elements left: the one here, if that is what it comes to."""
    make, empty = next(made for each, made in ITERATORS.items() if name_of(each) == cls)
    wanted = _read_until(make(empty if source is None else source), left, ended=source is None)
    if here is MISSING or not _alike(_read_until(copy.copy(here), left, ended=source is None), wanted):
        return wanted
    return _read_until(here, left, ended=source is None)


def _read_until(iterator: Any, left: int, *, ended: bool) -> Any:
    while length_hint(iterator) > left:
        next(iterator)
    if ended:
        next(iterator, None)
    return iterator


def _alike(one: Any, other: Any) -> bool:
    (mine, left), (theirs, as_many) = iterator_state(one), iterator_state(other)
    return left == as_many and (mine is theirs if isinstance(mine, list) else mine == theirs)


def short(name: str) -> str:
    """The name of a class or function for people, without its module."""
    return name.partition(":")[2].rpartition("<locals>.")[2] or name


def shown(value: Any) -> str:
    """Text for a value that calls none of the script's code."""
    if value is MISSING or value is Unbound:
        return "not there"
    if isinstance(value, (int, float, str, bool, bytes, type(None))) and type(value).__module__ == "builtins":
        text = repr(value)
        return text if len(text) <= _TEXT else f"{text[:_TEXT]}..."
    return f"a {type(value).__qualname__}"

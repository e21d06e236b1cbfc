"""Where a script's variables are: frames of its running functions, its modules and their classes, told objects."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import inspect
import sys
import types
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from operator import is_, itemgetter
from pathlib import Path
from typing import Any, Literal

from shared_core.loaders.randomness import read_random, write_random
from shared_core.worker.variables.expressions import names_read
from shared_core.worker.variables.given import Given, value_in
from shared_core.worker.variables.kinds import (
    LIBRARIES,
    OURS,
    SCRIPT_FOLDERS,
    attributes_of_class,
    is_bound,
    is_dunder,
    is_loaded_apart,
    kind_of,
    of_libraries,
    unwrapped,
)
from shared_core.worker.variables.liveness import READS_ALL, live
from shared_core.worker.variables.writer import Unbound

_WRITES_THROUGH = sys.version_info >= (3, 13)

#: What holds the variables of a scope. A framework may tell of its objects at any time; all other scopes are there
#: whenever the script is at the same place.
Kind = Literal["told", "frame", "module", "class", "hooks"]


class Names:
    """Reads the values of several variables at once, in the order of the names."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = tuple(names)
        self.joined = " ".join(self.names)
        self._get = itemgetter(*self.names) if len(self.names) > 1 else None

    def values(self, own: Mapping[str, Any]) -> Sequence[Any]:
        """Values in a namespace; raises KeyError if a name is missing."""
        if self._get is not None:
            return self._get(own)  # type: ignore[no-any-return]  # a tuple
        return [own[each] for each in self.names]


@dataclass(frozen=True, slots=True)
class Scope:
    """Variables in one place.

    Attributes:
        name: by which a replacement finds the place.
        where: the place in the source, for people.
        values: what they hold, in the order of ``names``.
        holder: takes new values: a namespace, a class, or a frame.
    """

    name: str
    kind: Kind
    where: str
    names: Names
    values: Sequence[Any]
    holder: Any

    def put(self, changed: Mapping[str, Any]) -> None:
        if isinstance(self.holder, types.FrameType):
            put_locals(self.holder, changed)
        elif isinstance(self.holder, type):
            for name, value in changed.items():
                type.__setattr__(self.holder, name, value)
        elif isinstance(self.holder, types.ModuleType):
            for name, value in changed.items():
                setattr(self.holder, name, value)
        else:
            self.holder.update(changed)


class ToldVariables:
    """Attributes of one object, listed again when their names change. ``leaves``: names that do not count."""

    def __init__(self, name: str, thing: Any, leaves: Container[str]) -> None:
        self._name, self._own, self._leaves = name, vars(thing), leaves
        self._size, self._names = -1, Names(())

    def left(self, besides: Container[str]) -> Iterator[Any]:
        """What dictionaries hold whose names do not count; ``besides``: of these nothing."""
        for name, held in self._own.items():
            if type(held) is dict and name in self._leaves and name not in besides:
                yield from held.values()

    def scope(self) -> Scope:
        own = self._own
        try:
            if len(own) == self._size:
                return Scope(self._name, "told", self._name, self._names, self._names.values(own), own)
        except KeyError:  # one is gone and another has come
            pass
        self._size, self._names = len(own), Names(each for each in own if each not in self._leaves)
        return Scope(self._name, "told", self._name, self._names, self._names.values(own), own)


class _Class:
    """Attributes of a class of the script, without properties and other code that holds nothing, and without the
    methods that it had at first.
    """

    def __init__(self, name: str, cls: type) -> None:
        self.name, self.cls, self._own = name, cls, vars(cls)
        self._size, self._names = -1, Names(())
        self._methods = Names(name for name, each in self._own.items() if type(each) is types.FunctionType)
        self._first = self._now = self._methods.values(self._own)

    @property
    def methods(self) -> Sequence[Any]:
        """Those that it had at first."""
        return self._first

    def empty(self) -> Scope:
        """Where attributes of another run go, where none were found here."""
        return Scope(self.name, "class", self.name.partition(":")[2], Names(()), (), self.cls)

    def scope(self) -> Scope | None:
        """None where there are no such attributes."""
        own = self._own
        try:
            same = len(own) == self._size and all(map(is_, self._now, self._methods.values(own)))
        except KeyError:
            same = False
        if not same or any(each not in own for each in self._names.names):
            self._size = len(own)
            first = dict(zip(self._methods.names, self._first, strict=True))
            others = [k for k, v in own.items() if type(v) is types.FunctionType and first.get(k) is not v]
            self._now = [own.get(each) for each in self._methods.names]
            self._names = Names(dict.fromkeys([*attributes_of_class(self.cls), *others]))
        if not self._names.names:
            return None
        where = self.name.partition(":")[2]
        values = [unwrapped(each) for each in self._names.values(own)]
        return Scope(self.name, "class", where, self._names, values, self.cls)


class _Members(_Class):
    """What members of an enumeration hold, where that may change."""

    def __init__(self, name: str, cls: Any) -> None:
        super().__init__(name, cls)
        self._every = {name: vars(each) for name, each in cls.__members__.items()}
        self._whole = Scope(name, "class", cls.__qualname__, Names(self._every), [*self._every.values()], self._every)
        self._sizes, self._hold = list[int](), False

    def scope(self) -> Scope | None:
        if (sizes := [*map(len, self._every.values())]) != self._sizes:
            self._sizes, self._hold = sizes, any(map(_holds_more, self._every.values()))
        return self._whole if self._hold else None

    def empty(self) -> Scope:
        return self._whole


def _holds_more(member: Mapping[str, Any]) -> bool:
    return any(not k.startswith("_") or (k == "_value_" and kind_of(type(v)) != "atom") for k, v in member.items())


def _classes(value: type, module: str, known: dict[int, _Class]) -> Iterator[_Class]:
    """A class that this module defines, and those inside it."""
    if value.__module__ == module:
        if id(value) not in known:
            of = _Members if kind_of(value) == "enum" else _Class
            known[id(value)] = of(f"{module}:{value.__qualname__}", value)
        yield known[id(value)]
        for each in list(vars(value).values()):
            if isinstance(each, type) and each.__qualname__.startswith(f"{value.__qualname__}."):
                yield from _classes(each, module, known)


@dataclass(frozen=True)
class _Plan:
    """What is looked at in a module, valid while it has ``size`` names, and ``codes`` under those of functions."""

    size: int
    names: Names
    where: str
    classes: list[_Class]
    defined: Names
    codes: Sequence[Any]

    def holds(self, own: Mapping[str, Any]) -> bool:
        """Raises KeyError if a name is missing."""
        return self.size == len(own) and all(map(is_, self.codes, _codes(self.defined, own)))


class _OwnModules:
    """The script's modules: ``__main__``, and the others in the order of their import.

    Each module is looked at once, and a zygote does it before it forks: to look at a module writes to its memory, which
    copies it where it is shared, and there are some 3,000.
    """

    #: So many of the newest modules are looked through for those that have come.
    _NEWEST = 64

    def __init__(self) -> None:
        self._found: list[tuple[str, types.ModuleType]] = []
        self._seen: tuple[int, int, int] | None = None
        self._newest = ""

    def look(self) -> list[tuple[str, types.ModuleType]]:
        """Those that are there now, by their names; the same list as before where no module has come or gone."""
        newest = next(reversed(sys.modules))
        seen = len(sys.modules), len(SCRIPT_FOLDERS), id(sys.modules.get("__main__"))
        if seen == self._seen and newest == self._newest:
            return self._found
        come, kept = list(islice(reversed(sys.modules), self._NEWEST)), []  # at once: other threads import too
        if self._seen is not None and self._seen[1] == seen[1] and self._newest in come:
            kept = [name for name, _ in self._found]
            del come[come.index(self._newest) :]
        else:
            come = list(reversed(sys.modules))
        names = dict.fromkeys(("__main__", *kept, *reversed(come)))
        modules = [(name, sys.modules.get(name)) for name in names if name != "__mp_main__"]
        self._seen, self._newest = seen, newest
        self._found = [(name, each) for name, each in modules if isinstance(each, types.ModuleType) and _is_own(each)]
        return self._found


#: The script's modules of this process.
OWN_MODULES = _OwnModules()


class Scopes:
    def __init__(self) -> None:
        # By id: hashing code objects reads all of them. The code is kept too, so that its id is not reused.
        self._codes: dict[int, tuple[types.CodeType, bool]] = {}
        self._modules: list[tuple[str, types.ModuleType]] = []
        self._known: set[int] = set()
        self._plans: dict[tuple[str, Any], _Plan] = {}
        #: Classes of the script by identity, and the code of each module's functions, as they were at first.
        self._classes: dict[int, _Class] = {}
        self._defined: dict[int, dict[str, Any]] = {}
        self.given = Given()
        self._frames: dict[tuple[int, int], tuple[Names, str]] = {}

    def find(self, frame: types.FrameType | None, told: Iterable[ToldVariables]) -> Iterator[Scope]:
        """All scopes: told objects first, then frames from ``frame`` outward, then modules and their classes."""
        for each in told:
            yield each.scope()
        running: dict[int, types.FrameType] = {}
        times: dict[str, int] = {}
        while frame is not None:
            code = frame.f_code
            known = self._codes.get(id(code))
            if known is None:
                known = self._codes[id(code)] = code, is_script(code, frame.f_globals)
            if known[1]:
                running.setdefault(id(frame.f_globals), frame)
                if code.co_name != "<module>":
                    name = f"{frame.f_globals.get('__name__')}:{code.co_qualname}"
                    number = times[name] = times.get(name, 0) + 1
                    yield self._of_frame(frame, f"{name} {number}")
                else:
                    running[id(frame.f_globals)] = frame
                    if frame.f_globals.get("__name__") == "__main__":
                        break
            frame = frame.f_back
        for name, own in self._own_modules(running):
            yield from self._of_module(name, own, running.get(id(own)))
        for name, holder, given in self.given.holders():
            values = [unwrapped(value_in(holder, each, Unbound)) for each in given]
            yield Scope(name, "class", name, Names(given), values, holder)

    def of_class(self, name: str) -> Scope | None:
        """A class in which no attributes were found, by the name of its scope: those of another run go there."""
        return next((each.empty() for each in self._classes.values() if each.name == name), None)

    def _own_modules(self, running: Mapping[int, types.FrameType]) -> Iterator[tuple[str, dict[str, Any]]]:
        modules = OWN_MODULES.look()
        if modules is not self._modules:
            self._modules, self._known = modules, {id(vars(module)) for _, module in modules}
        for number, frame in running.items():
            if number not in self._known:
                yield str(frame.f_globals.get("__name__")), frame.f_globals
        for name, module in modules:
            yield name, vars(module)

    def _of_module(self, name: str, own: dict[str, Any], frame: types.FrameType | None) -> Iterator[Scope]:
        if frame is not None and frame.f_code.co_name != "<module>":
            frame = None  # only its functions run
        key = (name, None if frame is None else frame.f_lasti)
        plan, values = self._plans.get(key), None
        try:
            if plan is not None and plan.holds(own):
                values = plan.names.values(own)
        except KeyError:
            pass
        if plan is None or values is None:
            plan = self._plans[key] = self._plan(name, own, frame)
            values = plan.names.values(own)
        yield Scope(name, "module", plan.where, plan.names, values, own)
        for each in plan.classes:
            if (found := each.scope()) is not None:
                yield found

    def _plan(self, name: str, own: dict[str, Any], frame: types.FrameType | None) -> _Plan:
        alive = None if frame is None else _alive(frame)
        names: list[str] = []
        classes: list[_Class] = []
        functions: list[str] = []
        first = self._defined.get(id(own))
        if first is None:
            first = self._defined[id(own)] = {k: getattr(v, "__code__", None) for k, v in own.items()}
        for each, value in own.items():
            if isinstance(value, type):
                classes += _classes(value, name, self._classes)
            elif is_dunder(each) or (isinstance(value, types.ModuleType) and not is_loaded_apart(value)):
                continue
            elif isinstance(value, types.BuiltinFunctionType) and not is_bound(value):
                continue
            elif _is_defined(each, value, name) and first.get(each) is value.__code__:
                functions.append(each)
            elif alive is None or each in alive:
                names.append(each)
        codes = [own[each].__code__ for each in functions if own[each].__globals__ is own]
        codes += [each.__code__ for cls in classes for each in cls.methods if each.__globals__ is own]
        for code in codes if frame is None else (*codes, frame.f_code):
            self.given.look(code, own)
        file = Path(own.get("__file__") or name).name
        defined = Names(functions)
        where = file if frame is None else f"{file}:{frame.f_lineno}"
        return _Plan(len(own), Names(names), where, classes, defined, _codes(defined, own))

    def _of_frame(self, frame: types.FrameType, name: str) -> Scope:
        code = frame.f_code
        key = (id(code), frame.f_lasti)
        known = self._frames.get(key)
        if known is None:
            alive = _alive(frame)
            every = dict.fromkeys((*code.co_varnames, *code.co_cellvars, *code.co_freevars))
            names = Names(each for each in every if (alive is None or each in alive) and not each.startswith("."))
            known = self._frames[key] = names, f"{Path(code.co_filename).name}:{frame.f_lineno}"
            self.given.look(code, frame.f_globals)
        names, where = known
        own = frame.f_locals
        try:
            values = names.values(own)
        except KeyError:
            values = [own.get(each, Unbound) for each in names.names]
        _let_go(own, code)
        return Scope(name, "frame", where, names, values, frame)


def _alive(frame: types.FrameType) -> frozenset[str] | None:
    found = live(frame.f_code, frame.f_lasti, {**frame.f_globals, **frame.f_locals})
    return found if found is None else found | names_read(frame.f_code, frame.f_lasti)


def _let_go(own: dict[str, Any], code: types.CodeType) -> None:
    """Clear Python 3.12's copy of a frame's variables: it would keep alive what the function has dropped."""
    if not _WRITES_THROUGH and READS_ALL.isdisjoint(code.co_names):  # else the script may have put something there
        own.clear()


def _codes(defined: Names, own: Mapping[str, Any]) -> list[Any]:
    """Of functions: a closure that a loop defines again is another object with the same code."""
    return [getattr(each, "__code__", None) for each in defined.values(own)]


def _is_defined(name: str, value: Any, module: str) -> bool:
    """Whether this is a function under its own name that holds nothing."""
    return isinstance(value, types.FunctionType) and value.__name__ == name and not _has_state(value, module)


def _has_state(function: types.FunctionType, module: str) -> bool:
    held = bool(function.__closure__ or function.__dict__ or function.__defaults__ or function.__kwdefaults__)
    return held and function.__module__ == module


def put_locals(frame: types.FrameType, changed: Mapping[str, Any]) -> None:
    values = frame.f_locals
    values.update(changed)
    if not _WRITES_THROUGH:
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))
    _let_go(values, frame.f_code)


def is_script(code: types.CodeType, variables: Mapping[str, Any]) -> bool:
    """Whether code is the script's: it runs in ``__main__``, or its file is of no library and not of this product."""
    main = sys.modules.get("__main__")
    if main is not None and variables is vars(main):
        return True
    return not of_libraries(code.co_filename) and not code.co_filename.startswith(OURS)


def let_go(frame: types.FrameType) -> None:
    """After a frame's variables were read: see :func:`_let_go`."""
    if frame.f_code.co_flags & inspect.CO_OPTIMIZED:  # of a function; a module's are its globals
        _let_go(frame.f_locals, frame.f_code)


def script_frames(frame: types.FrameType | None) -> Iterator[types.FrameType]:
    """Running functions of the script, from ``frame`` outward, and the module that calls them."""
    while frame is not None:
        if is_script(frame.f_code, frame.f_globals):
            yield frame
            if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == "__main__":
                return
        frame = frame.f_back


def import_again(names: Iterable[str]) -> bool:
    """Import modules that the failed worker imported inside its loop; ``names`` of other scopes are passed over. Random
    generators are put back afterwards. Errors of an import are ignored. Returns whether any were missing.
    """
    missing = [each for each in names if ":" not in each and each not in sys.modules]
    if not missing:
        return False
    random = read_random()
    for name in missing:
        with suppress(Exception):  # whatever their code raises
            spec = importlib.util.find_spec(name)
            if spec is not None and spec.origin is not None and _is_own_file(spec.origin):
                importlib.import_module(name)
    write_random(random)
    return True


def _is_own_file(file: str) -> bool:
    return not of_libraries(file) and not file.startswith(OURS)


def _is_own(module: types.ModuleType) -> bool:
    if module.__name__ == "__main__":
        return True
    file = getattr(module, "__file__", None)
    return isinstance(file, str) and module.__name__.partition(".")[0] not in LIBRARIES and _is_own_file(file)

"""What a replacement does with objects of a type: restore from their value, leave alone, or only compare."""

from __future__ import annotations

import argparse
import array
import collections
import concurrent.futures
import contextlib
import contextvars
import csv
import ctypes
import datetime
import decimal
import dis
import enum
import fractions
import functools
import importlib
import inspect
import io
import itertools
import logging
import os
import pathlib
import queue
import random
import re
import sqlite3
import struct
import sys
import sysconfig
import threading
import types
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.sharedctypes import SynchronizedBase
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._C._distributed_c10d import Store

from shared_core.worker.comm import group_name, group_named

#: Packages whose objects this product restores elsewhere, or which belong to one process.
FRAMEWORKS = frozenset(
    "shared_core lightning_swift accelerate_swift lightning pytorch_lightning lightning_fabric lightning_utilities "
    "accelerate transformers deepspeed datasets tokenizers safetensors wandb mlflow tensorboard tensorboardX tqdm rich "
    "logging threading multiprocessing concurrent asyncio socket ssl subprocess selectors queue tempfile argparse "
    "unittest pytest _pytest inspect importlib contextlib abc typing matplotlib ctypes".split()
)
LIBRARIES = FRAMEWORKS | {"torch"}
#: A class of the script that derives from one of these packages is left to the adapter, too.
_ADAPTED = frozenset(
    "shared_core lightning_swift accelerate_swift lightning pytorch_lightning lightning_fabric accelerate transformers "
    "deepspeed datasets".split()
)
#: Modules of these packages are engines, not networks: their parts are attached.
_ENGINES = frozenset(("shared_core", "deepspeed"))
#: Parts of torch whose objects hold state of a script; all others are restored elsewhere.
_OF_TORCH = (
    "torch.optim.lr_scheduler",
    "torch.optim.swa_utils",
    "torch.amp.",
    "torch.cuda.amp.",
    "torch.distributions",
    "torch.distributed.algorithms.model_averaging",
    "torch.quasirandom",
    "torch.utils.data.sampler",
    "torch.utils.data.dataset",
    "torch.utils.data.distributed",
)
_LIBRARIES = tuple(
    {os.path.realpath(sysconfig.get_paths()[each]) + os.sep for each in ("stdlib", "platstdlib", "purelib", "platlib")}
    | {sysconfig.get_paths()[each] + os.sep for each in ("stdlib", "platstdlib", "purelib", "platlib")}
)
#: Folders of packages whose own frames and modules are no part of a script.
OURS = tuple(
    f"{Path(__file__).resolve().parents[3] / name}/" for name in ("shared_core", "lightning_swift", "accelerate_swift")
)
#: Belongs to the process, and holds nothing that a script computes.
IGNORED = (
    io.IOBase,
    logging.Handler,
    threading.Thread,
    threading.Event,
    threading.Condition,
    type(threading.Lock()),
    type(threading.RLock()),
    weakref.ReferenceType,
    types.MappingProxyType,
    types.CodeType,
    types.FrameType,
    types.TracebackType,
    sqlite3.Connection,
    sqlite3.Cursor,
    type(csv.writer(io.StringIO())),
    type(...),
    type(NotImplemented),
    Store,
)
#: Types whose objects are restored by name only.
NAMED = (
    type,
    types.ModuleType,
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
    np.ufunc,
)
#: C functions: restored by name, or by name and the object to which they are bound.
_OF_C = (types.BuiltinFunctionType, types.MethodWrapperType)
RANDOM = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState, np.random.BitGenerator)
_CONTAINERS: tuple[tuple[type, str], ...] = (
    (dict, "dict"),
    (list, "list"),
    (collections.deque, "deque"),
    (set, "set"),
    (tuple, "tuple"),
    (frozenset, "frozenset"),
)
_ATOMS = (bool, int, float, complex, str, bytes, bytearray)
#: Files in memory.
_BUFFERS = (io.BytesIO, io.StringIO)
#: Types with a kind of their own.
_ALONE: dict[type, str] = {
    array.array: "pyarray",
    concurrent.futures.Future: "future",
    contextlib.ExitStack: "opaque",
    contextvars.ContextVar: "context",
    functools._lru_cache_wrapper: "cache",
    memoryview: "shows",
    re.Match: "opaque",
    sqlite3.Connection: "opaque",
    weakref.ReferenceType: "reference",
    weakref.WeakKeyDictionary: "weak",
    weakref.WeakValueDictionary: "weak",
    weakref.WeakSet: "weak",
}
#: Modules of files that are put back at their place where the script only reads them.
_FILES = frozenset("_io gzip bz2 lzma".split())
_QUEUES = (queue.Queue, queue.LifoQueue, queue.PriorityQueue)
#: Codes of the types of ``ctypes`` whose memory holds numbers, and no addresses.
_NUMBERS_OF_C = frozenset("?bBhHiIlLqQfdg")


def _moment(value: Any) -> tuple[str, int, Any]:
    return value.replace(tzinfo=None).isoformat(), value.fold, _zone(value.tzinfo)


def _at(value: Any, fold: int, zone: Any) -> Any:
    return value.replace(fold=fold, tzinfo=_zone_again(zone))


def _zone(zone: Any) -> Any:
    """The name of a ``ZoneInfo``, or microseconds from UTC. Raises AttributeError for what is neither."""
    if isinstance(zone, datetime.timezone):
        away, *name = zone.__getinitargs__()  # type: ignore[attr-defined]
        return (away // datetime.timedelta(microseconds=1), *name)
    return zone and zone.key


def _zone_again(found: Any) -> Any:
    if isinstance(found, str):
        return importlib.import_module("zoneinfo").ZoneInfo(found)
    return found and datetime.timezone(datetime.timedelta(microseconds=found[0]), *found[1:])


#: Immutable values: what they are made from, and how.
VALUES: dict[type, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    decimal.Decimal: (str, decimal.Decimal),
    fractions.Fraction: (lambda v: (v.numerator, v.denominator), lambda parts: fractions.Fraction(*parts)),
    datetime.datetime: (_moment, lambda parts: _at(datetime.datetime.fromisoformat(parts[0]), *parts[1:])),
    datetime.date: (datetime.date.isoformat, datetime.date.fromisoformat),
    datetime.time: (_moment, lambda parts: _at(datetime.time.fromisoformat(parts[0]), *parts[1:])),
    datetime.timezone: (_zone, lambda parts: _zone_again(parts)),
    datetime.timedelta: (lambda v: (v.days, v.seconds, v.microseconds), lambda parts: datetime.timedelta(*parts)),
    range: (lambda v: (v.start, v.stop, v.step), lambda parts: range(*parts)),
    slice: (lambda v: (v.start, v.stop, v.step), lambda parts: slice(*parts)),
    uuid.UUID: (lambda v: v.int, lambda number: uuid.UUID(int=number)),
    torch.device: (str, torch.device),
    pathlib.PosixPath: (str, pathlib.PosixPath),
    np.dtype: (lambda v: v.str, np.dtype),
    struct.Struct: (lambda v: v.format, struct.Struct),
    re.Pattern: (lambda v: (v.pattern, v.flags), lambda parts: re.compile(*parts)),
    torch.distributed.ProcessGroup: (group_name, group_named),
    itertools.count: (lambda v: v.__reduce__()[1], lambda parts: itertools.count(*parts)),
}

_MEMORIES: tuple[Any, ...] = ([], (), range(0), range(1 << 70), "", "\u20ac", b"")
#: Iterators over plain containers, and what makes one of its container. They can be moved on in place.
ITERATORS: dict[type, tuple[Callable[[Any], Any], Any]] = {
    type(reversed([])): (reversed, []),
    **{type(iter(each)): (iter, each) for each in _MEMORIES},
}


_WRAPPERS = (classmethod, staticmethod)
_OF_CLASSES = (
    types.FunctionType,
    classmethod,
    staticmethod,
    property,
    types.MemberDescriptorType,
    types.GetSetDescriptorType,
    types.ModuleType,
    type,
)


def attributes_of_class(cls: type) -> dict[str, Any]:
    """Its own attributes, without methods, properties and other code that holds nothing."""
    own = {k: v for k, v in vars(cls).items() if not is_dunder(k) and k != "_abc_impl"}
    return {k: unwrapped(v) for k, v in own.items() if _may_change(v)}


def unwrapped(value: Any) -> Any:
    """The function of a class method or static method; anything else as it is."""
    return value.__func__ if isinstance(value, _WRAPPERS) else value


def _may_change(value: Any) -> bool:
    """Whether an attribute of a class is state: also a method that a decorator of the script has made."""
    if isinstance(value, _WRAPPERS):
        return isinstance(value.__func__, types.FunctionType) and _may_change(value.__func__)
    if isinstance(value, types.FunctionType) and not of_libraries(value.__code__.co_filename):
        held = set(value.__code__.co_freevars) - {"__class__"}
        return bool(held or value.__dict__ or any(kind_of(type(each)) != "atom" for each in value.__defaults__ or ()))
    return not isinstance(value, _OF_CLASSES)


def is_dunder(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


#: Folders and files of installed packages that are the script all the same.
SCRIPT_FOLDERS: list[str] = []


def count_as_script(variables: Mapping[str, Any]) -> None:
    """The module with these global variables runs the training loop: its package is the script, also where it is
    installed among the libraries.
    """
    package = (variables.get("__package__") or variables.get("__name__") or "").partition(".")[0]
    module = sys.modules.get(package)
    if module is None or package in LIBRARIES or package == "__main__":
        return
    folders = [os.path.join(each, "") for each in getattr(module, "__path__", ())]
    found = folders or [file for file in (getattr(module, "__file__", None),) if file]
    SCRIPT_FOLDERS.extend(each for each in found if each not in SCRIPT_FOLDERS)


def of_libraries(file: str | None) -> bool:
    """Whether this file of code is part of Python or of an installed package."""
    if file is not None and file.startswith(tuple(SCRIPT_FOLDERS)):
        return False
    return file is None or file.startswith(("<frozen", *_LIBRARIES)) or "site-packages" in file


_KINDS: dict[type, str] = {}


def kind_of(cls: type) -> str:
    """How objects of a type are written: one of the keys in :mod:`.writer`, or ``plain``. Cached by type."""
    known = _KINDS.get(cls)
    if known is None:
        known = _KINDS[cls] = _kind_of(cls)
    return known


def _kind_of(cls: type) -> str:
    if issubclass(cls, torch.Tensor):
        return "tensor" if cls in (torch.Tensor, nn.Parameter, nn.Buffer) else "opaque"
    if issubclass(cls, np.ndarray):
        return "ndarray" if cls is np.ndarray else "opaque"
    if issubclass(cls, (np.generic, torch.dtype, torch.Size)):
        return "plain"
    if cls in VALUES or issubclass(cls, (np.dtype, torch.distributed.ProcessGroup)):
        return "value"
    if issubclass(cls, enum.Enum):
        return "enum"
    if cls is types.FunctionType:
        return "function"
    if cls is types.MethodType:
        return "method"
    if cls is functools.partial:
        return "partial"
    if cls in _OF_C:
        return "bound"
    if issubclass(cls, NAMED):
        return "named"
    if issubclass(cls, RANDOM):
        return "random"
    if cls in _BUFFERS:
        return "buffer"
    if cls in _ALONE:
        return _ALONE[cls]
    if issubclass(cls, logging.Logger):
        return "logger"
    if issubclass(cls, threading.local):  # what it holds for the thread that runs the script
        return "object"
    if issubclass(cls, io.IOBase) and root_of(cls) in _FILES:
        return "file"
    if issubclass(cls, IGNORED):
        return "ignored"
    if issubclass(cls, SynchronizedBase) or _is_number_of_c(cls):
        return "memory"
    if cls in _QUEUES:
        return "queue"
    if cls in ITERATORS:
        return "iterator"
    for base, name in _CONTAINERS:
        if issubclass(cls, base):
            return name
    if issubclass(cls, _ATOMS):
        return "atom"
    if cls in (types.SimpleNamespace, argparse.Namespace):
        return "object"
    if issubclass(cls, torch.jit.ScriptModule):
        return "scripted"
    if issubclass(cls, nn.Module):
        return "fixed" if any(root_of(base) in _ENGINES for base in cls.__mro__) else "module"
    if root_of(cls) == "torch" and hasattr(cls, "__next__"):  # of a DataLoader
        return "opaque"
    if issubclass(cls, torch.optim.Optimizer) and not any(root_of(base) in FRAMEWORKS for base in cls.__mro__):
        return "optimizer"
    if _left_to_others(cls):
        return "fixed"
    return "object" if _is_made_of_attributes(cls) else "opaque"


def root_of(cls: type) -> str:
    return cls.__module__.partition(".")[0]


def is_of_library(cls: type) -> bool:
    """Whether a class is one of torch or of a framework: all that its objects hold belongs to them."""
    return root_of(cls) in LIBRARIES


def _left_to_others(cls: type) -> bool:
    if issubclass(cls, torch.utils.data.DataLoader):
        return True
    if any(root_of(base) in _ADAPTED for base in cls.__mro__):
        return True
    root = root_of(cls)
    return root in FRAMEWORKS or (root == "torch" and not cls.__module__.startswith(_OF_TORCH))


def _is_number_of_c(cls: type) -> bool:
    """Whether it is a number of ``ctypes``, or an array of numbers."""
    code = getattr(cls, "_type_", None)
    if issubclass(cls, ctypes.Array):
        return isinstance(code, type) and _is_number_of_c(code)
    return root_of(cls) == "ctypes" and isinstance(code, str) and code in _NUMBERS_OF_C


def numbers_of_c(thing: Any) -> Any:
    """The object of ``ctypes`` of the kind ``memory``, also where ``multiprocessing`` shares it."""
    return thing.get_obj() if isinstance(thing, SynchronizedBase) else thing


def _is_made_of_attributes(cls: type) -> bool:
    """Whether all that makes an object of it is in its ``__dict__`` and ``__slots__``."""
    for base in cls.__mro__[:-1]:
        if not base.__flags__ & (1 << 9) or isinstance(base.__dict__.get("__new__"), types.BuiltinFunctionType):
            return False  # a type in C, which may keep what no attribute shows
        if _is_extension(base.__module__):
            return False
    return hasattr(cls, "__dict__") and ("__dict__" in _members(cls) or bool(slots_of(cls)))


def _is_extension(module: str) -> bool:
    found = sys.modules.get(module)
    if found is None or module == "__main__":
        return False
    file = getattr(found, "__file__", None)
    return module in sys.builtin_module_names or (isinstance(file, str) and file.endswith((".so", ".pyd")))


def _members(cls: type) -> set[str]:
    return {name for base in cls.__mro__ for name in base.__dict__}


def is_bound(function: Any) -> bool:
    """Whether a C function is bound to an object; others are found by their names."""
    return not isinstance(getattr(function, "__self__", None), (types.ModuleType, type, type(None)))


_SLOTS: dict[type, tuple[types.MemberDescriptorType, ...]] = {}


def slots_of(cls: type) -> tuple[types.MemberDescriptorType, ...]:
    """Descriptors of what objects of a type keep outside their ``__dict__``. Cached by type."""
    known = _SLOTS.get(cls)
    if known is None:
        known = _SLOTS[cls] = tuple(
            each
            for base in cls.__mro__
            for name, each in base.__dict__.items()
            if isinstance(each, types.MemberDescriptorType) and name not in ("__dict__", "__weakref__")
        )
    return known


def name_of(thing: Any) -> str:
    """``module:qualname``, by which another process that runs the same script finds a class, function or module."""
    if isinstance(thing, types.ModuleType):
        return f"{thing.__name__}:"
    path = getattr(thing, "__qualname__", type(thing).__qualname__)
    return f"{getattr(thing, '__module__', None)}:{path.removeprefix('_VariableFunctionsClass.')}"  # torch.relu


def is_made_in_a_function(thing: Any) -> bool:
    """Whether it is a class of the script that no name of a module leads to."""
    if not isinstance(thing, type) or "<locals>" not in thing.__qualname__ or is_of_library(thing):
        return False
    return not of_libraries(getattr(sys.modules.get(thing.__module__), "__file__", None))


def is_loaded_apart(thing: Any) -> bool:
    """Whether it is a module that the script has made or loaded by itself, such as a file of settings."""
    if type(thing) is not types.ModuleType:
        return False
    file = getattr(thing, "__file__", None)
    if file is None:
        return thing.__spec__ is None and thing.__name__.partition(".")[0] not in LIBRARIES
    return sys.modules.get(thing.__name__) is not thing and not of_libraries(file)


@functools.cache
def of_every_optimizer() -> frozenset[str]:
    """Attributes of optimizers that others put back."""
    return frozenset(vars(torch.optim.SGD([torch.zeros(1)], lr=0.1)))


class OfItsClass:
    """Names of attributes that a class of torch gives its objects by itself; all others are a script's."""

    def __init__(self, thing: Any) -> None:
        cls: Any = type(thing)
        self._thing, self._names = thing, _stored_by(cls)

    def __contains__(self, name: object) -> bool:
        # what pruning and weight_norm make of a parameter before each forward has its name without an ending
        made = any(each.startswith(f"{name}_") for each in vars(self._thing).get("_parameters", ()))
        return made or str(name).startswith("_") or name in self._names


_STORE, _LOAD, _EXTENDED = (dis.opmap[each] for each in ("STORE_ATTR", "LOAD_ATTR", "EXTENDED_ARG"))
_COPY, _SWAP, _CACHE, _FAST = (dis.opmap[each] for each in ("COPY", "SWAP", "CACHE", "LOAD_FAST"))
_ROOTS = {dis.opmap["LOAD_GLOBAL"]: 1, dis.opmap["LOAD_NAME"]: 0}
#: Bits of an argument that are none of a name's number.
_MARKED = int(sys.version_info >= (3, 12))


@functools.cache
def _stored_by(cls: type) -> frozenset[str]:
    found = {"step", "forward"}  # schedulers and Accelerate put others in their places
    for each in (value for base in cls.__mro__ if is_of_library(base) for value in vars(base).values()):
        codes = [getattr(inspect.unwrap(unwrapped(each)), "__code__", None)]
        while codes:
            if isinstance(code := codes.pop(), types.CodeType):
                codes += code.co_consts
                found.update(attributes_stored(code))
    return frozenset(found)


def attributes_stored(code: types.CodeType) -> Iterator[str]:
    """As :func:`dis.get_instructions` would tell, which takes 0.3 s for ``DistributedDataParallel`` alone."""
    raw, more = code.co_code, 0
    for op, low in zip(raw[::2], raw[1::2], strict=True) if _STORE in raw[::2] else ():
        number = more | low
        more = number << 8 if op == _EXTENDED else 0
        if op == _STORE:
            yield code.co_names[number]


def attributes_given(code: types.CodeType) -> Iterator[tuple[str, ...]]:
    """Attributes that code stores in something else than ``self``, after the names of a global variable and what is
    below it, where these lead to what it stores in: ``("torch", "nn", "Linear", "count")``.
    """
    raw, at = code.co_code, -1
    while (at := raw.find(_STORE, at + 1)) >= 0:
        if at % 2:
            continue
        path, back = [code.co_names[_argument(raw, at)]], _before(raw, at)
        if raw[back] == _SWAP:  # of an augmented assignment: what it stores in was copied before it was read
            index = raw[at + 1] << _MARKED & 0xFF
            back = _before(raw, raw.rfind(bytes((_COPY, 1, _LOAD, index)), 0, at))
        while back >= 0 and raw[back] == _LOAD:
            path.append(code.co_names[_argument(raw, back) >> _MARKED])
            back = _before(raw, back)
        if back >= 0 and raw[back] in _ROOTS:
            path.append(code.co_names[_argument(raw, back) >> _ROOTS[raw[back]]])
            yield tuple(reversed(path))
        elif back < 0 or raw[back] != _FAST or raw[back + 1] or code.co_varnames[0] != "self" or len(path) > 1:
            yield (path[0],)


def _argument(raw: bytes, at: int) -> int:
    return raw[at + 1] | (raw[at - 1] << 8 if at and raw[at - 2] == _EXTENDED else 0)


def _before(raw: bytes, at: int) -> int:
    """Place of the instruction before this one."""
    at -= 4 if at > 2 and raw[at - 2] == _EXTENDED else 2
    while at > 0 and raw[at] == _CACHE:
        at -= 2
    return at


def attributes_of_tensor(tensor: torch.Tensor) -> dict[str, Any]:
    """What a script has added to a tensor. Those of libraries begin with ``_``, or with ``ds_``, as DeepSpeed's do."""
    own = tensor.__dict__
    return {k: v for k, v in own.items() if not k.startswith(("_", "ds_"))} if own else {}

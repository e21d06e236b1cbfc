"""Attributes of user objects as plain data, and back in place.

Published state may hold numbers, text, containers, tensors and arrays only. :func:`encode` turns the rest that counts
as state (enumerations, random generators, scalar tensors, which are cheaper as numbers) into tagged tuples; what is no
state raises :class:`NotPlain`.
"""

from __future__ import annotations

import datetime
import functools
import pathlib
import random
import sys
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from shared_core.encoding.unpacking import dtype_named
from shared_core.errors import CorruptFile
from shared_core.loaders.randomness import generator_state, set_generator_state

#: Types published as they are. Subclasses are not: an enumeration of integers is more than an integer.
ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes})
_SCALAR, _TUPLE, _ENUM, _GENERATOR, _SET, _FROZEN = "\0scalar", "\0tuple", "\0enum", "\0generator", "\0set", "\0frozen"
_ARRAY, _SMALL = "\0array", 256
_NAMES = {kind: str(kind).removeprefix("torch.") for kind in vars(torch).values() if isinstance(kind, torch.dtype)}
_AS_IS = (torch.dtype, torch.Size, datetime.timedelta, datetime.datetime, pathlib.PurePath, np.generic)
_GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
_MAPPINGS = frozenset({dict, OrderedDict, defaultdict, Counter})
_DICTS = ("\0dict", "\0defaultdict")


class NotPlain(Exception):
    """The value is no state that can be published."""


def encode(value: Any) -> Any:
    """``value`` as data that can be published, else NotPlain. Large tensors and arrays are not copied."""
    kind = type(value)
    if kind in ATOMS:
        return value
    encoder = _ENCODERS.get(kind)
    if encoder is not None:
        return encoder(value)
    if isinstance(value, Enum):
        return (_ENUM, kind.__module__, kind.__qualname__, value.name)
    if isinstance(value, _GENERATORS):
        return (_GENERATOR, generator_state(value))
    if isinstance(value, Tensor) and not isinstance(value, torch.nn.Parameter):
        return _tensor(value)
    if isinstance(value, np.ndarray) and value.dtype != object or isinstance(value, _AS_IS):
        return value
    raise NotPlain(kind.__name__)


def holds_weights(each: Any) -> bool:
    """Whether an object with ``state_dict`` or plain attributes holds what looks like weights: a matrix of floats.

    Averages do; then the script changes weights outside updates, or is going to.
    """
    return _matrix_in(each.state_dict() if hasattr(each, "state_dict") else vars(each))


def holds_more(scheduler: Any) -> bool:
    """Whether a scheduler holds what its ``state_dict`` does not give: it is of a class of the script's, or calls
    functions that keep something.
    """
    if not type(scheduler).__module__.startswith(("torch.", "lightning.")):
        return True
    held = [each for value in vars(scheduler).values() for each in (value if type(value) is list else [value])]
    return any(_keeps(each) or isinstance(each, LRScheduler) and holds_more(each) for each in held)


def _keeps(function: Any) -> bool:
    if isinstance(function, functools.partial):
        given = (*function.args, *function.keywords.values())
        return _keeps(function.func) or any(type(each) not in ATOMS for each in given)
    if isinstance(function, types.MethodType):
        return not isinstance(function.__self__, LRScheduler)
    return isinstance(function, types.FunctionType) and bool(function.__closure__ or function.__defaults__)


def _matrix_in(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.ndim > 1 and value.is_floating_point()
    if isinstance(value, dict):
        return any(map(_matrix_in, value.values()))
    return isinstance(value, (list, tuple)) and any(map(_matrix_in, value))


def encode_state(state: Any) -> Any:
    """Encode a ``state_dict``. Functions and similar values are left out: the replacement makes its own."""
    if isinstance(state, dict):
        kept = []
        for name, value in state.items():
            try:
                kept.append((name, encode_state(value)))
            except NotPlain:
                continue
        return ("\0dict", kept)
    if type(state) is list:
        return [encode_state(value) for value in state]
    return encode(state)


def _tensor(value: Tensor) -> Any:
    if hasattr(value, "device_mesh"):
        raise NotPlain("DTensor, of which each rank has a part (tensor parallelism is not supported)")
    if value.is_cpu and not value.requires_grad and value.layout is torch.strided:
        # Small tensors travel as numbers or bytes, which are several times cheaper to publish.
        if value.ndim == 0:
            number = value.item()
            if number == number:  # the bits of a NaN would not survive
                return (_SCALAR, _NAMES[value.dtype], number)
        elif 0 < value.numel() <= _SMALL:
            data = value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            return (_ARRAY, _NAMES[value.dtype], tuple(value.shape), data)
        return value.detach()
    if value.requires_grad and value.is_leaf or value.is_meta or value.layout is not torch.strided:
        raise NotPlain("Tensor")
    return value.detach()


def _list(value: list[Any]) -> list[Any]:
    return [v if type(v) in ATOMS else encode(v) for v in value]


def _mapping(value: dict[Any, Any]) -> Any:
    items = [(encode(k), v if type(v) in ATOMS else encode(v)) for k, v in value.items()]
    return (_mapping_tag(type(value)), items)


def _mapping_tag(kind: type) -> str:
    return "\0" + kind.__name__


_ENCODERS: dict[type, Callable[[Any], Any]] = {
    Tensor: _tensor,
    list: _list,
    tuple: lambda value: (_TUPLE, _list(value)),
    deque: lambda value: ("\0deque", _list(list(value)), value.maxlen),
    set: lambda value: (_SET, _list(sorted(value, key=repr))),
    frozenset: lambda value: (_FROZEN, _list(sorted(value, key=repr))),
}
_ENCODERS.update(dict.fromkeys(_MAPPINGS, _mapping))


def decode(data: Any) -> Any:
    """Inverse of :func:`encode`, as new objects; generators cannot be made again and come out as None.

    Raises CorruptFile if :func:`encode` does not make this, or it names an enumeration of a module that this program
    has not imported.
    """
    try:
        return _decode(data)
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CorruptFile(f"a published value cannot be made again: {error or type(error).__name__}") from error


def _decode(data: Any) -> Any:
    if type(data) is list:
        return [_decode(v) for v in data]
    if type(data) is not tuple:
        return data
    tag = data[0]
    if tag == _SCALAR:
        return torch.tensor(data[2], dtype=dtype_named(data[1]))
    if tag == _ARRAY:
        return torch.frombuffer(bytearray(data[3]), dtype=dtype_named(data[1])).view(data[2])
    if tag == _TUPLE:
        return tuple(_decode(v) for v in data[1])
    if tag == _ENUM:
        return _member(*data[1:])
    if tag == _SET:
        return {_decode(v) for v in data[1]}
    if tag == _FROZEN:
        return frozenset(_decode(v) for v in data[1])
    if tag == "\0deque":
        return deque((_decode(v) for v in data[1]), maxlen=data[2])
    if tag == "\0OrderedDict":
        return OrderedDict((_decode(k), _decode(v)) for k, v in data[1])
    if tag == "\0Counter":
        return Counter({_decode(k): _decode(v) for k, v in data[1]})
    if tag == _GENERATOR:
        return None
    if tag not in _DICTS:
        raise ValueError(f"there is no kind {tag!r:.40}")
    return {_decode(k): _decode(v) for k, v in data[1]}


def _member(module: str, kind: str, name: str) -> Any:
    """A member of an enumeration of an imported module. Looked up in dictionaries: ``__getattr__`` may import."""
    found: Any = sys.modules.get(module)
    if found is None:
        raise ValueError(
            f"the script has not imported {module}, which holds {kind}: import it at the start of the script"
        )
    for part in kind.split("."):
        found = vars(found)[part]
    if not (isinstance(found, type) and issubclass(found, Enum)):
        raise ValueError(f"{module}.{kind} is not an enumeration")
    return found.__members__[name]


def assign(existing: Any, data: Any) -> Any:
    """What an attribute that holds ``existing`` should hold for ``data``.

    Containers and generators are changed in place, since others may hold them, too; all else is a new object.
    """
    if type(data) is tuple and data[0] == _GENERATOR:
        if isinstance(existing, _GENERATORS):
            set_generator_state(existing, data[1])
        return existing
    value = decode(data)
    if type(existing) in _MAPPINGS and isinstance(value, dict):
        existing.clear()
        existing.update(value)
        return existing
    if type(existing) is type(value) and type(value) in (list, set, deque):
        existing.clear()
        if isinstance(value, set):
            existing.update(value)
        else:
            existing.extend(value)
        return existing
    return value

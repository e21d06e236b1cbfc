"""Records that the processes of a job leave for each other, in its store and in files: checked when they are read.

A shape is a type: a dataclass, a ``TypedDict``, an ``Enum``, ``list[str]``, ``tuple[Count, ...]``, ``dict[str, X]``,
``dict[Count, X]``, ``set[Count]``, ``X | None``, ``Any`` for whatever JSON holds. Who defines a record so defines once
what every reader of it accepts. What is stored is JSON, or a word.
"""

from __future__ import annotations

import json
import math
import re
import reprlib
import types
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Annotated, Any, Literal, Self, Union, get_args, get_origin, get_type_hints, is_typeddict

from shared_core.errors import DamagedRecord
from shared_core.plain_json import parse

#: The largest count: every reader of JSON keeps it exactly.
MOST = 2**53 - 1
#: Whole numbers without bounds of their own fit in so many bits, without the sign.
_BITS = 64


@dataclass(frozen=True)
class Between:
    """Bounds of a number."""

    least: float
    most: float

    def wrong(self, value: Any) -> str:
        """What is wrong with a number; empty if nothing is."""
        return "" if self.least <= value <= self.most else f"not between {self.least} and {self.most}"


@dataclass(frozen=True)
class Form:
    """Form of a text: a pattern for all of it, and a name of the form for messages."""

    pattern: str
    what: str

    def wrong(self, value: str) -> str:
        """What is wrong with a text; empty if nothing is."""
        return "" if re.fullmatch(self.pattern, value) else f"not {self.what}"


#: How many, or the number of one of them.
Count = Annotated[int, Between(0, MOST)]
Port = Annotated[int, Between(1, 65535)]
#: Part of the name of a file or folder; may be empty.
Name = Annotated[str, Form(r"[^/\x00-\x1f]{0,200}", "part of a file's name")]
FILE_NAME = Form(r"[A-Za-z0-9][A-Za-z0-9._-]*", "the name of a file")
FileName = Annotated[str, FILE_NAME]
#: Text that the system gives, as paths and variables: bytes that are no UTF-8 are half pairs of surrogates in it.
OsText = Annotated[str, Form(r"[^\0\ud800-\udc7f\udd00-\udfff]*", "text of the system")]

_SCALARS = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}


class _Wrong(ValueError):
    """What is wrong, and where."""

    def __init__(self, what: str, value: Any) -> None:
        super().__init__(what)
        self.what, self.value, self.place = what, value, ""

    def inside(self, place: str) -> _Wrong:
        self.place = place + self.place
        return self

    def __str__(self) -> str:
        return f"{self.place.lstrip('.') or 'it'} is {_SHORT.repr(self.value)}, {self.what}"


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 80
_SHORT.maxlevel = _SHORT.maxlist = _SHORT.maxdict = 3


def damaged(key: str, wrong: str, advice: str = "") -> DamagedRecord:
    """The error for an entry of the job's store. ``advice`` replaces the usual one."""
    return DamagedRecord(
        f"the entry {key} in the job's store is damaged or was written by something else: {wrong}; "
        + (advice or "start the job again, and let nothing else reach its store")
    )


def decode(raw: bytes | str, shape: Any, key: str, advice: str = "") -> Any:
    """A JSON record as a value of type ``shape``, see the module. Raises DamagedRecord if it does not fit. ``key``:
    where it was, for the message; ``advice``: see :func:`damaged`.
    """
    try:
        return fit(parse(raw if isinstance(raw, str) else bytes(raw).decode()), shape)
    except _Wrong as wrong:
        raise damaged(key, str(wrong), advice) from None
    except ValueError as error:
        raise damaged(key, f"it is not JSON ({error})", advice) from None


def dumps(value: Any) -> str:
    """What :func:`decode` reads: dataclasses as objects, enumerations as their values, sets as lists."""
    return json.dumps(value, separators=(",", ":"), default=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    return sorted(value) if isinstance(value, set | frozenset) else vars(value)


@dataclass(frozen=True)
class Record:
    """A record whose JSON has all of its fields, those with defaults too."""

    def to_json(self) -> str:
        return dumps(self)


@dataclass(frozen=True)
class FramedRecord(Record):
    """A record that is checked by its shape alone."""

    @classmethod
    def from_json(cls, raw: bytes | str, key: str = "", rank: int | None = None) -> Self:
        """Inverse of :meth:`to_json`. Raises DamagedRecord if it does not fit, or is not of ``rank``."""
        found: Self = decode(raw, cls, key or cls.__name__)
        if rank is not None and rank != (said := getattr(found, "rank", None)):
            raise damaged(key, f"its rank is {said}")
        return found


def text(raw: bytes, key: str, shape: Any = str) -> str:
    """A record that is plain text, of a shape. Raises DamagedRecord if it does not fit."""
    try:
        found: str = fit(bytes(raw).decode(), shape)
        return found
    except _Wrong as wrong:
        raise damaged(key, str(wrong)) from None
    except UnicodeDecodeError as error:
        raise damaged(key, f"it is not text ({error})") from None


def fit(value: Any, shape: Any) -> Any:
    """Plain data as a value of type ``shape``. Entries of objects that the shape does not name are left out. Raises
    ValueError that says where it does not fit, and why.
    """
    kind, arguments = get_origin(shape) or shape, get_args(shape)
    if kind is Any:
        return value
    if kind is Annotated:
        found = value if shape == OsText and isinstance(value, str) else fit(value, arguments[0])
        for bound in arguments[1:]:
            if wrong := bound.wrong(found):
                raise _Wrong(wrong, value)
        return found
    if kind in (Union, types.UnionType):
        (other,) = (each for each in arguments if each is not types.NoneType)
        return None if value is None else fit(value, other)
    if kind is Literal:
        if not isinstance(value, str) or value not in arguments:
            raise _Wrong(f"not one of {', '.join(arguments)}", value)
        return value
    if kind is object:  # any scalar, or None
        if value is not None and type(value) not in _SCALARS:
            raise _Wrong("not text, a number or a truth value", value)
        return None if value is None else _scalar(value, type(value))
    if kind in (list, tuple, set, frozenset):
        return kind(_items(value, kind, arguments))
    if kind in (dict, Mapping):
        named, shape = arguments
        return {_at(f".{key}", _key(key, named), named): _at(f".{key}", each, shape) for key, each in _object(value)}
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind(fit(value, Literal[tuple(each.value for each in kind)]))
    if is_dataclass(kind) or is_typeddict(kind):
        return kind(**_members(dict(_object(value)), kind))
    return _scalar(value, kind)


def _at(place: str, value: Any, shape: Any) -> Any:
    try:
        return fit(value, shape)
    except _Wrong as wrong:
        raise wrong.inside(place) from None


def _items(value: Any, kind: type, arguments: tuple[Any, ...]) -> list[Any]:
    if not isinstance(value, list):
        raise _Wrong("not a list", value)
    if kind is not tuple or arguments[-1] is Ellipsis:
        arguments = (arguments[0],) * len(value)
    elif len(value) != len(arguments):
        raise _Wrong(f"not a list of {len(arguments)}", value)
    return [_at(f"[{place}]", each, shape) for place, (each, shape) in enumerate(zip(value, arguments, strict=True))]


def _key(key: str, shape: Any) -> Any:
    """Names in JSON are text, also those that are numbers."""
    return int(key) if shape == Count and key.isdecimal() else key


def _object(value: Any) -> Iterable[tuple[str, Any]]:
    if not isinstance(value, dict):
        raise _Wrong("not an object", value)
    return value.items()


def _members(values: dict[str, Any], kind: Any) -> dict[str, Any]:
    shapes, needed = _shapes(kind)
    for name in needed:
        if name not in values:
            raise _Wrong(f"without {name!r}", values)
    return {name: _at(f".{name}", values[name], shape) for name, shape in shapes.items() if name in values}


@cache
def _shapes(kind: Any) -> tuple[dict[str, Any], frozenset[str]]:
    """Shapes by name, and the names that must be there."""
    shapes, all_of_it = get_type_hints(kind, include_extras=True), issubclass(kind, Record)
    if not is_dataclass(kind):
        return shapes, frozenset(kind.__required_keys__)
    fixed = {e.name for e in fields(kind) if all_of_it or (e.default is MISSING and e.default_factory is MISSING)}
    return {each.name: shapes[each.name] for each in fields(kind)}, frozenset(fixed)


def _scalar(value: Any, kind: Any) -> Any:
    if kind is float and isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << _BITS:
        return float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise _Wrong(f"not {_SCALARS[kind]}", value)
    if kind is int and abs(value) >= 1 << _BITS:
        raise _Wrong("too large", value)
    if kind is float and not math.isfinite(value):
        raise _Wrong("not finite", value)
    if kind is str and not _is_unicode(value):
        raise _Wrong("not text", value)
    return value


def _is_unicode(value: str) -> bool:
    """JSON can hold half a pair of surrogates; nothing else can."""
    return value.isascii() or not any("\ud800" <= each <= "\udfff" for each in value)

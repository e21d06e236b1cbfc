"""Looks up the private names that the product uses of a framework, by looking at it only.

A name is ``module:place`` or ``module:place(parameters)``. A place is that of a function, a class, or what a class or
its instances have: something that it defines, or that one of its functions stores. ``A or B``: versions differ, and
one of them is there.
"""

from __future__ import annotations

import dis
import importlib
import inspect
from collections.abc import Iterator
from types import CodeType
from typing import Any


def what_is_wrong(name: str) -> str | None:
    """Why a name is not what it was; None if it is."""
    if " or " in name:
        found = [_what_is_wrong(each) for each in name.split(" or ")]
        return None if None in found else "; ".join(filter(None, found))
    return _what_is_wrong(name)


def _what_is_wrong(name: str) -> str | None:
    place, _, parameters = name.partition("(")
    module, _, path = place.partition(":")
    try:
        owner: Any = importlib.import_module(module)
    except ImportError as error:
        return f"{module} cannot be imported: {error}"
    *owners, last = path.split(".")
    for part in owners:
        if not hasattr(owner, part):
            return f"{module} has no {part}"
        owner = getattr(owner, part)
    if not hasattr(owner, last):
        if isinstance(owner, type) and last in stored_by(owner):
            return None
        if inspect.isfunction(owner) and last in _stored(inspect.unwrap(owner).__code__):
            return None
        return f"{module}:{'.'.join(owners)} has no {last}"
    if parameters:
        found = ", ".join(parameters_of(getattr(owner, last)))
        if found != parameters.rstrip(")"):
            return f"{place} takes ({found}), not ({parameters}"
    return None


def parameters_of(function: Any) -> Iterator[str]:
    """Names of the parameters, as they are written; their defaults left out."""
    prefix = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    for each in inspect.signature(function).parameters.values():
        yield prefix.get(each.kind, "") + each.name


def stored_by(kind: type) -> set[str]:
    """Attributes that the functions of a class, or of its bases, store somewhere, and those it only declares."""
    found: set[str] = set()
    for base in kind.__mro__:
        found |= set(getattr(base, "__annotations__", ()))
        for function in vars(base).values():
            code = getattr(inspect.unwrap(function) if callable(function) else function, "__code__", None)
            if code is not None:
                found |= set(_stored(code))
    return found


def _stored(code: CodeType) -> Iterator[str]:
    yield from (each.argval for each in dis.get_instructions(code) if each.opname == "STORE_ATTR")
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _stored(constant)

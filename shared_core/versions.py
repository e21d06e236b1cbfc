"""Versions of frameworks: which were tested, and whether another one has the private names that are used of it.

A name is ``module:place`` or ``module:place(parameters)``. A place is that of a function, a class, or what a class or
its instances have: something that it defines, or that one of its functions stores. ``A or B``: versions differ, and one
of them is there. A framework is only looked at; nothing of it runs but its imports.
"""

from __future__ import annotations

import dis
import importlib
import importlib.metadata
import inspect
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Any

from shared_core.errors import Unsupported
from shared_core.events import console_once


@dataclass(frozen=True)
class Tested:
    """The versions of a framework that were tested: older than ``first`` are refused, newer than ``last`` looked at."""

    framework: str
    first: str
    last: str

    def __str__(self) -> str:
        return f"{self.framework} {self.first}" + (f" to {self.last}" if self.last != self.first else "")


def installed(distribution: str) -> str | None:
    """Its version; None if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_version(tested: Tested, names: Iterable[tuple[str, str]]) -> None:
    """Raise Unsupported for a framework that is too old, or newer and without one of the private ``names``."""
    found = str(getattr(sys.modules[tested.framework], "__version__", ""))
    version = _numbers(found)
    what = f"{tested.framework} {found}"
    if not version or _numbers(tested.first) <= version <= _numbers(tested.last):
        return
    if version < _numbers(tested.first):
        raise Unsupported(f"{what} is too old: {tested} were tested. Install one of these")
    gone = [(place, why) for name, why in names if (place := what_is_wrong(name, tested.framework)) is not None]
    if gone:
        more = f", and {len(gone) - 1} more" if len(gone) > 1 else ""
        raise Unsupported(
            f"{what} is newer than what was tested ({tested}), and lacks what is needed of it: {gone[0][0]} "
            f"(needed because: {gone[0][1]}){more}. Install one of the tested versions, or a newer swift-recovery"
        )
    console_once(f"version of {tested.framework}", f"{what} is newer than what was tested ({tested}); all is there")


def _numbers(version: str) -> tuple[int, ...]:
    """Its major and minor number; empty for what is no version."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return tuple(map(int, found.groups())) if found is not None else ()


def what_is_wrong(name: str, package: str = "") -> str | None:
    """Why a name is not what it was; None if it is. Names that do not begin with ``package`` are taken as right."""
    found = [_what_is_wrong(each) for each in name.split(" or ") if each.startswith(package)]
    return None if None in found or not found else "; ".join(filter(None, found))


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
    for each in inspect.signature(function).parameters.values():
        stars: dict[Any, int] = {inspect.Parameter.VAR_POSITIONAL: 1, inspect.Parameter.VAR_KEYWORD: 2}
        yield "*" * stars.get(each.kind, 0) + each.name


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

"""Which variables of a run hold other values than when its loop began."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from typing import Any

from shared_core.encoding.unpacking import Numbered

_BYTES = 8


def digests(values: Iterable[Any], rows: Iterable[Any]) -> dict[str, dict[str, bytes]]:
    """A digest of each variable's value, by scope and name. Within one run equal values have equal digests; what cannot
    be read always differs. ``values`` are the scopes of a capture, as they were read; ``rows`` describe its objects.
    """
    described = {row[0]: row[1:] for row in rows if row is not None}
    found: dict[str, dict[str, bytes]] = {}
    for scope, _, _, names, held in values:
        own = found.setdefault(scope, {})
        for name, value in zip(names.split(), held, strict=True):
            own[name] = _digest(value, described)
    return found


def alike(
    start: Mapping[str, Mapping[str, bytes]], boundary: Mapping[str, Mapping[str, bytes]]
) -> dict[str, dict[str, bytes]]:
    """The digests of both, and one that no value has for a variable whose values differ: what the script changes
    between the start of an epoch and its first step boundary has no value that a later start gives it, too.
    """
    both = {scope: {**start.get(scope, {}), **boundary.get(scope, {})} for scope in start.keys() | boundary.keys()}
    return {
        scope: {name: each if start.get(scope, {}).get(name, each) == each else b"" for name, each in own.items()}
        for scope, own in both.items()
    }


def changed(
    first: Mapping[str, Mapping[str, bytes]], values: Iterable[Any], rows: Iterable[Any]
) -> set[tuple[str, str]]:
    """(scope, name) of the variables that hold another value than in ``first``, or are new."""
    return {
        (scope, name)
        for scope, own in digests(values, rows).items()
        for name, digest in own.items()
        if first.get(scope, {}).get(name) != digest
    }


def _digest(value: Any, described: Mapping[int, Any]) -> bytes:
    hashed = hashlib.blake2b(digest_size=_BYTES)
    seen: dict[int, int] = {}
    containers: dict[int, int] = {}  # they may hold themselves
    todo = [value]
    while todo:
        one = todo.pop()
        if isinstance(one, (list, dict)):
            if id(one) in containers:
                hashed.update(b"container %d" % containers[id(one)])
                continue
            containers[id(one)] = len(containers)
        if isinstance(one, Numbered):
            known = seen.get(one.number)
            if known is None:
                seen[one.number] = len(seen)
                row = described[one.number]
                todo.append(os.urandom(_BYTES) if row[0] == "opaque" and row[2] is None else row)  # it may have changed
            else:
                hashed.update(b"again %d" % known)  # numbers are others in each capture
        elif isinstance(one, (list, tuple)):
            hashed.update(f"{type(one).__name__} {len(one)} ".encode())
            todo.extend(reversed(one))
        elif isinstance(one, dict):
            hashed.update(f"dict {len(one)} ".encode())
            todo.extend(part for item in reversed(one.items()) for part in reversed(item))
        elif isinstance(one, (set, frozenset)):
            plain = sorted(repr(each) for each in one if not isinstance(each, Numbered))
            hashed.update(f"{type(one).__name__} {len(one)} {plain}".encode())
        elif isinstance(one, (bytes, bytearray)):
            hashed.update(b"bytes %d " % len(one))
            hashed.update(one)
        else:
            hashed.update(f"{type(one).__name__} {one!r} ".encode())  # by its text, as a NaN is what it was
    return hashed.digest()

"""Which variables two captures of one run hold different values in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from shared_core.encoding.unpacking import Numbered


def changed(first: tuple[Any, Any], now: tuple[Any, Any]) -> set[tuple[str, str]]:
    """(scope, name) of the variables of ``now`` that ``first`` has not, or with another value.

    Args:
        first: scopes and descriptions, as they were when the loop began.
        now: the same, as they are.
    """
    before = {
        (scope, name): value
        for scope, _, names, values in first[0]
        for name, value in zip(names.split(), values, strict=True)
    }
    ours, theirs = _by_number(first[1]), _by_number(now[1])
    return {
        (scope, name)
        for scope, _, names, values in now[0]
        for name, value in zip(names.split(), values, strict=True)
        if (scope, name) not in before or not _equal(before[scope, name], ours, value, theirs)
    }


def _by_number(rows: Iterable[Any]) -> dict[int, Any]:
    return {row[0]: row[1:] for row in rows if row is not None}


def _equal(one: Any, ours: Mapping[int, Any], other: Any, theirs: Mapping[int, Any]) -> bool:
    seen: set[tuple[int, int]] = set()
    todo = [(one, other)]
    while todo:
        one, other = todo.pop()
        if type(one) is not type(other):
            return False
        if isinstance(one, Numbered):
            if (pair := (one.number, other.number)) not in seen:
                seen.add(pair)
                todo.append((ours[one.number], theirs[other.number]))
        elif isinstance(one, (list, tuple)):
            if len(one) != len(other):
                return False
            todo.extend(zip(one, other, strict=True))
        elif isinstance(one, dict):
            if len(one) != len(other):
                return False
            todo.extend(zip(one.items(), other.items(), strict=True))
        elif isinstance(one, (set, frozenset)):
            if len(one) != len(other) or any(not isinstance(each, Numbered) for each in one ^ other):
                return False
        elif one is not other and repr(one) != repr(other):  # a NaN is what it was
            return False
    return True
